"""How processes of the suite begin and end: what they inherit of the user's shell; that they end with a parent."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

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


def print_any_character() -> None:
    """Let this process print what its terminal has no character for as an escape: no print may fail for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


end_at_once = os._exit
"""As it is before a user's code runs here."""


@contextmanager
def noticing_exits() -> Iterator[None]:
    """Let `os._exit` raise `SystemExit` in this process meanwhile: a user's code that ends it is told with its place.

    Forks end as ever.
    """
    this, before = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != this:
            end_at_once(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = before


_LEAVING_S = 10.0
"""How long threads that are no daemons may take to end once all is done."""


def leave(code: int) -> int:
    """The exit code, with which this process ends soon even if a thread of a user's code never does."""
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):
        threading.Thread(target=_end_later, args=(code,), daemon=True).start()
    return code


def _end_later(code: int) -> None:
    time.sleep(_LEAVING_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    end_at_once(code)


def silence_output() -> None:
    """Let what is still printed, or buffered, go nowhere: the reader of the pipe has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def unread_output() -> Iterator[None]:
    """Go on where nobody reads what is printed any more: the pipe's reader has closed it, or the terminal is gone."""
    before = sys.stdout
    sys.stdout = _Unread(before)
    try:
        yield
    finally:
        sys.stdout = before


class _Unread:
    """A stream that goes nowhere from the first failed print on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Print, if anybody reads."""
        try:
            return self._stream.write(text)
        except OSError:
            silence_output()
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError:
            silence_output()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def withstand_sigterm() -> None:
    """Where SIGTERM was blocked before this program began, let it do nothing here, and end what this process starts:
    multiprocessing ends its workers by it, and waits for them. Slurm sends it to all processes of a job.
    """
    if signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        return

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def end_by_it() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.signal(signal.SIGTERM, lambda *_: None)
    # Blocked meanwhile: one for the child must not find this process's handler there.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=end_by_it)
    unblock()


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends: one that is killed can't end its children itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
