"""What several test files need: small runs as plain data and as overrides."""

from __future__ import annotations

import copy
import errno
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import conf
from analysis.comparison.ratio import ERROR, Ends, Spread
from launch.sweep import PlannedRun, expand
from launch.sweep.compose import compose_plain, group_choices, resolve
from parallelbench.config.build import build, from_mapping
from parallelbench.config.run import RunConfig

TINY = (
    "data=synthetic",
    "data.channels=1",
    "data.image_size=8",
    "data.train_samples=64",
    "data.test_samples=30",
    "batch_size=32",
    "model=logistic_regression",
    "device=cpu",
)
"""Overrides of a run of two steps per epoch that any machine does in no time."""


def interval(ratios: Sequence[float], pools: Sequence[int] = (), *, error: float = ERROR) -> Ends | None:
    """Interval of positive ratios; None of too few."""
    spread = Spread.of_ratios(ratios, pools)
    return None if spread is None else spread.ends(error)


class Clock:
    """Stands in for the module `time`, and goes on only when told to."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    time = perf_counter

    def process_time(self) -> float:
        return self.cpu_s

    def taking(self, seconds: float, function: Any) -> Any:
        """The function, which takes so long."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self.now_s += seconds
            return function(*arguments, **options)

        return timed


def torchs_strategies() -> list[str]:
    """The shipped strategies that train with torch; TensorFlow's have `tests/tensorflow`."""
    names = group_choices()["strategy"]
    files = {name: Path(next(iter(conf.__path__)), "strategy", f"{name}.yaml") for name in names}
    nodes = {name: yaml.load(path.read_text("utf-8"), yaml.CSafeLoader) for name, path in files.items()}
    return [name for name in names if build(nodes[name], "strategy").framework == "torch"]


def plain(*overrides: str) -> dict[str, Any]:
    """The composed configuration of one run, without its sweep."""
    return copy.deepcopy(_composed(overrides))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    composed = resolve(compose_plain(overrides))
    composed["sweep_name"] = composed.pop("sweep")["name"]
    return composed


def quoted(text: object) -> str:
    """A value as Hydra reads it back, whatever is in it: it unescapes quotes, and backslashes before quotes only."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", str(text))
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"


def configured(*overrides: str) -> RunConfig:
    """The run that the overrides describe."""
    return from_mapping(plain(*overrides))


@functools.cache
def plan(name: str) -> tuple[PlannedRun, ...]:
    """The first repeat of every configuration of a shipped sweep."""
    return tuple(expand([f"sweep={name}", "sweep.repeats=1"]))


def fill_disk(folder: Path, *, leave_bytes: int = 0, until: int = errno.ENOSPC) -> Path:
    """Fill the disk that `folder` is on, but for `leave_bytes` (whole blocks); returns the file that does.

    `until` is the error that says so: `errno.EDQUOT` where a quota is full before the disk is.
    """
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != until:
                raise
        if leave_bytes:
            file.truncate(max(0, file.tell() - leave_bytes))
    return ballast
