"""Which times rest on disturbed epochs.

Medians over steady epochs have a column of their own (`disturbed_epochs` of `per_run`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.disturbance import GPU_PROCESSES, SUSPENDED, allowed_share
from analysis.metrics.epochs import AS_TEXT, measured, numbered_epochs
from analysis.metrics.runs import step_to_accuracy
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.metrics.runs import Target
    from analysis.runs.reader import Runs


OF_ONE_EPOCH = {"first_epoch_time_s": 1, "second_epoch_time_s": 2}
OF_ALL_EPOCHS = (
    "total_training_time_s",
    "total_time_s",
    "throughput_with_startup_samples_per_s",
    "gpu_hours",
    "end_to_end_time_s",
)
OF_EACH_EPOCH = {
    "slowest_epoch_time_s": "disturbed",
    "epoch_throughput_samples_per_s": "disturbed",
    "gpu_energy_j": "disturbed",
    "gpu_power_mean_w": "disturbed",
    "gpu_memory_used_max_bytes": "disturbed",
    "training_time_s": "disturbed_so_far",
}
"""Metric of an epoch → the column of `disturbed_by_epoch` that says whether it rests on disturbed ones."""


@once
def disturbed_by_epoch(runs: Runs) -> pl.DataFrame:
    """`run_id` (numbered), `epoch`, `disturbed`, and `disturbed_so_far`: whether others took more of the training up to
    this epoch than they may take of one. Of an epoch that shared a GPU, all counts as taken. Null: not measured.
    """
    time_s, disturbed = pl.col("slowest_epoch_time_s"), pl.col("disturbed").fill_null(False)
    shared = (pl.col(GPU_PROCESSES) > 1).fill_null(False)
    lost_s = pl.max_horizontal(pl.col("lost_share") * time_s, SUSPENDED, pl.lit(0.0))
    taken_s = pl.when(shared).then(time_s).otherwise(lost_s)
    so_far = [column.cum_sum().over("run_id") for column in (pl.when(disturbed).then(taken_s).otherwise(0.0), time_s)]
    return measured(runs).select(
        "run_id", "epoch", "disturbed", disturbed_so_far=so_far[0] > allowed_share() * so_far[1]
    )


@once
def resting_on_disturbed(runs: Runs) -> dict[str, frozenset[str]]:
    """Metric of `per_run` → the ids of the runs whose value rests on disturbed epochs."""
    rows = disturbed_by_epoch(runs)
    found = {metric: _ids(rows.filter(pl.col("epoch") == epoch, "disturbed")) for metric, epoch in OF_ONE_EPOCH.items()}
    last = rows.group_by("run_id", maintain_order=True).last()
    return found | dict.fromkeys(OF_ALL_EPOCHS, _ids(last.filter("disturbed_so_far")))


def _ids(rows: pl.DataFrame) -> frozenset[str]:
    return frozenset(rows.select(AS_TEXT).to_series().to_list())


def disturbed_to_accuracy(runs: Runs, target: Target) -> frozenset[str]:
    """The ids of the runs whose training up to this accuracy rests on disturbed epochs."""
    disturbed = disturbed_by_epoch(runs).filter("disturbed_so_far").select(AS_TEXT, "epoch")
    return _ids(step_to_accuracy(runs, target).join(disturbed, on=("run_id", "epoch")))


def undisturbed_epochs(runs: Runs, metric: str) -> pl.DataFrame:
    """`per_epoch` of numbered runs, without the rows whose value of this metric rests on disturbed epochs."""
    rows = numbered_epochs(runs)
    if (rests := OF_EACH_EPOCH.get(metric)) is None:
        return rows
    # Both have the same rows in the same order.
    return rows.filter(~disturbed_by_epoch(runs)[rests].fill_null(False))


@once
def partly_unmeasured(runs: Runs) -> frozenset[str]:
    """The ids of runs of which not every steady epoch's load was measured."""
    unmeasured = numbered_epochs(runs).filter(~pl.col("warm_up"), pl.col("disturbed").is_null())
    return _ids(unmeasured.select(pl.col("run_id").unique()))
