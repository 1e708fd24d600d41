"""The values of a claim's metric, repeat by repeat: of one configuration, or of an effect between two."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl
from msgspec import structs

from analysis.claims.grammar import EPOCH_COLUMNS, FAILURES, LAST, LEARNING, OF_ENGINES, OF_PHASES, Claim
from analysis.comparison.groups import definitions
from analysis.comparison.policy import WAYS, is_baseline
from analysis.comparison.work import canonical, without
from analysis.configurations import attempted, counted, facts, learned, prepared
from analysis.metrics import (
    disturbed_to_accuracy,
    resting_on_disturbed,
    step_to_accuracy,
    steps_to_accuracy,
    time_to_accuracy,
    undisturbed_epochs,
)
from analysis.metrics.phases import computation_per_communication, phase_times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from analysis.comparison.compared_run import ComparedRun
    from analysis.reader import Runs

    Read = Callable[[ComparedRun, int | str], "Reading | None"]


EARLIER = {"peak_memory_device_bytes": "gpu_memory_used_max_bytes"}
"""Metric → what stands for it where a run of a comparison has none: of a process that drives several GPUs, older
releases recorded the sum alone. Then it is the fullest GPU of both sides as the driver reports it.
"""


class Reading(NamedTuple):
    """A value and its bounds: accuracy is known at the end of each epoch, and may have been reached during it."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class Effect:
    """A value per repeat: of the runs of one configuration, or of the effect between two."""

    keys: dict[str, Any]
    """The flat configuration; equal ones are of the same work."""
    facts: dict[str, Any]
    """Further quantities that a level may name: train_samples, parameters, epoch; steps of the whole run."""
    values: dict[int, Reading] = field(default_factory=dict)
    """Repeat → value."""
    runs: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Repeat → ids of the runs behind it, those of one side before those of the other."""
    candidates: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Repeat → ids of all runs that the smallest value was chosen from; empty without a choice."""
    missed: set[int] = field(default_factory=set)
    """Repeats that were run, but never reached the claim's target."""
    steps: tuple[str, ...] = ()
    """The levels that were compared, in words."""
    metric: str = ""
    """What its values are."""
    outside: tuple[str, ...] = ()
    """In what its runs are not those of the claim's scope: "data=digits"; empty where they are."""


def usable(runs: Runs, claim: Claim) -> pl.DataFrame:
    """The rows of `facts` that a claim may use. Metrics of learning also use runs whose times alone are invalid."""
    if claim.metric in OF_ENGINES:
        return prepared(runs)
    if claim.metric in FAILURES:
        return attempted(runs)
    return learned(runs) if claim.metric in LEARNING else counted(runs)


def measured(runs: Runs, claim: Claim) -> list[Effect]:
    """The values per configuration, and per epoch that the claim names; of a run without the claim's metric, the value
    of the one that stands for it.
    """
    epochs = set().union(*(claim.epochs(contrast) for contrast in claim.contrasts))
    readings = {
        epoch: dict(ChainMap(*(_readings(runs, each, epoch) for each in metrics(claim))))
        for epoch in sorted(epochs, key=str)
    }
    rows = usable(runs, claim).sort("run_id")
    missed = set(rows.filter(pl.col("best_test_accuracy") < claim.target)["run_id"]) if claim.target else set()
    merged: dict[tuple[Any, ...], Effect] = {}
    columns = ("run_id", "repeat", "train_samples", "parameters", "framework")
    steps = _steps_of_runs(runs)
    for run_id, repeat, samples, parameters, framework in rows.select(columns).iter_rows():
        keys, text = definitions(runs)[run_id], _texts(runs)[run_id]
        for epoch, by_run in readings.items():
            reading = by_run.get(run_id)
            if reading is None and run_id not in missed:
                continue
            names = {"train_samples": samples, "parameters": parameters, "epoch": epoch}
            names["framework"] = framework or "torch"
            effect = merged.setdefault((text, *names.values()), Effect(keys, names))
            effect.facts["steps"] = effect.facts.get("steps") or steps.get(run_id)
            if repeat in effect.values or repeat in effect.missed:
                continue  # a second run of this repeat
            if reading is None:
                effect.missed.add(repeat)
            else:
                effect.values[repeat], effect.runs[repeat] = reading, (run_id,)
    return list(merged.values())


@lru_cache(maxsize=8)
def _steps_of_runs(runs: Runs) -> dict[str, int]:
    """Run id → optimizer steps of a run of all its epochs; epochs of one run have equally many."""
    last = pl.col("epochs").cast(pl.Int64) * pl.col("steps")
    rows = runs.epochs.join(runs.run.select("run_id", "epochs"), on="run_id").select("run_id", last).unique("run_id")
    return dict(rows.rows())


def metrics(claim: Claim) -> list[Claim]:
    """The claim, and the same about the metric that stands for its own where a run of a comparison has none."""
    earlier = EARLIER.get(claim.metric)
    return [claim, *([structs.replace(claim, metric=earlier)] if earlier else [])]


def reader(runs: Runs, claim: Claim) -> Read:
    """(run, epoch) → the metric as the run's own sweep has measured it; None where it has no value."""
    known: dict[tuple[Runs, int | str], dict[str, Reading]] = {}

    def read(run: ComparedRun, epoch: int | str) -> Reading | None:
        key = run.runs, epoch
        if key not in known:
            known[key] = _readings(run.runs, claim, epoch)
        return known[key].get(run.run_id)

    return read


@lru_cache(maxsize=8)
def _texts(runs: Runs) -> dict[str, str]:
    """Run id → its definition as text."""
    texts: dict[int, str] = {}
    return {
        run_id: texts.setdefault(id(definition), canonical(definition))
        for run_id, definition in definitions(runs).items()
    }


def _readings(runs: Runs, claim: Claim, epoch: int | str) -> dict[str, Reading]:
    """Run id → the metric; runs without it are missing, and so are those whose value rests on disturbed epochs."""
    if claim.target is not None:
        read = _to_target(runs, claim.metric, claim.target)
        timed = claim.metric == "time_to_accuracy_s"
        disturbed = disturbed_to_accuracy(runs, claim.target) if timed else frozenset()
        return {run_id: reading for run_id, reading in read.items() if run_id not in disturbed}
    disturbed = resting_on_disturbed(runs).get(claim.metric, frozenset())
    if claim.metric in OF_PHASES:
        rows = phase_times(runs) if claim.metric == "bubble_s" else computation_per_communication(runs)
    elif claim.metric in EPOCH_COLUMNS:
        rows = _epochs(runs, claim.metric).filter(pl.col("epoch") == (pl.col("last") if epoch == LAST else epoch))
    else:
        rows = facts(runs).filter(~pl.col("run_id").is_in(list(disturbed)))
    values = rows.select("run_id", pl.col(claim.metric).cast(pl.Float64)).drop_nulls()
    return {run_id: Reading(value, value, value) for run_id, value in values.iter_rows()}


@lru_cache(maxsize=8)
def _epochs(runs: Runs, metric: str) -> pl.DataFrame:
    """All epochs whose metric counts, with the number of their run's `last`."""
    return undisturbed_epochs(runs, metric).join(runs.run.select("run_id", last="epochs"), on="run_id")


def _to_target(runs: Runs, metric: str, target: float) -> dict[str, Reading]:
    """Steps or time to an accuracy. It was reached at some step of the epoch at whose end it was first seen."""
    reached = steps_to_accuracy if metric == "steps_to_accuracy" else time_to_accuracy
    rows = reached(runs, target).join(step_to_accuracy(runs, target), on="run_id").drop_nulls()
    since = pl.lit(1.0) if metric == "steps_to_accuracy" else pl.col("step_time_s")
    rows = rows.select("run_id", metric, least=pl.col(metric) - (pl.col("steps") - 1) * since)
    return {run_id: Reading(value, least, value) for run_id, value, least in rows.iter_rows()}


def as_every_strategy(effects: Sequence[Effect]) -> list[Effect]:
    """One device stands for every strategy of its framework at `devices=1`, as in sweeps over devices."""
    several = [effect for effect in effects if not _is_of_baseline(effect)]
    strategies: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for effect in several:
        strategy = {key: value for key, value in effect.keys.items() if key.startswith("strategy.")}
        strategies[_alike(effect)][canonical(strategy)] = strategy
    stand_ins = []
    for effect in filter(_is_of_baseline, effects):
        rest = without(effect.keys, WAYS)
        one = {"devices": effect.keys["devices"], "nodes": effect.keys["nodes"]}
        stand_ins += [replace(effect, keys=rest | strategy | one) for strategy in strategies[_alike(effect)].values()]
    return several + stand_ins


def _alike(effect: Effect) -> str:
    """Work and framework: what one device shares with the strategies that it stands for."""
    return canonical([without(effect.keys, WAYS), effect.facts.get("framework", "torch")])


def _is_of_baseline(effect: Effect) -> bool:
    return is_baseline(effect.keys["strategy.name"], effect.keys["devices"])


def best(effects: Sequence[Effect], key: str) -> list[Effect]:
    """Of effects that differ in `key` only, the smallest value of each repeat."""
    groups: dict[str, list[Effect]] = defaultdict(list)
    for effect in effects:
        groups[canonical([without(effect.keys, (key,)), effect.facts])].append(effect)
    smallest = []
    for members in groups.values():
        one = Effect(without(members[0].keys, (key,)), members[0].facts)
        for effect in members:
            for repeat, reading in effect.values.items():
                one.candidates[repeat] = (*one.candidates.get(repeat, ()), *effect.runs[repeat])
                if repeat not in one.values or reading.value < one.values[repeat].value:
                    one.values[repeat], one.runs[repeat] = reading, effect.runs[repeat]
        one.missed.update(set().union(*(effect.missed for effect in members)) - one.values.keys())
        smallest.append(one)
    return smallest
