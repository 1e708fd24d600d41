"""The commands that a refused comparison names: one compares the sides anyway, one measures both alike."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis.comparison.groups import definitions, labels
from analysis.comparison.policy import COMPARED, Remedies
from analysis.comparison.work import is_below, plain, work_differences
from parallelbench.spec.launchers import shipped
from parallelbench.spec.mapping import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from analysis.comparison.work import Work
    from analysis.reader import Runs

_PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)\Z)[A-Za-z_]\w*", re.IGNORECASE | re.ASCII)
"""Text that Hydra takes as it is."""
_NOT_SET = ("repeat", "results", "sweep_name", "launcher", "site")
"""Keys that a command which measures runs anew leaves out, or sets for all runs together."""


class OneRun(NamedTuple):
    """A run among others."""

    runs: Runs
    run_id: str

    @property
    def definition(self) -> Work:
        """All that defines it, but for its repeat."""
        return definitions(self.runs)[self.run_id]


def remedies(one: OneRun, other: OneRun, repeats: Iterable[int]) -> Remedies:
    """The commands for the sides that these two runs belong to, with these repeats.

    There are none for two measurements of one configuration: those differ in their folders only.
    """
    if one.definition == other.definition:
        return Remedies()
    return Remedies(_compare(one, other), _submit(one, other, repeats=max(repeats, default=0) + 1))


def _compare(one: OneRun, other: OneRun) -> tuple[str, ...]:
    """`compare DIR --by …`; empty where no `--by` tells the two sides apart."""
    unlike = work_differences(one.definition, other.definition)
    if all(is_below(key, COMPARED) for key in unlike):
        key, values = "configuration", [_label(run.runs, run.run_id) for run in (one, other)]
    elif len(unlike) == 1:
        ((key, found),) = unlike.items()
        values = list(map(plain, found))
    else:
        return ()
    return ("compare", str(one.runs.root), "--by", f"{key}={','.join(values)}")


def _label(runs: Runs, run_id: str) -> str:
    label: str = labels(runs).filter(pl.col("run_id") == run_id)["configuration"].item()
    return label


def _submit(one: OneRun, other: OneRun, *, repeats: int) -> tuple[str, ...]:
    """`submit …` of both configurations in one sweep; empty where one isn't made of the shipped files of conf/."""
    configs = [_config(run) for run in (one, other)]
    sides = [_overrides(config) for config in configs]
    if sides[0] is None or sides[1] is None:
        return ()
    shared = {key: value for key, value in sides[0].items() if sides[1].get(key) == value}
    blocks = (
        "{grid:{" + ",".join(f"{key}:[{value}]" for key, value in side.items() if key not in shared) + "}}"
        for side in (sides[0], sides[1])
    )
    where = {key: configs[0][key]["name"] for key in ("launcher", "site")}
    return (
        "submit",
        *(f"{key}={value}" for key, value in (where | shared).items()),
        f"sweep.repeats={repeats}",
        f"sweep.blocks=[{','.join(blocks)}]",
        f"results={configs[0]['results']}-alike",
    )


def _config(run: OneRun) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(run.runs.run.filter(pl.col("run_id") == run.run_id)["config_json"].item())
    return config


def _overrides(config: dict[str, Any]) -> dict[str, str] | None:
    """Key → value in Hydra's grammar, of all that differs from the defaults; None where a component isn't shipped."""
    usual = shipped("", "config") or {}
    chosen = {key: _as_hydra(value) for key, value in config.items() if key in usual and value != usual[key]}
    for group in COMPONENTS:
        node = config[group]
        default = shipped(group, node["name"])
        if default is None or default["_target_"] != node["_target_"]:
            return None
        chosen[group] = node["name"]
        chosen |= {f"{group}.{key}": _as_hydra(value) for key, value in node.items() if default.get(key) != value}
    default = shipped("measure", "default") or {}
    chosen |= {f"measure.{key}": _as_hydra(value) for key, value in config["measure"].items() if default[key] != value}
    return {key: value for key, value in chosen.items() if key not in _NOT_SET}


def _as_hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_as_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_hydra, value)) + "]"
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value)
