"""What runs of one configuration have measured of a claim's metric, repeat by repeat."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis.claims.grammar import EPOCH_COLUMNS, LAST, LEARNING, RISING, Claim
from analysis.configurations import BASELINE, facts
from analysis.metrics import per_epoch, step_to_accuracy, steps_to_accuracy, time_to_accuracy
from analysis.work import works
from parallelbench.store.surroundings import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.reader import Runs

_WAYS = ("strategy", *RISING["devices"])
"""What runs of the same work differ in."""
_TIMING_ONLY = "^(oversubscribed|packed|inline|resumed elsewhere|deterministic|autograd searched)"
"""Reasons for leaving a run out that say nothing against what it has learned, or sent."""


class Reading(NamedTuple):
    """A value, and between which it may lie: an accuracy is looked at after each epoch only, and may be older."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class Cell:
    """Runs of one configuration, or an effect between two: a value per repeat."""

    keys: dict[str, Any]
    """The flat configuration; cells that agree in it are of the same work."""
    facts: dict[str, Any]
    """What else a level may name: train_samples, parameters, epoch."""
    values: dict[int, Reading] = field(default_factory=dict)
    """Repeat → value."""
    runs: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Repeat → ids of the runs behind it, those of one side before those of the other."""
    missed: set[int] = field(default_factory=set)
    """Repeats that never reached the claim's target: they have no value, but they are there."""
    steps: tuple[str, ...] = ()
    """The levels that were compared to get here, in words."""


def usable(runs: Runs, claim: Claim) -> pl.DataFrame:
    """The rows of `facts` that the claim may rest on: of metrics of time and memory, those with valid timing only."""
    rows = facts(runs)
    allowed = pl.col("left_out").is_null()
    if claim.metric in LEARNING:
        trained = (pl.col("outcome") == "ok") & (pl.col("state") == "done")
        allowed |= trained & pl.col("left_out").str.contains(_TIMING_ONLY)
    return rows.filter(allowed)


def measured(runs: Runs, claim: Claim) -> list[Cell]:
    """A cell per configuration, and per epoch that the claim looks at."""
    epochs = set().union(*(claim.epochs(contrast) for contrast in claim.contrasts))
    readings = {epoch: _readings(runs, claim, epoch) for epoch in sorted(epochs, key=str)}
    rows = usable(runs, claim).sort("run_id")
    missed = set(rows.filter(pl.col("best_test_accuracy") < claim.target)["run_id"]) if claim.target else set()
    merged: dict[str, Cell] = {}
    columns = ("run_id", "repeat", "train_samples", "parameters")
    for run_id, repeat, samples, parameters in rows.select(columns).iter_rows():
        keys, text = _keys(runs)[run_id]
        for epoch, by_run in readings.items():
            reading = by_run.get(run_id)
            if reading is None and run_id not in missed:
                continue
            names = {"train_samples": samples, "parameters": parameters, "epoch": epoch}
            cell = merged.setdefault(f"{text} {names}", Cell(keys, names))
            if repeat in cell.values or repeat in cell.missed:
                continue  # a second run of the same
            if reading is None:
                cell.missed.add(repeat)
            else:
                cell.values[repeat], cell.runs[repeat] = reading, (run_id,)
    return list(merged.values())


@lru_cache(maxsize=8)
def _keys(runs: Runs) -> dict[str, tuple[dict[str, Any], str]]:
    """Run id → its flat configuration, and the same as text."""
    found = {}
    for run_id, config, devices, nodes in runs.run.select("run_id", "config_json", "devices", "nodes").iter_rows():
        keys = works(runs)[run_id] | flatten({"strategy": json.loads(config)["strategy"]})
        keys |= {"devices": devices, "nodes": nodes}
        found[run_id] = keys, as_text(keys)
    return found


def as_text(value: Any) -> str:
    """Equal for what is equal."""
    return json.dumps(value, sort_keys=True)


def _readings(runs: Runs, claim: Claim, epoch: int | str) -> dict[str, Reading]:
    """Run id → the metric, of the runs that have it."""
    if claim.target is not None:
        return _to_target(runs, claim.metric, claim.target)
    if claim.metric in EPOCH_COLUMNS:
        rows = _epochs(runs).filter(pl.col("epoch") == (pl.col("last") if epoch == LAST else epoch))
    else:
        rows = facts(runs)
    found = rows.select("run_id", claim.metric).drop_nulls()
    return {run_id: Reading(value, value, value) for run_id, value in found.iter_rows()}


@lru_cache(maxsize=8)
def _epochs(runs: Runs) -> pl.DataFrame:
    """All epochs, with their run's `last`."""
    return per_epoch(runs).join(runs.run.select("run_id", last="epochs"), on="run_id")


def _to_target(runs: Runs, metric: str, target: float) -> dict[str, Reading]:
    """Steps or time to an accuracy. It was there at the end of an epoch, and not at its start: somewhere in between, at
    its first step or a later one, it was reached.
    """
    reached = steps_to_accuracy if metric == "steps_to_accuracy" else time_to_accuracy
    rows = reached(runs, target).join(step_to_accuracy(runs, target), on="run_id").drop_nulls()
    since = pl.lit(1.0) if metric == "steps_to_accuracy" else pl.col("step_time_s")
    rows = rows.select("run_id", metric, least=pl.col(metric) - (pl.col("steps") - 1) * since)
    return {run_id: Reading(value, least, value) for run_id, value, least in rows.iter_rows()}


def as_every_strategy(cells: Sequence[Cell]) -> list[Cell]:
    """One device stands for every strategy at `devices=1`, as in sweeps over devices."""
    found = [cell for cell in cells if not _is_baseline(cell)]
    strategies: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for cell in found:
        strategy = {key: value for key, value in cell.keys.items() if key.startswith("strategy.")}
        strategies[as_text(without(cell.keys, _WAYS))][as_text(strategy)] = strategy
    for cell in filter(_is_baseline, cells):
        rest = without(cell.keys, _WAYS)
        one = {"devices": cell.keys["devices"], "nodes": cell.keys["nodes"]}
        found += [replace(cell, keys=rest | strategy | one) for strategy in strategies[as_text(rest)].values()]
    return found


def _is_baseline(cell: Cell) -> bool:
    return (cell.keys["strategy.name"], cell.keys["devices"]) == BASELINE


def best(cells: Sequence[Cell], key: str) -> list[Cell]:
    """Of cells that differ in `key` only, the smallest value of each repeat."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[as_text([without(cell.keys, (key,)), cell.facts])].append(cell)
    found = []
    for members in groups.values():
        one = Cell(without(members[0].keys, (key,)), members[0].facts)
        for cell in members:
            for repeat, reading in cell.values.items():
                if repeat not in one.values or reading.value < one.values[repeat].value:
                    one.values[repeat], one.runs[repeat] = reading, cell.runs[repeat]
        one.missed.update(set().union(*(cell.missed for cell in members)) - one.values.keys())
        found.append(one)
    return found


def without(keys: dict[str, Any], roots: Iterable[str]) -> dict[str, Any]:
    """The keys that are none of these, nor below one."""
    names = frozenset(roots)
    return {
        key: value
        for key, value in keys.items()
        if not (key in names or key.partition(".")[0] in names or key.rpartition(".")[0] in names)
    }
