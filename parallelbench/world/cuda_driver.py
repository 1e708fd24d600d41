"""Whether this machine's driver can run the installed torch, known before torch is imported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def driver_problem() -> str | None:
    """Why torch can't use the GPUs of this machine, with the remedy; None: it can, or nothing tells.

    A driver runs all programs that were built for its CUDA's major version or for an older one.
    """
    driver, torch = driver_cuda(), torch_cuda()
    if driver is None or torch is None or driver[0] >= torch[0]:
        return None
    return (
        f"the driver supports CUDA {driver[0]}.{driver[1]}, and torch is built for CUDA {torch[0]}.{torch[1]}, so it "
        f"can use no GPU here: install a torch that is built for CUDA {driver[0]}, or ask for a newer driver"
    )


def driver_cuda() -> tuple[int, int] | None:
    """Newest CUDA that the driver supports, (major, minor); None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return version // 1000, version % 1000 // 10


def torch_cuda() -> tuple[int, int] | None:
    """CUDA that the installed torch is built for, (major, minor); None: it is built without CUDA, or not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        content = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", content, re.MULTILINE)
    return None if version is None else (int(version[1]), int(version[2]))
