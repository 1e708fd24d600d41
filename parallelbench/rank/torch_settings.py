"""What a run asks of torch in each of its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallelbench.rank.numerics import set_precision

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig


def configure_torch(run: RunConfig, device_type: str) -> None:
    """Set threads, precision and determinism of this process."""
    if device_type == "cpu":
        torch.set_num_threads(run.cores_per_device)
    set_precision(run.precision)
    torch.backends.cudnn.benchmark = run.cudnn_benchmark
    torch.use_deterministic_algorithms(run.measure.deterministic)
    torch.autograd.set_detect_anomaly(run.measure.detect_anomaly)
