"""The commands that a refused comparison names: one compares the sides anyway, one measures both alike."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis.comparison.exclusions import excluded
from analysis.comparison.issues import Remedies
from analysis.comparison.ratio import ENOUGH_REPEATS
from analysis.comparison.work import (
    COMPARED,
    WAYS,
    are_comparable,
    definitions,
    is_below,
    labels,
    plain,
    work_differences,
)
from analysis.runs.reader import once
from parallelbench.config.build import COMPONENTS, completed
from parallelbench.config.sites import shipped

if TYPE_CHECKING:
    from analysis.comparison.work import Work
    from analysis.runs.reader import Runs

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


def remedies(one: OneRun, other: OneRun, *, highest_repeat: int) -> Remedies:
    """The commands for the sides that these two runs belong to. `highest_repeat`: of both.

    All that was measured is measured anew, and no fewer repeats than decide anything. Two measurements of one
    configuration have no commands: those differ in their folders only. Merged runs are looked for in the folder of
    their machine.
    """
    one, other = (OneRun(*of.runs.at_home(of.run_id)) for of in (one, other))
    if one.definition == other.definition:
        return Remedies()
    return Remedies(_compare(one, other), _submit(one, other, repeats=max(highest_repeat + 1, ENOUGH_REPEATS)))


def _compare(one: OneRun, other: OneRun) -> tuple[str, ...]:
    """`compare DIR --by …`; empty where no `--by` tells the two sides apart, or where it would be refused."""
    unlike = work_differences(one.definition, other.definition)
    if all(is_below(key, COMPARED) for key in unlike):
        key, values, across = "configuration", [_label(run.runs, run.run_id) for run in (one, other)], WAYS
    elif len(unlike) == 1:
        ((key, found),) = unlike.items()
        values, across = list(map(plain, found)), (key,)
    else:
        return ()
    if one.runs.folders or other.runs.root != one.runs.root:
        return ()  # no single folder holds both
    if not _are_comparable(one.runs, key, *values, across=across):
        return ()
    return ("compare", str(one.runs.root), "--by", f"{key}={','.join(values)}")


@once
def _are_comparable(runs: Runs, key: str, one: str, other: str, *, across: tuple[str, ...]) -> bool:
    """Whether `--by` takes these two sides: the same for all pairings of them."""
    return are_comparable(*(_having(runs, key, value) for value in (one, other)), across=across)


def _having(runs: Runs, key: str, value: str) -> list[Work]:
    """The definitions of the runs that count and belong to a side of `--by`."""
    if key == "configuration":
        return [definition for name, definition in _counted(runs) if name == value]
    distinct = {id(definition): definition for _, definition in _counted(runs)}.values()
    return [each for each in distinct if plain(each.get(f"{key}.name", each.get(key))) == value]


@once
def _counted(runs: Runs) -> list[tuple[str, Work]]:
    """The configurations that have runs which count, each with its definitions."""
    rows = labels(runs).join(excluded(runs), on="run_id", how="anti").select("run_id", "configuration").rows()
    known = ((name, definitions(runs)[run_id]) for run_id, name in rows)
    return list({(name, id(definition)): (name, definition) for name, definition in known}.values())


def _label(runs: Runs, run_id: str) -> str:
    return _labels_of(runs)[run_id]


@once
def _labels_of(runs: Runs) -> dict[str, str]:
    return dict(labels(runs).select("run_id", "configuration").rows())


def _submit(one: OneRun, other: OneRun, *, repeats: int) -> tuple[str, ...]:
    """`submit …` of both configurations in one sweep; empty where one isn't made of the shipped files of conf/."""
    configs = [_config(run) for run in (one, other)]
    sides = [as_overrides(config) for config in configs]
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
    known = run.runs.run.select("run_id", "config_json").filter(pl.col("run_id") == run.run_id)
    config: dict[str, Any] = json.loads(known["config_json"].item())
    return config


def as_overrides(config: dict[str, Any]) -> dict[str, str] | None:
    """Key → value in Hydra's grammar, of all that differs from the defaults; None where a component isn't shipped."""
    config = completed(config)
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
