"""What each rank executes: `python -m parallelbench.training.worker RUN_DIR ATTEMPT [PLUGIN FOLDER]`,
alone or under torchrun.

Heavy imports happen inside, after the process is pinned to its cores, and are timed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from parallelbench.config.identity import run_id
from parallelbench.config.plugin import require_sources
from parallelbench.errors import (
    LEFT_OUT,
    ConfigError,
    EngineError,
    StorageError,
    ends_the_program,
    one_line,
    own_place,
)
from parallelbench.frameworks import session_class
from parallelbench.processes import die_with_parent
from parallelbench.results.attempt import Attempt
from parallelbench.results.files import fill
from parallelbench.results.journal import Journal
from parallelbench.telemetry.sampler import SamplerSettings, sampling
from parallelbench.world.machine import node_name, pin

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


WATCHED_BY = "PARALLELBENCH_WATCHED_BY"
"""Environment variable: process id of the worker's supervisor on this machine."""
LAUNCHED_AT = "PARALLELBENCH_LAUNCHED_AT"
"""Environment variable: Unix time at which this rank was launched; without it, that of the attempt counts."""
_PATIENCE_LOST = ("timed out waiting", "timed out after", "wait timeout", "socket timeout")
_LINGER_S = 5.0
"""A rank whose wait timed out stays this long. Other ranks may wait for the same one; if they were ended at once, they
could not report it and would seem to hang."""
_HEARTBEAT_LOST = ("stopped sending heartbeats",)
_PEER_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
_LOADER_DIED = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by signal: ([^.]+)|exited unexpectedly)")
_BY_WHOM = ": by hand, or by the kernel for lack of memory"
_LITTLE_SHARED_MEMORY = (
    "(No space left on device: /dev/shm is too small for the batches of the loader's workers; enlarge it, e.g. "
    "`docker run --shm-size=2g` or `mount -o remount,size=2g /dev/shm`, or choose loader.workers=0)"
)


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank failed. Kind `peer`: because another rank ended; `waited`: another rank did not arrive in time;
    `heartbeat`: the framework itself has given another rank up."""

    rank: int
    kind: str
    reason: str
    time: float


def main(arguments: list[str]) -> int:
    """Run one rank; every failure leaves an error file for the supervisor."""
    entered_at = time.time()
    attempt = Attempt(Path(arguments[0]) / "attempts" / arguments[1])
    # A torchrun that is killed can't end its workers: the kernel does.
    die_with_parent()
    plugin = arguments[2] if len(arguments) > 2 else None
    sys.path.extend(arguments[3:])  # the plugin's folder; last, so that it shadows nothing
    return 1 if _orphaned() else work(attempt, entered_at, plugin)


def _orphaned() -> bool:
    """Whether the supervisor died before the kernel was asked to watch it."""
    watcher = os.environ.get(WATCHED_BY)
    return watcher is not None and all(str(parent.pid) != watcher for parent in psutil.Process().parents())


def work(attempt: Attempt, entered_at: float, plugin: str | None = None) -> int:
    """Train one run as this process's rank; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        _train(attempt.config(plugin), attempt, rank, entered_at)
    except (Exception, SystemExit) as error:  # a user's code may end the program, which is no success
        kind = record(attempt, rank, error)
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        if kind in ("waited", "heartbeat"):
            time.sleep(_LINGER_S)
        return 1
    return 0


def record(attempt: Attempt, rank: int, error: BaseException) -> str:
    """Leave a rank's error file for the supervisor; returns the failure's kind."""
    kind, reason = classify(error)
    record = RankError(rank=rank, kind=kind, reason=one_line(reason), time=time.time())
    fill(attempt.error_file(rank), msgspec.json.encode(record))
    return kind


def give_up(attempt: Attempt, rank: int, error: Exception) -> None:
    """End this process from any of its threads, as if its main thread had raised `error`."""
    record(attempt, rank, error)
    print(one_line(str(error)), flush=True)
    time.sleep(_LINGER_S)
    os._exit(1)


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
        return "killed", f"a worker process of the loader died ({died[1] or died[0]}){_BY_WHOM}"
    if "unable to allocate shared memory" in text:
        return "error", f"{text} {_LITTLE_SHARED_MEMORY}"
    lacking = name in ("OutOfMemoryError", "ResourceExhaustedError") or isinstance(error, MemoryError)
    if lacking or "can't allocate memory" in text:
        return "oom", f"out of memory: {text.splitlines()[0] if text else name}"
    if name in ("DeadlineExceededError", "PatienceError"):
        return "waited", f"waited for another rank longer than launcher.collective_timeout_s: {_first_line(text)}"
    if any(sign in text.lower() for sign in _HEARTBEAT_LOST):
        return "heartbeat", f"another rank sends TensorFlow's coordination service no heartbeat: {_first_line(text)}"
    if name in ("UnavailableError", "AbortedError", "CancelledError"):
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
    if any(sign in text.lower() for sign in _PEER_LOST):
        return "peer", f"lost another rank: {text}"
    if any(sign in text.lower() for sign in _PATIENCE_LOST):
        return "waited", f"waited for another rank longer than launcher.collective_timeout_s: {text}"
    return "error", f"{own_place(error)}{name}: {text}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _train(run: RunConfig, attempt: Attempt, rank: int, entered_at: float) -> None:
    info = attempt.info()
    assert info is not None, "the supervisor describes an attempt before it starts ranks"
    require_sources(run)
    keys = {"run_id": run_id(run), "attempt": attempt.number}
    journal = Journal(attempt.path / f"journal-rank{rank}.jsonl", keys=keys)
    journal.event("phase", phase="imports", pid=os.getpid())
    spare_cores = pin(run, info.device_type)

    with _sampler(run, attempt, journal, device_type=info.device_type, spare_cores=spare_cores):
        from parallelbench.measure.clock import StartUp

        startup = StartUp(float(os.environ.get(LAUNCHED_AT, info.launched_at)), entered_at)
        new_session = session_class(run.strategy.framework)
        session = new_session(run, attempt, device_type=info.device_type, journal=journal, startup=startup)
        session.train()
    session.leave()


def _sampler(
    run: RunConfig, attempt: Attempt, journal: Journal, *, device_type: str, spare_cores: list[int]
) -> contextlib.AbstractContextManager[None]:
    """One sampler per node, beside the node's first rank."""
    if int(os.environ.get("LOCAL_RANK", "0")) > 0 or not run.measure.telemetry_hz:
        return contextlib.nullcontext()
    node = int(os.environ.get("RANK", "0")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settings = SamplerSettings(
        recording=str(attempt.path / f"telemetry-node{node}.bin"),
        run_id=run_id(run),
        attempt=attempt.number,
        node=node_name(),
        hz=run.measure.telemetry_hz,
        gpus=run.devices // run.nodes if device_type == "cuda" else 0,
        spare_cores=spare_cores,
        parent=os.getpid(),
    )
    return sampling(settings, journal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
