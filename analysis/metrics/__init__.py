"""What is derived from the raw rows of a run, and how. Nothing else in the suite aggregates over ranks or
epochs.

A metric that was not measured, or that needs more epochs than there are, is null.
"""

from __future__ import annotations

from analysis.metrics.columns import per_epoch_columns, per_run_columns, summary_columns
from analysis.metrics.epochs import miscounted, per_epoch
from analysis.metrics.runs import (
    ACCURACY_LADDER,
    KINDS_SENT,
    PHASES,
    accuracy_target,
    energy_to_accuracy,
    measured_bubbles,
    per_run,
    phase_times,
    require_accuracy,
    ring_times,
    staleness_histogram,
    step_to_accuracy,
    steps_to_accuracy,
    time_to_accuracy,
)
from analysis.metrics.validity import (
    beyond_own_cores,
    disturbed_to_accuracy,
    resting_on_disturbed,
    undisturbed_epochs,
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
