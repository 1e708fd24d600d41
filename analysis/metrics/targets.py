"""What it took to reach an accuracy: time, steps, energy."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low
from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.epoch_metrics import AS_TEXT, measured
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.reader import Runs

ACCURACY_LADDER = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
"""Candidates for the target of `time_to_accuracy_s`."""


def accuracy_target(best_test_accuracies: Iterable[Sequence[float | None]]) -> float | None:
    """The highest step of `ACCURACY_LADDER` that more than half of each configuration's runs reach; None where there is
    none.

    `best_test_accuracies`: of each configuration, those of its runs. A run that has none reaches no step.
    """
    reached = [median_low([accuracy or 0.0 for accuracy in runs]) for runs in best_test_accuracies if runs]
    return max((step for step in ACCURACY_LADDER if reached and step <= min(reached)), default=None)


def require_accuracy(target: float | None) -> None:
    """Raise `ConfigError` for a target that is no test accuracy; None is no target."""
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target {target:g}: expected a test accuracy above 0 and up to 1, e.g. 0.95 for 95 %")


_THERE = pl.col("test_accuracy") >= pl.col("_target")
Target = float | Mapping[str, float | None]
"""A test accuracy to reach, 0 to 1: of all runs, or by run id (None, or no entry: it has none to reach)."""


def _beside(runs: Runs, target: Target) -> pl.DataFrame:
    """The epochs, with their run's target in the column `_target`."""
    epochs = measured(runs)
    if isinstance(target, (int, float)):
        return epochs.with_columns(_target=target)
    of_run = pl.Series([target.get(run_id) for run_id in runs.run["run_id"]], dtype=pl.Float64)
    return epochs.with_columns(_target=of_run.gather(epochs["run_id"].to_physical()))


def time_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `time_to_accuracy_s`: training time up to and with the first epoch whose test accuracy is
    `target`.

    Training windows of the slowest ranks, without start-up and evaluation; runs that never reach it, and
    resumed ones, have no row.
    """
    reached = _beside(runs, target).filter(_THERE, pl.col("training_time_s").is_not_null())
    return reached.group_by("run_id").agg(time_to_accuracy_s=pl.col("training_time_s").min()).with_columns(AS_TEXT)


def steps_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `steps_to_accuracy`: optimizer steps up to and with the first epoch whose test accuracy is `target`.

    As fine as the epochs are (`measure.steps_per_epoch` shortens them). Runs that never reach it have no row.
    """
    epochs = _beside(runs, target).with_columns(total=pl.col("steps").cum_sum().over("run_id"))
    reached = epochs.filter(_THERE)
    return reached.group_by("run_id").agg(steps_to_accuracy=pl.col("total").min()).with_columns(AS_TEXT)


def step_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id`, and of the first epoch whose test accuracy is `target` its `epoch`, `steps` and the mean `step_time_s`:
    what `steps_to_accuracy` and `time_to_accuracy` are made of, and how fine they are.
    """
    reached = _beside(runs, target).filter(_THERE)
    first = reached.group_by("run_id").agg(pl.col("epoch", "steps", "slowest_epoch_time_s").sort_by("epoch").first())
    return first.select(AS_TEXT, "epoch", "steps", step_time_s=pl.col("slowest_epoch_time_s") / pl.col("steps"))


def energy_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `energy_to_accuracy_j`: energy of all GPUs in the training windows up to and with the first epoch
    whose test accuracy is `target`.

    Null where one of these epochs has none (`telemetry_flags` says why). Runs that never reach it have no row.
    """
    epochs = _beside(runs, target)
    there = _THERE.fill_null(False)
    # Epochs are in order: those before the first that is there, and that one.
    needed = epochs.filter(there.any().over("run_id"), there.cum_sum().over("run_id") - there.cast(pl.UInt32) == 0)
    known = pl.col("gpu_energy_j").is_not_null().all()
    sums = needed.group_by("run_id").agg(energy_to_accuracy_j=pl.when(known).then(pl.col("gpu_energy_j").sum()))
    return sums.with_columns(AS_TEXT)
