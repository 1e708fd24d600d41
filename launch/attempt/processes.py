"""Start the training processes of one node, and end them with all that they started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from launch.attempt.command import command_line, environment
from parallelbench.config.plugin import plugin_of
from parallelbench.processes import die_with_parent
from parallelbench.redaction import redacted
from parallelbench.results.files import storage_errors
from parallelbench.training.worker import WATCHED_BY
from parallelbench.world.machine import threads_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launch.attempt.command import Rendezvous
    from parallelbench.config.run import RunConfig
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.folder import RunFolder

_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY")
GRACE_S = 3.0
"""How long processes may take to end after SIGTERM, before SIGKILL; less than Slurm gives a job (its KillWait)."""


@dataclass(frozen=True)
class Training:
    """One attempt of a run, and the data that its processes need."""

    folder: RunFolder
    run: RunConfig
    attempt: Attempt
    device_type: str
    rendezvous: Rendezvous | None = None
    """Where this node meets the others; None: all processes are on this machine."""

    @property
    def processes(self) -> int:
        """Over all nodes."""
        return self.run.strategy.processes(self.run, self.device_type)

    @property
    def arguments(self) -> list[str]:
        """Those of `parallelbench.training.worker`."""
        return [str(self.folder.path.resolve()), str(self.attempt.number), *plugin_of(self.run)]


class Process(Protocol):
    """The leader of the process group of all ranks, with the interface of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The process id of the leader, and the number of the group."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raises `subprocess.TimeoutExpired`."""


class Start(Protocol):
    """Starts a run's processes: `start` below, or forks of warm ones."""

    def __call__(self, training: Training, log: Any) -> Process:
        """Start this node's share of a run's processes; what they print goes to `log`."""


def start(training: Training, log: Any) -> subprocess.Popen[bytes]:
    """Start this node's share of a run's processes."""
    run, cores = training.run, threads_here()
    variables = environment(run, training.device_type, os.environ, cores=cores, rendezvous=training.rendezvous)
    return subprocess.Popen(
        command_line(training.arguments, training.processes, training.rendezvous, framework=run.strategy.framework),
        env=variables | {WATCHED_BY: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # A session of its own: Ctrl-C reaches this process only, which ends the ranks in order.
        start_new_session=True,
        preexec_fn=before_the_program,
    )


def before_the_program() -> None:
    """Run in a child between fork and exec."""
    # If the supervisor is killed, the kernel ends its child. Workers ask for the same with respect to torchrun.
    die_with_parent()
    # Slurm may send its warning to all processes of a job. Only the supervisor handles it; it would end torchrun.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def end(process: Process) -> None:
    """End the process and all that it started."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    # torchrun may be gone while a rank still hangs in a collective.
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


_CHUNK_BYTES = 65_536
"""A line that is longer than this is written in pieces."""


@contextmanager
def redacted_log(path: Path) -> Iterator[BinaryIO]:
    """A pipe for processes to print to, whose text appears in the file `path`, line by line and redacted.

    At the end it waits for those who still hold the pipe, but not for long: what was started may outlive its parents.
    On a full disk the rest of the log is lost, and nobody waits for it.
    """
    with storage_errors(path):
        log = path.open("wb", buffering=0)
    reading, writing = os.pipe()
    pump = threading.Thread(target=_copy_lines, args=(reading, log), daemon=True)
    pump.start()
    try:
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            yield pipe
    finally:
        pump.join(timeout=GRACE_S)


def _copy_lines(reading: int, log: BinaryIO) -> None:
    """Copy until the pipe has no writer, then close both."""
    held = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe, log:
        while chunk := pipe.read(_CHUNK_BYTES):
            held += chunk
            end = max(held.rfind(b"\n"), held.rfind(b"\r")) + 1
            if (key := _last_key(held[:end])) >= 0 and b"-----END" not in held[key:end]:
                end = key  # it has many lines
            if not end and len(held) > _CHUNK_BYTES:
                end = len(held)
            _write_redacted(log, held[:end])
            held = held[end:]
        _write_redacted(log, held)


def _last_key(text: bytes) -> int:
    """Where the last private key begins; -1: there is none."""
    return max((found.start() for found in _KEY.finditer(text)), default=-1)


def _write_redacted(log: BinaryIO, lines: bytes) -> None:
    content = memoryview(redacted(lines.decode(errors="surrogateescape")).encode(errors="surrogateescape"))
    with suppress(OSError):
        while content:
            content = content[log.write(content) :]
