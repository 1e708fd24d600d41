"""A step of a job: one task on each node of a run, which starts that node's share of its processes.

srun is the remote shell. The supervisor, which is the job's batch script, starts and ends steps (`Allocation`). On each
node a step is `python -m parallelbench.entry launch.slurm.step ranks FOLDER ATTEMPT [PLUGIN FOLDER]`, in the site's
container, or `… launch.slurm.step python ARGUMENT …` for another program on the first node.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.attempt.processes import Here, Spawned, Training
from launch.attempt.signals import heed, rest
from launch.attempt.supervisor import too_small
from launch.slurm import scheduler
from launch.slurm.rendezvous import from_environment, to_environment
from launch.slurm.sbatch import needed_folders, shape_of, step_command
from launch.slurm.scheduler import NoAnswerError, NoControllerError, SchedulerError
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import ConfigError, StorageError, one_line
from parallelbench.processes import die_with_parent
from parallelbench.results.attempt import HEARTBEAT_S, Attempt
from parallelbench.results.exits import Exits, exits_file, write_exits
from parallelbench.results.folder import RunFolder
from parallelbench.training.failure import record
from parallelbench.world.affinity import own_cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launch.attempt.processes import Process
    from parallelbench.results.attempt import AttemptInfo


STEP_TERMINATED = signal.SIGUSR1
"""What the supervisor gets when the first node's task gets SIGTERM, by which Slurm begins a preemption's grace."""
ENDING_S = 10.0
"""How long srun may take to end a step: it does so at SIGTERM."""
LINGER_S = 60.0
"""How long srun may wait for the tasks of other nodes once one has failed: those of a node that is lost never end."""
AWAY_S = 600.0
"""How long no controller may answer before a step, as while it is started anew."""
_PAUSE_S = 2.0
"""Between two questions to it."""
SEEN_S = 90.0
"""How long a node waits for an attempt's files, which a file server may show a minute late."""
_POLL_S = 0.2
_SUPERVISOR, _CORES = "PARALLELBENCH_SUPERVISOR", "PARALLELBENCH_JOB_CORES"
"""Variables of a step: the supervisor's process id; the cores of the first node that the job may use."""


# --- the supervisor's side


class Allocation:
    """The nodes of the job that this process is the batch script of."""

    def start(self, training: Training, log: Any) -> Process:
        """Start a run's processes on all of its nodes, which meet at `training.rendezvous`.

        Raises `ConfigError` where no srun is found.
        """
        own = {} if training.rendezvous is None else to_environment(training.rendezvous)
        exits = [exits_file(training.attempt.path, node) for node in range(training.run.nodes)]
        return self._step(training, ["ranks", *training.arguments], {**os.environ, **own}, log, exits)

    def spawn(self, training: Training, arguments: Sequence[str], variables: Mapping[str, str]) -> Process:
        """Start Python on the first node, with what is a run's there."""
        return self._step(training, ["python", *arguments], variables, None, ())

    def _step(
        self,
        training: Training,
        words: Sequence[str],
        variables: Mapping[str, str],
        log: Any,
        exits: Sequence[Path],
    ) -> Step:
        run = training.run
        _await_controller()
        # As processes know it (`Training.arguments`), which a container has to have by that name.
        results = training.folder.path.resolve().parent
        folders = needed_folders(run.site, results, plugin_of(run))
        command = step_command(shape_of(run, training.device_type), run.site, folders, ["launch.slurm.step", *words])
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        try:
            return Step(command, {**variables, _SUPERVISOR: str(os.getpid()), _CORES: cores}, log, exits)
        except FileNotFoundError:
            raise ConfigError("there is no srun on this node, after the lines of site.modules and site.setup") from None


def _await_controller() -> None:
    """Wait until a controller answers, at most `AWAY_S`: srun gives up seconds after it finds none."""
    deadline = time.monotonic() + AWAY_S
    while time.monotonic() < deadline:
        heed()
        try:
            scheduler.ask(["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]])
        except (NoControllerError, NoAnswerError):
            rest(_PAUSE_S)
        except SchedulerError:
            return  # which srun will say, too
        else:
            return


class Step(subprocess.Popen[bytes]):
    """srun, whose end is that of its tasks. `exits`: what its nodes leave that fail."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], log: Any, exits: Sequence[Path] = ()
    ) -> None:
        self._exits, self._looks_at, self._ends_at = exits, 0.0, math.inf
        super().__init__(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def poll(self) -> int | None:
        """The exit code; ends a step `LINGER_S` after a node of it has failed, since tasks of a lost node never end."""
        now = time.monotonic()
        if self.returncode is None and now > self._looks_at:
            self._looks_at = now + HEARTBEAT_S
            if self._ends_at == math.inf and any(path.exists() for path in self._exits):
                self._ends_at = now + LINGER_S
        if now > self._ends_at and super().poll() is None:
            self._ends_at = math.inf
            self.end()
        return super().poll()

    def end(self) -> None:
        """End the tasks and all that they started."""
        if super().poll() is None:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.wait(timeout=ENDING_S)
        if super().poll() is None:
            self.kill()
            self.wait()


# --- each node's side


def main(arguments: Sequence[str]) -> int:
    """Start this node's share, and wait for its end; returns its exit code."""
    kind, *words = arguments
    node = int(os.environ["SLURM_NODEID"])
    supervisor = int(os.environ.pop(_SUPERVISOR))
    cores = {int(core) for core in os.environ.pop(_CORES).split(",")}
    _forward_sigterm(node, supervisor)
    if node == 0:
        with suppress(OSError):  # where Slurm binds steps to fewer cores than jobs
            os.sched_setaffinity(0, cores)
    if kind == "python":
        return _code(Spawned([sys.executable, *words], os.environ).wait())
    return _ranks(node, words)


def _forward_sigterm(node: int, supervisor: int) -> None:
    """Tell the supervisor, which is on the first node, of each SIGTERM; this process ends with what it has started."""

    def forward(*_: object) -> None:
        if node == 0:
            with suppress(ProcessLookupError):
                os.kill(supervisor, STEP_TERMINATED)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning, which is for the supervisor


def _ranks(node: int, words: Sequence[str]) -> int:
    folder, attempt = RunFolder(Path(words[0])), Attempt(Path(words[0]) / "attempts" / words[1])
    sys.path.extend(words[3:])
    first_rank = 0
    try:
        info = _seen(attempt)
        run = attempt.config(words[2] if len(words) > 2 else None)
        first_rank = node * (info.processes // run.nodes)
        with ExitStack() as held:
            if node > 0:
                held.enter_context(own_cores(info.device_type))
                if (refusal := too_small(run, info.device_type)) is not None:
                    raise ConfigError(refusal)
            meeting = from_environment(run.site.network_interface) if run.nodes > 1 else None
            code = Here().start(Training(folder, run, attempt, info.device_type, meeting), None).wait()
    except (Exception, SystemExit) as error:
        with suppress(StorageError):
            record(attempt, first_rank, error, where=f"on node {node}: ")
            write_exits(exits_file(attempt.path, node), Exits())
        print(f"parallelbench: node {node}: {one_line(str(error))}", flush=True)
        return 1
    exits = exits_file(attempt.path, node)
    if code and not exits.exists():  # srun tells of no signal
        write_exits(exits, Exits(codes={0: code} if code < 0 and info.processes == 1 else {}))
    return _code(code)


def _seen(attempt: Attempt) -> AttemptInfo:
    """How the supervisor described the attempt; raises `StorageError` where this node does not see it in time."""
    deadline = time.monotonic() + SEEN_S
    while (info := attempt.info()) is None:
        if time.monotonic() > deadline:
            raise StorageError(f"{attempt.path} was not there within {SEEN_S:g} s: do all nodes see that folder?")
        time.sleep(_POLL_S)
    return info


def _code(code: int) -> int:
    """An exit code as a shell has it: a signal has none of its own."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
