"""What is derived from the raw rows of a run, and how. Nothing else in the suite aggregates over ranks or
epochs.

A metric that was not measured, or that needs more epochs than there are, is null.
"""

from __future__ import annotations

from analysis.metrics.cores import beyond_own_cores
from analysis.metrics.disturbed_times import disturbed_to_accuracy, resting_on_disturbed, undisturbed_epochs
from analysis.metrics.epoch_metrics import miscounted, per_epoch
from analysis.metrics.phases import PHASES, measured_bubbles, phase_times, ring_times
from analysis.metrics.run_metrics import KINDS_SENT, per_run, staleness_histogram
from analysis.metrics.schema import per_epoch_columns, per_run_columns, summary_columns
from analysis.metrics.targets import (
    ACCURACY_LADDER,
    accuracy_target,
    energy_to_accuracy,
    require_accuracy,
    step_to_accuracy,
    steps_to_accuracy,
    time_to_accuracy,
)

__all__ = [
    "ACCURACY_LADDER",
    "KINDS_SENT",
    "PHASES",
    "accuracy_target",
    "beyond_own_cores",
    "disturbed_to_accuracy",
    "efficiency",
    "energy_to_accuracy",
    "measured_bubbles",
    "miscounted",
    "per_epoch",
    "per_epoch_columns",
    "per_run",
    "per_run_columns",
    "phase_times",
    "require_accuracy",
    "resting_on_disturbed",
    "ring_times",
    "staleness_histogram",
    "step_to_accuracy",
    "steps_to_accuracy",
    "summary_columns",
    "time_to_accuracy",
    "undisturbed_epochs",
]


def efficiency(speed_up: float | None, *, devices: int) -> float | None:
    """Scaling efficiency, 1 = ideal: the speed-up over one device ÷ the devices, t_1 ÷ (n·t_n) under strong
    scaling.

    Under weak scaling the speed-up is the ratio of throughputs, so this is throughput_n ÷ (n·throughput_1).
    """
    return None if speed_up is None else speed_up / devices
