"""One start of a run: its folder, what is recorded there, and whether its supervisor still lives.

Reading raises only where a permission is missing, never because of what a crash left behind.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import msgspec
import yaml

from parallelbench.config.build import from_mapping, load_yaml, to_mapping
from parallelbench.config.sites import with_new_options
from parallelbench.errors import ConfigError, no_permission, one_line
from parallelbench.results import liveness
from parallelbench.results.files import fill, is_there, reserve, storage_errors, write_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from parallelbench.config.run import RunConfig


OutcomeName = Literal["ok", "parity_failed", "oom", "nan", "timeout", "killed", "storage", "error"]
OUTCOMES: tuple[str, ...] = get_args(OutcomeName)
PUBLISHED = ("ok", "parity_failed")
"""Outcomes of runs that trained to their end and have a `result/`."""
DISTURBED = "disturbed"
"""No outcome, but what a report says of finished runs, and `submit --retry` takes as well."""
RETRYABLE = ("timeout", "killed", "storage")
"""Outcomes caused by circumstances, not by the experiment: submitting again tries again."""

HEARTBEAT_S = 5.0
"""Interval at which the supervisor touches the heartbeat."""
ABSENCE_S = 60.0
"""Where this machine can't see a supervisor's lock, it counts as dead once its heartbeat is so old."""
WATCH_S = 3 * HEARTBEAT_S
"""How long an old heartbeat is watched before the next attempt begins: a file server may have stood still."""
_RECORD_BYTES = 4096
"""Reserved size of an outcome or of a rank's error file."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, and why, in one line."""

    outcome: OutcomeName
    reason: str
    finished_at: float
    """Unix time, s."""


class Supervisor(msgspec.Struct, frozen=True, kw_only=True):
    """The process that supervises an attempt. Host and process id inform people; they don't identify it, since several
    machines or containers may share them.
    """

    host: str
    pid: int
    machine: str = ""
    """The machine (`liveness.boot`) whose lock on the heartbeat shows that it lives; empty: there is no lock."""
    job: str = ""
    """The cluster's job that it is a part of, with how often that was restarted; empty where there is no such job."""


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt was started."""

    launched_at: float
    """Unix time just before the training processes were started or, with several nodes, before these met, s."""
    processes: int
    device_type: str
    oversubscribed: bool
    warnings: list[str] = []
    """Caveats of this attempt's times."""
    submit: str = ""
    """Identifies the command that asked for it; empty: not recorded."""
    job_ends_at: float | None = None
    """Unix time at which the cluster ends the job that it is a part of, s, as it was at the start; null: there is none,
    or not recorded. `checkpoint=auto` judges by it whether the epochs that remain fit, the queue whether a run ran out
    of time. An operator may move the end; the run stops at the cluster's warning, which follows the operator."""
    waited_s: float | None = None
    """From its submission to the start of the job that it is a part of, s; null: there is none, or it was started
    again."""


@dataclass(frozen=True)
class Attempt:
    """The folder of one start of a run."""

    path: Path
    lock: liveness.Lock | None = field(default=None, compare=False, repr=False)
    """The lock on the heartbeat, in the process that has claimed the attempt."""

    @property
    def number(self) -> int:
        """Counts from 1."""
        return int(self.path.name)

    @property
    def log(self) -> Path:
        """Everything the training processes print."""
        return self.path / "log.txt"

    @property
    def heartbeat(self) -> Path:
        """Locked by the supervisor while it lives, and touched every `HEARTBEAT_S`."""
        return self.path / "heartbeat"

    @property
    def checkpoints(self) -> Path:
        """Training states that a later attempt goes on from; the run's, not the attempt's own."""
        return self.path.parents[1] / "checkpoints"

    def write_config(self, run: RunConfig) -> None:
        """Record what this attempt executes: the intent, with the launcher and site of today."""
        write_config(self.path / "config.yaml", run)

    def config(self, plugin: str | None = None) -> RunConfig:
        """What `write_config` recorded; raises `ConfigError` where it is missing or damaged."""
        return read_config(self.path / "config.yaml", plugin)

    def error_file(self, rank: int) -> Path:
        """Where a rank writes why it ended early; reserved before it starts."""
        return self.path / f"error-rank{rank}.json"

    def trace_file(self, rank: int) -> Path:
        """Where a rank's Chrome trace goes, with `measure.trace=true`."""
        return self.path / f"trace-rank{rank}.json"

    def describe(
        self,
        *,
        processes: int,
        device_type: str,
        oversubscribed: bool,
        warnings: Sequence[str] = (),
        submit: str = "",
        job_ends_at: float | None = None,
        waited_s: float | None = None,
    ) -> None:
        """Record how this attempt is started; reserve space for its outcome and its ranks' error files."""
        for path in (self._outcome, *map(self.error_file, range(processes))):
            reserve(path, _RECORD_BYTES)
        info = AttemptInfo(
            launched_at=time.time(),
            processes=processes,
            device_type=device_type,
            oversubscribed=oversubscribed,
            warnings=list(warnings),
            submit=submit,
            job_ends_at=job_ends_at,
            waited_s=waited_s,
        )
        write_file(self.path / "attempt.json", msgspec.json.encode(info))

    def info(self) -> AttemptInfo | None:
        """What `describe` recorded; None where the attempt died before it could."""
        return decoded(self.path / "attempt.json", AttemptInfo)

    def ask_to_stop(self) -> None:
        """Request that the ranks save their state after the current epoch and end; any process may."""
        with storage_errors(self._stop):
            self._stop.touch()

    def stop_requested(self) -> bool:
        """Whether any process has called `ask_to_stop`."""
        return self._stop.exists()

    @property
    def _outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def _stop(self) -> Path:
        return self.path / "stop"

    def withdraw(self) -> None:
        """Remove an attempt that could not be described."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finish(self, outcome: OutcomeName, reason: str) -> Outcome:
        """Write the terminal record. It fits the space reserved at the start, so a full disk can't prevent it."""
        record, path = Outcome(outcome=outcome, reason=one_line(reason), finished_at=time.time()), self._outcome
        if not is_there(path):  # its supervisor died before it described the attempt
            reserve(path, _RECORD_BYTES)
        fill(path, msgspec.json.encode(record))
        return record

    def outcome(self) -> Outcome | None:
        """The terminal record, if there is one."""
        return decoded(self._outcome, Outcome)

    def supervisor(self) -> Supervisor | None:
        """The process that claimed this attempt."""
        return decoded(self.path / "supervisor.json", Supervisor)

    def occupy(self, job: str) -> liveness.Lock:
        """Make the calling process the supervisor of a folder that nobody else sees yet; returns the lock."""
        self.heartbeat.touch()
        lock = liveness.Lock(self.heartbeat)
        me = Supervisor(host=socket.gethostname(), pid=os.getpid(), machine=lock.machine, job=job)
        write_file(self.path / "supervisor.json", msgspec.json.encode(me))
        return lock

    def supervised(self) -> bool:
        """Whether this attempt's supervisor is alive."""
        supervisor = self.supervisor()
        return liveness.alive(self.heartbeat, supervisor.machine if supervisor else "", absence_s=ABSENCE_S)

    def stirs(self) -> bool:
        """Whether a supervisor that seems dead goes on; watches the heartbeat where a lock on it could be unseen."""
        supervisor = self.supervisor()
        seen = supervisor is not None and supervisor.machine and supervisor.machine == liveness.boot()
        return not seen and liveness.stirs(self.heartbeat, within_s=WATCH_S)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Show others that the calling process, which has claimed this attempt, is alive; at the end no longer."""
        try:
            with liveness.touched(self.heartbeat, every_s=HEARTBEAT_S):
                yield
        finally:
            if self.lock is not None:
                self.lock.release()


def write_config(path: Path, run: RunConfig) -> None:
    """Write a run's configuration as YAML."""
    # libyaml, where it is there, writes the same text in an eighth of the time.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    write_file(path, yaml.dump(to_mapping(run), Dumper=dumper, sort_keys=False).encode())


def read_config(path: Path, plugin: str | None = None) -> RunConfig:
    """Read a run's configuration; raises `ConfigError` where it is missing, damaged or foreign."""
    try:
        plain = load_yaml(path.read_bytes())
    except PermissionError as error:
        raise ConfigError(no_permission(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no run's configuration: {one_line(str(error))}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} is no run's configuration: it holds no keys")
    try:
        return from_mapping(with_new_options(plain), plugin)
    except ConfigError as error:  # lists of runs have a line for each
        raise ConfigError(one_line(str(error))) from None


Record = TypeVar("Record")


def decoded(path: Path, kind: type[Record]) -> Record | None:
    """The struct that a JSON file holds; None where there is none, or a damaged one.

    Raises `PermissionError`: a file without permission may be whole.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except PermissionError:
        raise
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # a ValidationError is a DecodeError
        return None
