"""How processes of the suite begin and end: what they inherit of the user's shell; that they end with a parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


FORKED = "PARALLELBENCH_FORKED"
"""Set in processes that a warm one (`parallelbench.training.warm`) has forked."""
_THREADS = ("OMP_", "KMP_", "GOMP_", "MKL_")
"""OpenMP's runtimes, and MKL: with fewer threads than torch asks for, its kernels wait for ever or compute garbage."""
_TORCHRUN = ("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_")
"""Each option of torchrun can be given as `PET_…`."""
_DISTRIBUTED = (
    *("TORCH_DIST", "TORCH_NCCL", "TORCH_GLOO_", "TORCH_FR_", "TORCH_SYMM", "TORCH_WATCHDOG_", "TORCH_WORKER_"),
    *("TORCHCOMM_", "DCP_", "FSDP_"),
)
"""How long ranks wait for each other, what they do then, and which library carries their messages."""
_LOADERS = ("ARROW_", "POLARS_")
_FOREIGN = (*_THREADS, *_TORCHRUN, *_DISTRIBUTED, *_LOADERS)
_FOREIGN_NAMES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "USE_LIBUV", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TF_CONFIG"),
    *("PYTHON_EXEC", "LOGLEVEL", "MAST_HPC_JOB_NAME"),
    # Older names of TORCH_NCCL_…
    *(f"NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "DUMP_ON_TIMEOUT")),
    *(f"NCCL_{name}" for name in ("ENABLE_TIMING", "USE_TENSOR_REGISTER_ALLOCATOR_HOOK")),
}
_PASSED = {"KMP_DUPLICATE_LIB_OK"}
"""Some installations can't load two libraries without it; it decides no threads."""


def foreign(name: str) -> bool:
    """Whether a variable of the user's must not reach a process that computes."""
    return (name.startswith(_FOREIGN) or name in _FOREIGN_NAMES) and name not in _PASSED


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """These variables without the foreign ones."""
    return {name: value for name, value in variables.items() if not foreign(name)}


@contextmanager
def without_foreign() -> Iterator[None]:
    """Take the foreign variables out of this process's environment meanwhile."""
    taken = {name: os.environ.pop(name) for name in list(os.environ) if foreign(name)}
    try:
        yield
    finally:
        os.environ.update(taken)


def silence_output() -> None:
    """Let what is still printed, or buffered, go nowhere: the reader of the pipe has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends: one that is killed can't end its children itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
