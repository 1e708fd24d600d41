"""The value of a claim's metric in each run, and which runs it may use."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis.claims.grammar import EPOCH_COLUMNS, FAILURES, LAST, LEARNING, OF_ENGINES, OF_PHASES
from analysis.configurations import attempted, counted, facts, learned, prepared
from analysis.metrics import (
    disturbed_to_accuracy,
    resting_on_disturbed,
    step_to_accuracy,
    steps_to_accuracy,
    time_to_accuracy,
    undisturbed_epochs,
)
from analysis.metrics.epoch_metrics import AS_TEXT, gathered, numbered
from analysis.metrics.phases import computation_per_communication, phase_times

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.reader import Runs

_OF_USABLE = ("run_id", "repeat", "train_samples", "parameters", "framework", "best_test_accuracy")


class Reading(NamedTuple):
    """A value and its bounds: accuracy is known at the end of each epoch, and may have been reached during it."""

    value: float
    least: float
    most: float


def usable(runs: Runs, metric: str) -> pl.DataFrame:
    """The runs that a claim about this metric may use, in the order of their ids: some columns of `facts`.

    Metrics of learning also use runs whose times alone are invalid.
    """
    return _usable(runs, usable_for(metric))


def usable_for(metric: str) -> Callable[[Runs], pl.DataFrame]:
    """What finds these runs: the same for many metrics."""
    if metric in OF_ENGINES:
        return prepared
    if metric in FAILURES:
        return attempted
    return learned if metric in LEARNING else counted


def unusable(runs: Runs, metric: str) -> tuple[int, list[str]]:
    """How many runs it may not use, and why, each reason once."""
    return _unusable(runs, usable_for(metric))


@lru_cache(maxsize=32)
def _unusable(runs: Runs, chosen: Callable[[Runs], pl.DataFrame]) -> tuple[int, list[str]]:
    gone = facts(runs).select("run_id", "exclusion").join(_usable(runs, chosen), on="run_id", how="anti")
    return gone.height, gone["exclusion"].drop_nulls().unique(maintain_order=True).to_list()


@lru_cache(maxsize=32)
def _usable(runs: Runs, chosen: Callable[[Runs], pl.DataFrame]) -> pl.DataFrame:
    return chosen(runs).select(_OF_USABLE).sort("run_id")


@lru_cache(maxsize=8)
def steps_of_runs(runs: Runs) -> dict[str, int]:
    """Run id → optimizer steps of a run of all its epochs; epochs of one run have equally many."""
    rows = numbered(runs, "epochs", "steps").unique("run_id", keep="first", maintain_order=True)
    steps = gathered(runs, "epochs", rows).cast(pl.Int64) * rows["steps"]
    return dict(zip(rows.select(AS_TEXT).to_series().to_list(), steps.to_list(), strict=True))


def readings(runs: Runs, metric: str, *, target: float | None, epoch: int | str) -> dict[str, Reading]:
    """Run id → the metric; runs without it are missing, and so are those whose value rests on disturbed epochs."""
    if target is not None:
        read = _to_target(runs, metric, target)
        disturbed = disturbed_to_accuracy(runs, target) if metric == "time_to_accuracy_s" else frozenset()
        return {run_id: reading for run_id, reading in read.items() if run_id not in disturbed}
    if metric in OF_PHASES:
        rows = phase_times(runs) if metric == "bubble_s" else computation_per_communication(runs)
    elif metric in EPOCH_COLUMNS:
        epochs = _epochs(runs, metric)
        rows = epochs.filter(pl.col("epoch") == (pl.col("last") if epoch == LAST else epoch)).with_columns(AS_TEXT)
    else:
        disturbed = resting_on_disturbed(runs).get(metric, frozenset())
        rows = facts(runs).select("run_id", metric).filter(~pl.col("run_id").is_in(list(disturbed)))
    values = rows.select("run_id", pl.col(metric).cast(pl.Float64)).drop_nulls()
    return {run_id: Reading(value, value, value) for run_id, value in values.iter_rows()}


@lru_cache(maxsize=8)
def _epochs(runs: Runs, metric: str) -> pl.DataFrame:
    """All epochs whose metric counts, of numbered runs, with the number of their run's `last`."""
    rows = undisturbed_epochs(runs, metric).select("run_id", "epoch", metric)
    return rows.with_columns(last=gathered(runs, "epochs", rows))


def _to_target(runs: Runs, metric: str, target: float) -> dict[str, Reading]:
    """Steps or time to an accuracy. It was reached at some step of the epoch at whose end it was first seen."""
    reached = steps_to_accuracy if metric == "steps_to_accuracy" else time_to_accuracy
    rows = reached(runs, target).join(step_to_accuracy(runs, target), on="run_id").drop_nulls()
    since = pl.lit(1.0) if metric == "steps_to_accuracy" else pl.col("step_time_s")
    rows = rows.select("run_id", metric, least=pl.col(metric) - (pl.col("steps") - 1) * since)
    return {run_id: Reading(value, least, value) for run_id, value, least in rows.iter_rows()}
