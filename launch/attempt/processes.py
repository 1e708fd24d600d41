"""Start the training processes of one node, and end them with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from launch.attempt.command import command_line, environment
from parallelbench.die_with_parent import die_with_parent
from parallelbench.rank.worker import WATCHED_BY
from parallelbench.spec.plugin import plugin_of
from parallelbench.world.devices import threads_here

if TYPE_CHECKING:
    from launch.attempt.command import Rendezvous
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.attempt import Attempt
    from parallelbench.store.folder import RunFolder

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
        """Those of `parallelbench.rank.worker`."""
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
