"""Which times rest on disturbed epochs, and which runs used more cores than their devices have.

Medians over steady epochs have a column of their own (`disturbed_epochs` of `per_run`). Ranks are pinned before they
load any library, so all threads of theirs, and the loader's workers, share the rank's cores. Only what changes its
affinity uses more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis.metrics.disturbance import GPU_PROCESSES, POOL_S, SHARE, UNSURE_OF_EACH_S, UNSURE_S
from analysis.metrics.epochs import AS_TEXT, numbered, numbered_epochs
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
    taken_s = pl.when(shared).then(time_s).otherwise(pl.col("lost_share").fill_null(0.0) * time_s)
    so_far = [column.cum_sum().over("run_id") for column in (pl.when(disturbed).then(taken_s).otherwise(0.0), time_s)]
    return numbered_epochs(runs).select("run_id", "epoch", "disturbed", disturbed_so_far=so_far[0] > SHARE * so_far[1])


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
    disturbed = disturbed_by_epoch(runs)[rests].fill_null(False)
    # Both have the same rows in the same order.
    return rows.filter(~disturbed) if disturbed.any() else rows


@once
def partly_unmeasured(runs: Runs) -> frozenset[str]:
    """The ids of runs of which not every steady epoch's load was measured."""
    unmeasured = numbered_epochs(runs).filter(~pl.col("warm_up"), pl.col("disturbed").is_null())
    return _ids(unmeasured.select(pl.col("run_id").unique()))


class CoresUsed(NamedTuple):
    """Of a rank, in the epochs in which it used most."""

    used: float
    """Processor time ÷ time."""
    own: float
    """Cores of its devices."""


@once
def beyond_own_cores(runs: Runs) -> dict[str, CoresUsed]:
    """Run id → cores that a rank used, where these are more than its devices have by more than may be miscounted.

    Consecutive epochs are judged together until they take a second. Runs on GPUs, and ranks without a reading, have no
    entry.
    """
    of_devices = pl.col("cores_per_device") * pl.col("devices") / pl.col("processes")
    own = numbered(runs, "run", "cores_per_device", "devices", "processes").select("run_id", own=of_devices)
    used_s = pl.col("cpu_time_s") + pl.col("loader_cpu_time_s").fill_null(0.0)
    columns = ("attempt", "epoch", "rank", "epoch_time_s", "cpu_time_s", "loader_cpu_time_s")
    rows = numbered(runs, "ranks", *columns).join(own.drop_nulls(), on="run_id").with_columns(used_s=used_s)
    rows = rows.drop_nulls("used_s").filter(pl.col("epoch_time_s") > 0)
    share_s = (1 + SHARE) * pl.col("own") * pl.col("epoch_time_s")
    # Where no epoch exceeds its share, no pool does.
    of_rank = ("run_id", "attempt", "rank")
    rows = rows.join(rows.filter(pl.col("used_s") > share_s), on=of_rank, how="semi").sort(*of_rank, "epoch")
    before_s = pl.col("epoch_time_s").cum_sum().over(of_rank) - pl.col("epoch_time_s")
    pools = rows.group_by(*of_rank, pool=(before_s / POOL_S).floor()).agg(
        pl.col("used_s", "epoch_time_s").sum(), pl.col("own").first(), epochs=pl.len()
    )
    unsure_s = pl.max_horizontal(pl.lit(UNSURE_S), UNSURE_OF_EACH_S * pl.col("epochs").sqrt())
    found = pools.filter(pl.col("used_s") > share_s + unsure_s).with_columns(
        AS_TEXT, used=pl.col("used_s") / pl.col("epoch_time_s")
    )
    worst = found.sort((pl.col("used") / pl.col("own")), descending=True).unique("run_id", keep="first")
    return {run_id: CoresUsed(used, own) for run_id, used, own in worst.select("run_id", "used", "own").rows()}
