"""What is derived of each epoch, from the rows of all its ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from analysis.load import Runs

# Ids have 64 characters. As numbers, a million rows are grouped and joined in a fraction of the time.
AS_TEXT = pl.col("run_id").cast(pl.String)
"""Turns the ids of `numbered` into text again."""
SAMPLED = ("gpu_energy_j", "gpu_power_mean_w", "gpu_power_max_w", "gpu_throttle_reasons", "cpu_energy_j")
_MEASURED = ("steps", "test_accuracy", "telemetry_flags", *SAMPLED)


@lru_cache(maxsize=8)
def per_epoch(runs: Runs) -> pl.DataFrame:
    """The rows of `runs.epochs` with what needs all ranks of an epoch, in the order of the runs and their epochs.

    `epoch_time_s` and `evaluation_time_s`: the slowest rank's. `training_time_s`: sum of `epoch_time_s` up to and with
    this epoch; null in a resumed run. `throughput_samples_per_s`: samples over all data shards ÷ `epoch_time_s`.
    `warm_up`: whether it is the first epoch of an attempt: of the run, or of where it was resumed.
    """
    derived = ("epoch_time_s", "evaluation_time_s", "training_time_s", "throughput_samples_per_s", "warm_up")
    columns = (*runs.epochs.columns, *derived)
    return _epochs(runs, *(name for name in columns if name not in derived)).select(columns).with_columns(AS_TEXT)


@lru_cache(maxsize=8)
def _ids(runs: Runs) -> pl.Enum:
    return pl.Enum(runs.run["run_id"])


def numbered(runs: Runs, table: str, *columns: str) -> pl.DataFrame:
    """These columns of a table, and `run_id` as an enumeration; only rows of the runs in `runs.run`."""
    rows = runs.select(table, "run_id", *columns)
    return rows.with_columns(pl.col("run_id").cast(_ids(runs), strict=False)).drop_nulls("run_id")


def run_and(column: str) -> pl.Expr:
    """`run_id` and a further number in one."""
    return (pl.col("run_id").to_physical().cast(pl.Int64) * 2**32 + pl.col(column)).alias("_both")


@lru_cache(maxsize=8)
def _epochs(runs: Runs, *columns: str) -> pl.DataFrame:
    """`per_epoch` of some columns, and `owned_samples`: those that its ranks say they trained on."""
    slowest = (
        numbered(runs, "ranks", "epoch", "epoch_time_s", "evaluation_time_s", "train_samples")
        .lazy()
        .group_by(run_and("epoch"))
        .agg(
            pl.col("epoch_time_s", "evaluation_time_s").max(),
            pl.col("train_samples").sum().alias("owned_samples"),
        )
        .collect(engine="streaming")  # twice as fast here
    )
    needed = dict.fromkeys(("epoch", "attempt", "train_samples", *columns))
    needed.pop("run_id", None)
    return (
        numbered(runs, "epochs", *needed)
        .with_columns(run_and("epoch"))
        .join(slowest, on="_both", how="left")
        .sort("_both")
        .drop("_both")
        .with_columns(
            # A resumed run has warmed up more than once: its sum is no other run's.
            training_time_s=pl.when(pl.col("attempt").n_unique().over("run_id") == 1).then(
                pl.col("epoch_time_s").cum_sum().over("run_id")
            ),
            throughput_samples_per_s=pl.col("train_samples") / pl.col("epoch_time_s"),
            warm_up=pl.col("epoch") == pl.col("epoch").min().over("run_id", "attempt"),
        )
    )


def measured(runs: Runs) -> pl.DataFrame:
    """Of each epoch what the metrics of its run are made of."""
    return _epochs(runs, *_MEASURED)


def miscounted(runs: Runs) -> set[str]:
    """The runs whose ranks' samples don't add up to an epoch's."""
    wrong = measured(runs).filter(pl.col("owned_samples") != pl.col("train_samples"))
    return set(wrong["run_id"].unique().cast(pl.String))
