"""Peaks of a rank's memory on its devices and on the host, since the probe was started."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.world import cuda
from parallelbench.world.machine import host_memory_limit, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.frameworks import Meeting, RankWorld


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
NOTICEABLE_BYTES = 4 * 2**20
"""Growth of host memory during an evaluation that is given back."""


class MemoryProbe:
    """Peaks of one rank in a window, bytes; null where they can't be read."""

    def __init__(self, world: RankWorld) -> None:
        self._world = world

    def start(self) -> None:
        """Forget earlier peaks."""
        self._world.reset_peaks()
        self._host_resettable = reset_host_peak()

    def stop(self) -> dict[str, Any]:
        """Peaks since `start`, summed over this rank's devices and of each of them; and retries of the allocator."""
        gpus = self._world.peaks()
        return {
            "peak_allocated_bytes": _sum([gpu.allocated for gpu in gpus]),
            "peak_allocated_bytes_by_device": _joined([gpu.allocated for gpu in gpus]),
            "peak_reserved_bytes": _sum([gpu.reserved for gpu in gpus]),
            "peak_reserved_bytes_by_device": _joined([gpu.reserved for gpu in gpus]),
            "alloc_retries": _sum([gpu.retries for gpu in gpus]),
            "device_used_bytes": _sum([gpu.used for gpu in gpus]),
            "host_peak_rss_bytes": host_peak_bytes() if self._host_resettable else None,
        }

    def held_bytes(self) -> int:
        """Resident host memory of the process."""
        return _status_bytes("VmRSS") or 0

    def give_back(self, held_bytes: int) -> None:
        """On a CPU, return unused host memory where noticeably more is held than then: a peak is of resident memory.

        On a GPU nothing is done: a peak of what tensors hold begins anew with each window, whatever the allocator has
        cached. Emptying its cache would let the next window ask for all of its memory again.
        """
        if self._world.device_type == "cpu" and self.held_bytes() > held_bytes + NOTICEABLE_BYTES:
            release_host()


def memory_limit(world: Meeting) -> dict[str, Any]:
    """`memory_limit_bytes` and `memory_limit_by` of the run: the least of all its GPUs, or nodes. A collective.

    Null where any of them does not say.
    """
    if world.device_type == "cuda":
        own = [[limit, "device"] for limit in world.memory_bytes()]
    else:
        own = [[*host_memory_limit()]]
    every = [limit for of_rank in world.gather(own) for limit in of_rank]
    known = bool(every) and all(limit is not None for limit, _ in every)
    limit, by = min(every, key=lambda each: each[0]) if known else (None, None)
    return {"memory_limit_bytes": limit, "memory_limit_by": by}


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _joined(values: Sequence[int | None]) -> str | None:
    return None if None in values else ",".join(map(str, values)) or None


def release() -> None:
    """Return unused memory to the system and the device, so that it counts in no later peak."""
    gc.collect()
    cuda.release()
    _trim()


def release_host() -> None:
    """Return unused host memory to the system."""
    gc.collect()
    _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def reset_host_peak() -> bool:
    """Set this process's peak resident size to its present size (proc(5): clear_refs, 5); False where forbidden."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def host_peak_bytes() -> int | None:
    """Peak resident size of this process since the last reset (VmHWM)."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int | None:
    """A size in the kernel's account of this process."""
    lines = (text_of(_STATUS) or "").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
