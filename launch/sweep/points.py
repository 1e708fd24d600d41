"""The configurations of a block of a sweep: its grid, times what goes side by side, less its exclusions."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.identity import PLACES
from parallelbench.errors import ConfigError, Refusals, choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parallelbench.config.run import RunConfig, SweepBlock

Point = dict[str, Any]
"""The keys that one configuration of a sweep sets."""


def without(block: SweepBlock, given: set[str]) -> SweepBlock:
    """The block without the keys that the command line sets."""
    grid = {key: values for key, values in block.grid.items() if key not in given}
    side = {key: values for key, values in block.zip.items() if key not in given}
    return msgspec.structs.replace(block, grid=grid, zip=side)


def check_exclusions(
    block: SweepBlock, given: Mapping[str, list[Any]], *, groups: Mapping[str, Sequence[str]], sweep: str
) -> None:
    """Refuse what a block excludes and could never have: a key or a value that is no configuration's.

    The block is as its file has it, and `given` has the values of the command line: what only these narrowed may match
    nothing. A key that only the command line has may have any value there, of a group of files those that exist.
    """
    axes = {key: value if isinstance(value, list) else [value] for key, value in block.grid.items()} | block.zip
    refused = Refusals()
    for key, value in (item for entry in block.exclude for item in entry.items()):
        where = f"sweep={sweep}: exclude: {key}={_written(value)}"
        if key not in axes and key not in given:
            valid = choices(key, axes) if axes else "its block has neither grid nor zip"
            refused.add(f"{where}: no configuration of its block sets {key}: {valid}")
        elif key in axes and value not in (there := [*axes[key], *given.get(key, [])]):
            refused.add(f"{where}: no configuration of its block has this value: {_nearest(value, there)}")
        elif key not in axes and value not in (there := [*groups.get(key, [value]), *given[key]]):
            refused.add(f"{where} is no choice: {_nearest(value, there)}")
    refused.raise_any()


def refuse_places(axes: Mapping[str, Any]) -> None:
    """Refuse several values for what says where runs take place: no result would tell them apart."""
    refused = Refusals()
    for key, values in axes.items():
        if key.partition(".")[0] in (*PLACES, "sweep") and isinstance(values, list) and len(values) > 1:
            text = ",".join(map(str, values))
            quoted = "" if key in ("launcher", "site") else f"""; if it is one value, quote it: '{key}="{text}"'"""
            refused.add(
                f"{key}={text} can't be swept: all runs of a sweep share their launcher, site and folders: give a "
                f"command for each value{quoted}"
            )
    refused.raise_any()


def check_place(run: RunConfig, planned: RunConfig, first: RunConfig) -> None:
    """Refuse blocks that disagree about where runs take place.

    `planned` is the same run as some block asks for it: chance would choose one of them. `first`: of the sweep.
    """
    differing = [key for key in (*PLACES, "measure") if getattr(run, key) != getattr(planned, key)]
    places = ((each.launcher.name, each.results, each.sweep_name) for each in (run, first))
    names = ("launcher", "results", "sweep.name")
    differing += [key for key, here, there in zip(names, *places, strict=True) if here != there]
    if differing:
        raise ConfigError(
            f"blocks of the sweep give {' and '.join(dict.fromkeys(differing))} differently, which no result would "
            "tell apart: give them once, for the sweep"
        )


def _nearest(value: Any, there: list[Any]) -> str:
    return choices(_written(value), map(_written, there))


def _written(value: Any) -> str:
    """As a file has it: `ddp`, `64`, and `"64"` in quotes, which is another value."""
    is_word = isinstance(value, str) and value[:1].isalpha()
    return value if is_word else json.dumps(value, default=str)


def points_of(block: SweepBlock, axes: dict[str, list[Any]]) -> Iterator[Point]:
    """The configurations of a block, each crossed with the axes of the command line."""
    lengths = {key: len(values) for key, values in block.zip.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"sweep: the lists of one zip must be equally long, but are {lengths}")
    grid = {key: values if isinstance(values, list) else [values] for key, values in block.grid.items()} | axes
    rows = [dict(zip(block.zip, row, strict=True)) for row in zip(*block.zip.values(), strict=True)] or [{}]
    for combination in itertools.product(*grid.values()):
        for row in rows:
            point = dict(zip(grid, combination, strict=True)) | row
            if not any(_matches(point, entry) for entry in block.exclude):
                yield point


def _matches(point: Point, entry: Point) -> bool:
    return bool(entry) and all(key in point and point[key] == value for key, value in entry.items())
