"""Whether this process gets the threads that torch asks for, on the cores that it is pinned to: measured, not read."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Callable

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP that torch computes with, through torch's own library; None where torch has threads of its own."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    return library if hasattr(library, "GOMP_parallel") and hasattr(library, "omp_get_dynamic") else None


def _in_each_thread(openmp: ctypes.CDLL, work: Callable[[], Any]) -> list[Any]:
    """Call `work` in every thread of a parallel region like torch's."""
    results: list[Any] = []
    openmp.GOMP_parallel(_WORK(lambda _: results.append(work())), None, 0, 0)
    return results


def granted_threads() -> int:
    """Threads that a parallel region of torch's gets; 0 where their number may change with the machine's load."""
    openmp = _openmp()
    if openmp is None:
        return torch.get_num_threads()
    return 0 if openmp.omp_get_dynamic() else len(_in_each_thread(openmp, lambda: None))


def require_threads() -> None:
    """Let all threads run on the calling one's cores; raises `ConfigError` where there are fewer than torch asks for.

    torch's oneDNN divides its work among the threads that it asks for. With fewer, backward passes wait for ever, or
    compute garbage without a word.
    """
    asked, granted = torch.get_num_threads(), granted_threads()
    if granted != asked:
        found = f"only {granted}" if granted else "a number that depends on the machine's load"
        raise ConfigError(
            f"torch asks for {count_of(asked, 'thread')} here, and OpenMP grants it {found}: a variable of the shell "
            "(OMP_DYNAMIC, OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS, …) was read when this process loaded torch; unset "
            "it and start the process again, or choose launcher=local"
        )
    if (openmp := _openmp()) is not None:
        cores = os.sched_getaffinity(0)
        _in_each_thread(openmp, lambda: os.sched_setaffinity(0, cores))
