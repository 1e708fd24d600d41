"""The training processes of one node: command line, environment, how they are started, or forked, and ended."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from launch.attempt.signals import heed, rest
from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.config.plugin import plugin_of
from parallelbench.environments import has_own
from parallelbench.frameworks import RENDEZVOUS
from parallelbench.processes import die_with_parent, inherited
from parallelbench.redaction import redacted
from parallelbench.results.exits import exits_file
from parallelbench.results.files import storage_errors, write_all
from parallelbench.training.warm import MESSAGE_BYTES, ForkRequest, WarmDoor
from parallelbench.training.worker import LAUNCHED_AT, WATCHED_BY
from parallelbench.world.allowance import MEETING_HERE, end_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from io import FileIO

    from launch.launcher import Prepared
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
        """Those that the suite starts, over all nodes."""
        return self.run.strategy.started(self.run, self.device_type)

    @property
    def arguments(self) -> list[str]:
        """Those of `parallelbench.training.worker`."""
        return [str(self.folder.path.resolve()), str(self.attempt.number), *plugin_of(self.run)]


class Process(Protocol):
    """What started the processes of a run, with those of `subprocess.Popen`'s methods that a supervisor needs."""

    @property
    def pid(self) -> int:
        """Of its leader."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""

    def end(self) -> None:
        """End it and all that it started."""


class Place(Protocol):
    """Where the processes of runs are started: on this machine (`Here`), or on the nodes of a Slurm job."""

    def start(self, training: Training, log: Any) -> Process:
        """Start the processes of a run, which print to the file `log`."""

    def spawn(self, training: Training, arguments: Sequence[str], variables: Mapping[str, str]) -> Process:
        """Start Python with these arguments on this machine, with the devices of a run."""


class Spawned(subprocess.Popen[bytes]):
    """A process of this machine, in a session of its own: Ctrl-C reaches only the supervisor, which ends it."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Any = None) -> None:
        super().__init__(
            command,
            env={**variables, WATCHED_BY: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_the_program,
        )

    def end(self) -> None:
        """End all of its session."""
        _end_group(self)


class Here:
    """This machine."""

    def start(self, training: Training, log: Any) -> Process:
        """Start this machine's share of a run's processes."""
        run = training.run
        variables = environment(run, training.device_type, os.environ, rendezvous=training.rendezvous)
        command = command_line(
            training.arguments, training.processes, training.rendezvous, framework=run.strategy.framework
        )
        return Spawned(command, variables | {LAUNCHED_AT: str(time.time())}, log)

    def spawn(self, training: Training, arguments: Sequence[str], variables: Mapping[str, str]) -> Process:
        """Start Python."""
        return Spawned([sys.executable, *arguments], variables)


def before_the_program() -> None:
    """Run in a child between fork and exec."""
    # If the supervisor is killed, the kernel ends its child. Workers ask for the same with respect to torchrun.
    die_with_parent()
    end_in_words()
    # Slurm may send its warning to all processes of a job. Only the supervisor handles it; it would end torchrun.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if _in_a_job():
        # Likewise, where it knows them by their parents or groups and not by cgroups: in a preemption's grace, ranks
        # still have to save. Not ignored: torchrun would handle it. Ranks take it themselves (`withstand_sigterm`).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _in_a_job() -> bool:
    return "SLURM_JOB_ID" in os.environ


def _end_group(leader: Process) -> None:
    """SIGTERM to a process group of this machine's, then SIGKILL."""
    if leader.poll() is None and not _in_a_job():  # where SIGTERM is blocked
        _signal_group(leader.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(timeout=GRACE_S)
    # torchrun may be gone while a rank still hangs in a collective.
    _signal_group(leader.pid, signal.SIGKILL)
    leader.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


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


def _copy_lines(reading: int, log: FileIO) -> None:
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


def _write_redacted(log: FileIO, lines: bytes) -> None:
    with suppress(OSError):
        write_all(log, redacted(lines.decode(errors="surrogateescape")).encode(errors="surrogateescape"))


_JOIN_S = 300
"""How long the first node waits for the others."""
MALLOC = {
    # glibc returns freed tensors to the system and faults them in again: 1.1 to 1.7 times the time per step on a CPU.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Rendezvous:
    """One node's part in the rendezvous of a run's several nodes."""

    node: int
    """0 is the head, which hosts the store that all nodes connect to."""
    nodes: int
    host: str
    port: int
    id: str
    """Identifies this start of this job: processes of another job on the same port are refused."""
    secret: str
    """Known to this job's nodes alone: what the suite itself listens with refuses everybody else."""
    interface: str | None = None
    """Of this node, that gloo is told; None: it finds the right one by itself."""


WORKER, CALIBRATION = "parallelbench.training.worker", "parallelbench.measure.calibration"
"""What each rank executes: a run, or a calibration."""


def command_line(
    arguments: Sequence[str],
    processes: int,
    rendezvous: Rendezvous | None = None,
    *,
    program: str = WORKER,
    framework: str = "torch",
) -> list[str]:
    """One process directly; several through torchrun, which on one machine picks a free port by itself.

    Frameworks besides torch have a starter of the suite's. `arguments` are those of `program`. What starts workers
    records their exits.
    """
    alone = processes == 1 and not has_own(framework)
    if framework != "torch" and not alone:
        return [sys.executable, "-m", "parallelbench.training.starter", *arguments]
    worker = ["-m", program, *arguments]
    if alone:
        return [sys.executable, *worker]
    if rendezvous is None:
        torchrun = [*MEETING_HERE, f"--nproc-per-node={processes}"]
    else:
        torchrun = [
            f"--nnodes={rendezvous.nodes}",
            f"--nproc-per-node={processes // rendezvous.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={rendezvous.host}:{rendezvous.port}",
            f"--rdzv-id={rendezvous.id}",
            f"--rdzv-conf=is_host={int(rendezvous.node == 0)},join_timeout={_JOIN_S}",
            f"--local-addr={rendezvous.host}" if rendezvous.node == 0 else "",
        ]
    torchrun = [option for option in torchrun if option]
    starter = ["torch.distributed.run"]
    if program == WORKER:
        exits = exits_file(Path(arguments[0], "attempts", arguments[1]), rendezvous.node if rendezvous else 0)
        starter = ["parallelbench.training.torchrun", str(exits)]
    return [sys.executable, "-m", *starter, *torchrun, "--max-restarts=0", *worker]


def calibration_arguments(prepared: Prepared, path: Path) -> list[str]:
    """The arguments of a calibration on the devices of a run."""
    run = prepared.planned.run
    return [str(path.absolute()), run.device, canonical_json(to_mapping(run))]


def environment(
    run: RunConfig, device_type: str, shell: Mapping[str, str], *, rendezvous: Rendezvous | None = None
) -> dict[str, str]:
    """Environment variables of the training processes, from this process's."""
    if run.strategy.starts_ranks:  # whose environment is the user's own
        own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if rendezvous is not None:
            own[RENDEZVOUS] = f"{rendezvous.node} {rendezvous.host}:{rendezvous.port} {rendezvous.secret}"
        return inherited(shell) | own
    own = {
        # A stray conf.py or analysis/ in the working directory must not shadow ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # Logs are UTF-8, whatever the terminal is: printing must not end a rank.
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        # torch counts GPUs as the driver's tools do.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # A rank that drives GPUs takes its share of the cores beside them, once it knows which these are (`pin`).
        "OMP_NUM_THREADS": str(run.cores_per_device if device_type == "cpu" else 1),
        # numpy starts a thread pool on import. Nothing here uses it, and it would not survive a fork.
        "OPENBLAS_NUM_THREADS": "1",
        **_network(run, rendezvous),
        **(run.nccl.variables() if device_type == "cuda" else {}),
        **MALLOC,
    }
    if run.strategy.framework != "torch":
        own["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors only
        if rendezvous is not None:
            own[RENDEZVOUS] = f"{rendezvous.node} {rendezvous.host}:{rendezvous.port} {rendezvous.secret}"
    if run.compile:
        # Code that an earlier run compiled must not shorten this run's start.
        own["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    if run.measure.deterministic:
        own["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return inherited(shell) | own


def _network(run: RunConfig, rendezvous: Rendezvous | None) -> dict[str, str]:
    """Variables that choose the interface between ranks. On one machine ranks listen on loopback only."""
    if rendezvous is None:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    # NCCL never takes loopback by itself.
    found = {"GLOO_SOCKET_IFNAME": rendezvous.interface, "NCCL_SOCKET_IFNAME": run.site.network_interface}
    return {name: interface for name, interface in found.items() if interface is not None}


_GONE = "the warm process has ended"


class WarmWorkers:
    """The warm process of an environment and of cores: a library reads its variables when it is loaded, before forks.

    A new one for each repeat. Forks share the addresses of code and libraries, which make a process faster or slower
    for its whole life: repeats that shared them would agree more than separate runs do. One at a time: in a Slurm job
    it is a step, which has all of the job's cores and memory.

    A context; at its end the warm process is gone. `start` starts runs that are not packed at its place.
    """

    def __init__(self, place: Place | None = None) -> None:
        self._place = place or Here()
        self._parent: _Parent | None = None

    def __enter__(self) -> WarmWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._parent is not None:
            self._parent.close()
        self._parent = None

    def start(self, training: Training, log: Any) -> Process:
        """Start the processes of a run; cold ones where a warm process can't be forked."""
        refusal = self._fork(training, log) if training.run.launcher.packed else None
        if isinstance(refusal, WarmProcess):
            return refusal
        if refusal is not None:
            print(f"parallelbench: {training.folder.path.name} is started cold: {refusal}", flush=True)
        self._close()
        return self._place.start(training, log)

    def _fork(self, training: Training, log: Any) -> WarmProcess | str:
        """The processes of one run, or why they can't be forked."""
        variables = environment(training.run, training.device_type, os.environ)
        key = (training.run.repeat, frozenset(variables.items()), frozenset(os.sched_getaffinity(0)))
        if self._parent is None or self._parent.key != key or not self._parent.alive():
            self._close()
            self._parent = _Parent(self._place, training, variables, key)
        return self._parent.start(ForkRequest(arguments=training.arguments, processes=training.processes), log)


class _Parent:
    """The warm process that the ranks of one repeat are forked from."""

    def __init__(self, place: Place, training: Training, variables: dict[str, str], key: object) -> None:
        self.key = key
        with WarmDoor() as door:
            self.process = place.spawn(training, door.arguments(), variables)
            try:
                self._socket = door.opened(self._begins)
            except BaseException:  # a signal
                self.process.end()
                raise

    def _begins(self) -> bool:
        heed()
        return self.alive()

    def alive(self) -> bool:
        return self.process.poll() is None

    def start(self, request: ForkRequest, log: Any) -> WarmProcess | str:
        """The processes of one run, which print to the file `log`, or why they can't be forked."""
        try:
            socket.send_fds(self._socket, [msgspec.json.encode(request)], [log.fileno()])
        except ConnectionError:
            return _GONE
        while not self.answers_within(0):  # it begins, which takes seconds
            rest(None, self)
            heed()
        answer = self.answer(0)
        return WarmProcess(answer, self) if isinstance(answer, int) else answer or _GONE

    def fileno(self) -> int:
        """What can be read once there is an answer."""
        return self._socket.fileno()

    def answer(self, flags: int) -> int | str | None:
        """Its next answer; None where the process has ended instead."""
        try:
            content = self._socket.recv(MESSAGE_BYTES, flags)
        except ConnectionError:
            content = b""
        answer: int | str | None = msgspec.json.decode(content, type=int | str) if content else None
        return answer

    def answers_within(self, timeout_s: float | None) -> bool:
        """Whether an answer comes, or the process ends, within `timeout_s` seconds (None: wait)."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def close(self) -> None:
        self._socket.close()  # which ends it
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=GRACE_S)
        self.process.end()


class WarmProcess:
    """The processes of one run that are forks: the leader of their process group."""

    def __init__(self, pid: int, parent: _Parent) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def fileno(self) -> int:
        """What can be read once they have ended."""
        return self._parent.fileno()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not self._parent.answers_within(timeout):
                raise subprocess.TimeoutExpired("parallelbench.training.warm", timeout or 0.0)
            # The answer is removed after it is stored: if a signal interrupts this line, the next call still gets it.
            code = self._parent.answer(socket.MSG_PEEK)
            # Without an answer the warm process has ended, and its forks with it.
            self.returncode = code if isinstance(code, int) else self._parent.process.wait() or 1
            self._parent.answer(0)
        return self.returncode

    def end(self) -> None:
        """End all of its group."""
        _end_group(self)
