"""torch's part of a run's environment."""

from __future__ import annotations

from typing import Any

import torch

from parallelbench.measure.environment import version
from parallelbench.world.world import group_kinds


def entries() -> dict[str, Any]:
    """Its packages, threads, precisions, GPUs and process groups."""
    return {
        "packages": {name: version(name) for name in ("torch", "torchvision")},
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": _cuda(),
        "process_groups": group_kinds(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def _cuda() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "devices": [{"name": d.name, "uuid": str(d.uuid), "memory_bytes": d.total_memory} for d in devices],
    }
