"""Device-hours that jobs may use and that attempts have used, separately for GPUs and cores."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelbench.results.attempt import HEARTBEAT_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from launch.launcher import Look
    from launch.slurm.record import Submission
    from parallelbench.config.sites import SlurmLauncher
    from parallelbench.results.attempt import Attempt

STUCK_S = 120.0
"""A job that is still there so long after the end of its last run is stuck; ending takes it seconds."""


@dataclass(frozen=True)
class Hours:
    """A sum over devices."""

    gpu: float = 0.0
    """Of GPUs that the jobs request from Slurm."""
    cpu: float = 0.0
    """Of devices that are cores, in jobs that request no GPU."""

    @classmethod
    def of(cls, seconds: float, *, devices: int, gpus: bool) -> Hours:
        """The hours of `devices` devices for `seconds`."""
        hours = devices * seconds / 3600
        return cls(gpu=hours) if gpus else cls(cpu=hours)

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.gpu + other.gpu, self.cpu + other.cpu)

    def __bool__(self) -> bool:
        return bool(self.gpu or self.cpu)

    def __str__(self) -> str:
        parts = [f"{self.gpu:.2f} GPU-hours"] if self.gpu or not self.cpu else []
        return " and ".join([*parts, *([f"{self.cpu:.2f} CPU device-hours"] if self.cpu else [])])


def most_seconds(launcher: SlurmLauncher) -> float:
    """Most time that a job may take, s: the time limit times the allowed starts."""
    return 60.0 * launcher.time_limit_min * launcher.attempts


def used(submissions: Sequence[Submission], attempts: Sequence[Attempt]) -> Hours:
    """Device-hours used by those attempts that jobs started. A job's own start and end are not included.

    `submissions` are all of the run. Each attempt had the devices of its own one; if its record is gone, of the last.
    """
    by_token, total = {each.token: each for each in submissions}, Hours()
    for attempt in attempts:
        if (supervisor := attempt.supervisor()) is not None and supervisor.job:
            own = by_token.get(supervisor.job.partition(".")[0], submissions[-1])
            total += Hours.of(seconds(attempt), devices=own.devices, gpus=own.asks_for_gpus)
    return total


def left(
    submission: Submission, attempts: Sequence[Attempt], *, running: bool, again: bool = True, paused: bool = False
) -> Hours:
    """Device-hours that a job in the queue may still use, at most; `attempts` are those of all its runs.

    Its earlier starts do not count, nor does the time that the attempts of the present start have taken. `again`:
    whether it may start once more. `paused`: it is suspended, for a time that Slurm does not count.
    """
    limit_s = 60.0 * submission.launcher.time_limit_min
    began: dict[int, list[float]] = {}
    for attempt in attempts:
        restarts = _restarts(submission, attempt)
        if restarts is not None:
            began.setdefault(restarts, []).append(_began(attempt))
    if not began:
        return Hours.of(most_seconds(submission.launcher), devices=submission.devices, gpus=submission.asks_for_gpus)
    last = max(began)
    whole_s = max(0, submission.launcher.attempts - last - 1) * limit_s if again else 0.0
    taken_s = 0.0 if paused else max(0.0, time.time() - min(began[last]))
    this_s = max(0.0, limit_s - taken_s) if running else 0.0
    return Hours.of(whole_s + this_s, devices=submission.devices, gpus=submission.asks_for_gpus)


def _restarts(submission: Submission, attempt: Attempt) -> int | None:
    """In which start of the submission's job an attempt began, from 0; None: in another job."""
    supervisor = attempt.supervisor()
    token, _, start = supervisor.job.partition(".") if supervisor else ("", "", "")
    number = start.rpartition(".")[2]
    return int(number) if token == submission.token and number.isdecimal() else None


def _began(attempt: Attempt) -> float:
    """When an attempt was claimed, Unix time, s."""
    try:
        return os.stat(attempt.path / "supervisor.json").st_mtime
    except OSError:
        return time.time()


def seconds(attempt: Attempt) -> float:
    """How long an attempt has taken so far, s: from its description to half a beat after its last heartbeat."""
    try:
        began = os.stat(attempt.path / "attempt.json").st_mtime
    except OSError:
        return 0.0
    try:
        # Not the outcome's time: another process may have written it much later.
        return max(0.0, os.stat(attempt.path / "heartbeat").st_mtime + HEARTBEAT_S / 2 - began)
    except OSError:
        return 0.0


def may_hold(records: Mapping[Path, Sequence[Submission]], runs: Mapping[Path, Look]) -> bool:
    """Whether Slurm may still have a job of runs that are done: later than its time limit after, it can't."""
    for sweep, submissions in records.items():
        limit_s = 60.0 * max((each.launcher.time_limit_min for each in submissions), default=0)
        ends = (state.outcome.finished_at for _, state in runs.get(sweep, ()) if state.outcome is not None)
        if submissions and any(STUCK_S < time.time() - end < limit_s + STUCK_S for end in ends):
            return True
    return False
