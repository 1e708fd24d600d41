"""Why a rank failed, in words for users: out of memory, a lost peer, a wait that was too long, or something else."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.errors import (
    LEFT_OUT,
    ConfigError,
    EngineError,
    StorageError,
    ends_the_program,
    one_line,
    own_place,
)
from parallelbench.processes import end_at_once
from parallelbench.results.files import fill
from parallelbench.world.allowance import processor_time_is_up

if TYPE_CHECKING:
    from parallelbench.results.attempt import Attempt


_PATIENCE_LOST = ("timed out waiting", "timed out after", "wait timeout", "socket timeout")
LINGER_S = 5.0
"""A rank whose wait timed out stays this long. Other ranks may wait for the same one; if they were ended at once, they
could not report it and would seem to hang."""
_NO_MEMORY = (
    *("can't allocate memory", "cuda error: out of memory", "_status_alloc_failed"),
    *("cuda failure 2 'out of memory'", "[errno 12] cannot allocate memory", "cannot allocate memory (12)"),
)
"""What torch's allocator for processors says, CUDA, NCCL and cuBLAS of memory that they take beside torch's, and the
kernel where it gives none, to a worker process, say."""
_BETWEEN_RANKS = ("gloo", "nccl", "c10d", "socketimpl", "tcpstore")
"""What carries torch's messages from rank to rank, as its errors name it."""
_PEER_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
_LOADER_DIED = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by signal: ([^.]+)|exited unexpectedly)")
_BY_WHOM = ": by hand, or by the kernel for lack of memory"
_LITTLE_SHARED_MEMORY = (
    "(No space left on device: /dev/shm is too small for the batches of the loader's workers; enlarge it, e.g. "
    "`docker run --shm-size=2g` or `mount -o remount,size=2g /dev/shm`, or choose loader.workers=0)"
)
_NO_SHARED_MEMORY = (
    "(/dev/shm, by which the loader's workers send their batches, can't be written: mount it writable, e.g. "
    "`mount -o remount,rw /dev/shm`, or choose loader.workers=0)"
)


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank failed. Kind `peer`: because another rank ended; `waited`: another rank did not arrive in time;
    `heartbeat`: the framework itself has given another rank up."""

    rank: int
    kind: str
    reason: str
    time: float


def record(attempt: Attempt, rank: int, error: BaseException, *, where: str = "") -> str:
    """Leave a rank's error file for the supervisor, with `where` before the reason; returns the failure's kind."""
    kind, reason = classify(error)
    record = RankError(rank=rank, kind=kind, reason=one_line(f"{where}{reason}"), time=time.time())
    fill(attempt.error_file(rank), msgspec.json.encode(record))
    return kind


def give_up(attempt: Attempt, rank: int, error: Exception) -> None:
    """End this process from any of its threads, as if its main thread had raised `error`."""
    record(attempt, rank, error)
    print(one_line(str(error)), flush=True)
    time.sleep(LINGER_S)
    end_at_once(1)


def classify(error: BaseException) -> tuple[str, str]:
    """Kind and reason of a failure, in words for users.

    gloo raises a plain `RuntimeError` for a lost rank and for a timeout alike, and torch's CPU allocator for a lack of
    memory: only their texts tell them apart.
    """
    # What torch's workers send ends with what the rank would have raised.
    text = re.split(r"\n(?: +.*\n)+(?=\S)", str(error))[-1] if "Original Traceback" in str(error) else str(error)
    name = type(error).__name__
    text = re.sub(rf"^(?:\w+\.)*{name}: ", "", text)
    if died := _LOADER_DIED.search(text):
        if died[1] == "Bus error":
            return "error", f"{name}: {text.strip()} {_LITTLE_SHARED_MEMORY}"
        if died[1] == signal.strsignal(signal.SIGXCPU):
            return "error", f"a worker process of the loader {processor_time_is_up()}"
        return "killed", f"a worker process of the loader died ({died[1] or died[0]}){_BY_WHOM}"
    if "unable to allocate shared memory" in text:
        return "error", f"{text} {_LITTLE_SHARED_MEMORY}"
    if "unable to open shared memory" in text or _is_of_semaphores(error):
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        return "error", f"{name}: {text} {_LITTLE_SHARED_MEMORY if full else _NO_SHARED_MEMORY}"
    lacking = name in ("OutOfMemoryError", "ResourceExhaustedError") or isinstance(error, MemoryError)
    if lacking or any(sign in text.lower() for sign in _NO_MEMORY):
        return "oom", f"out of memory: {text.splitlines()[0] if text else name}"
    if name in ("DeadlineExceededError", "PatienceError"):
        return "waited", f"waited for another rank longer than launcher.collective_timeout_s: {_first_line(text)}"
    if "stopped sending heartbeats" in text.lower():
        return "heartbeat", f"another rank sends TensorFlow's coordination service no heartbeat: {_first_line(text)}"
    if name in ("UnavailableError", "AbortedError", "CancelledError", "PeerLostError"):
        return "peer", f"lost another rank: {_first_line(text)}"
    if name == "NotFiniteError":
        return "nan", text
    if isinstance(error, StorageError):
        return "storage", text
    if isinstance(error, EngineError):
        return error.kind, text
    if isinstance(error, SystemExit):
        return "error", ends_the_program(error)
    if isinstance(error, ConfigError):
        return "error", text
    if "find_unused_parameters" in text:  # DDP's advice, by an option that is none of the suite's
        return "error", LEFT_OUT
    between_ranks = _is_between_ranks(error)
    if between_ranks and any(sign in text.lower() for sign in _PEER_LOST):
        return "peer", f"lost another rank: {text}"
    if between_ranks and any(sign in text.lower() for sign in _PATIENCE_LOST):
        return "waited", f"waited for another rank longer than launcher.collective_timeout_s: {text}"
    return "error", f"{own_place(error)}{name}: {text}"


def _is_between_ranks(error: BaseException) -> bool:
    """Whether an error may be of a message from rank to rank: not of what a user's code, or a loader, reads elsewhere.

    torch's libraries raise `RuntimeError`s. They say who they are, or raise within torch or the suite.
    """
    if not isinstance(error, RuntimeError) or "Original Traceback" in str(error):
        return False
    if error.__traceback__ is None:  # what a library has printed before it ended the process
        return True
    place = _innermost(error)
    within = (place.startswith(_SUITE) or "/torch/" in place) and "/torch/utils/data/" not in place
    names_itself = any(name in str(error).lower() for name in _BETWEEN_RANKS)
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and (names_itself or within)


_SUITE = f"{Path(__file__).parents[1]}/"


def _is_of_semaphores(error: BaseException) -> bool:
    """Whether `multiprocessing` could not make a semaphore, which is a file in /dev/shm that no error names."""
    return isinstance(error, OSError) and _innermost(error).endswith("/multiprocessing/synchronize.py")


def _innermost(error: BaseException) -> str:
    """The file of the code that raised an error; empty where nobody knows."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
