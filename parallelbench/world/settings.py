"""What a run asks of torch in each of its processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from parallelbench.world.numerics import set_precision
from parallelbench.world.threads import granted_threads, require_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.config.run import RunConfig


def configure_torch(run: RunConfig, device_type: str) -> None:
    """Set threads, precision and determinism of this process; raises `ConfigError` where it doesn't get its threads."""
    # Beside GPUs as many as `pin` gave this rank: a process that was forked has loaded torch before.
    torch.set_num_threads(run.cores_per_device if device_type == "cpu" else int(os.environ["OMP_NUM_THREADS"]))
    require_threads()
    set_precision(run.precision)
    torch.set_default_dtype(torch.float32)  # importing one's own code may have changed it
    torch.backends.cudnn.benchmark = run.cudnn_benchmark
    torch.use_deterministic_algorithms(run.measure.deterministic)
    torch.autograd.set_detect_anomaly(run.measure.detect_anomaly)


def changed_settings(run: RunConfig, device_type: str) -> list[str]:
    """Names of settings of this process that are no longer those of `configure_torch`: they change speed or rounding.

    Whoever calls `torch.set_float32_matmul_precision`, say, changes it for the whole process.
    """
    tf32 = run.precision == "tf32"
    settings: list[tuple[str, Callable[[], object], object]] = [
        ("float32_matmul_precision", torch.get_float32_matmul_precision, "high" if tf32 else "highest"),
        ("default type", torch.get_default_dtype, torch.float32),
        ("cudnn.allow_tf32", lambda: torch.backends.cudnn.allow_tf32, tf32),
        ("cudnn.benchmark", lambda: torch.backends.cudnn.benchmark, run.cudnn_benchmark),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled, run.measure.deterministic),
        ("anomaly detection", torch.is_anomaly_enabled, run.measure.detect_anomaly),
        ("fp32_precision", lambda: torch.backends.fp32_precision, "none"),  # type: ignore[attr-defined]
        ("mkldnn.fp32_precision", lambda: torch.backends.mkldnn.fp32_precision, "none"),
    ]
    if device_type == "cpu":
        settings.append(("threads", granted_threads, run.cores_per_device))
    return [name for name, read, asked in settings if _read(read) != asked]


def _read(setting: Callable[[], object]) -> object:
    """Its value; None where torch refuses to tell, since it was set in its newer way and in its older one."""
    try:
        return setting()
    except RuntimeError:
        return None
