"""What Slurm knows of the runs of a sweep, laid over what their folders say. The folders come first.

Order of truth: a valid result, the attempt's own last word, the queue, then accounting, which is asked only about what
the others leave open.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from launch.slurm import job as jobs
from launch.slurm import record, scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from launch.slurm.record import Submission
    from launch.slurm.scheduler import QueuedJob
    from parallelbench.folder import RunFolder, State

UNSEEN_S = 60.0
"""A submission whose answer got lost, and whose job has not shown up for so long, never reached Slurm."""
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "PREEMPTED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"}


@dataclass(frozen=True)
class RunStatus:
    """One run: what its folder says, and what Slurm does."""

    state: State
    job: str = ""
    queued: QueuedJob | None = None
    """Its job in the queue; None: not there (any more)."""
    name: str = ""
    """The job's name: Slurm gives ids out again."""
    unknown: bool = False
    """It was submitted, and whether Slurm has it can't be said yet."""
    ended: str = ""
    """What accounting says of a job that left no word."""

    @property
    def live(self) -> bool:
        """Whether a job will still work on it."""
        return self.state.state != "done" and (self.queued is not None or self.unknown)

    @property
    def label(self) -> str:
        """An outcome, or running, queued, missing, unknown."""
        if self.state.state == "done" or not self.live:
            return self.state.label
        if self.queued is None:
            return "unknown"
        return "queued" if self.queued.state in WAITING else "running"

    @property
    def reason(self) -> str:
        """One line: why it waits, or how it ended."""
        if self.live and self.queued is None:
            return "submitted; whether Slurm has the job can't be said yet"
        if self.live and self.label == "queued" and self.queued is not None:
            at = f", expected to start {self.queued.starts_at}" if self.queued.starts_at else ""
            # "None": the scheduler has not looked at it yet.
            return f"{self.queued.reason if self.queued.reason != 'None' else 'just submitted'}{at}"
        if self.live:
            return ""
        told = self.state.outcome.reason if self.state.outcome else ""
        if self.ended and self.state.outcome is None:
            return f"its job ended before the run began: {self.ended}; `parallelbench logs` shows what it printed"
        return f"{told} ({self.ended})" if self.ended else told

    def wanted(self, retry: frozenset[str]) -> bool:
        """Whether submitting should start it; `retry` are outcomes to try again besides those that always are."""
        if self.live or self.state.state in ("done", "running"):
            return False
        return self.state.to_run or self.state.label in retry


@dataclass(frozen=True)
class Tracker:
    """The jobs of one sweep."""

    jobs: dict[str, tuple[Submission, int]] = field(default_factory=dict)
    """Run → its latest submission, and the task of it."""
    queue: dict[str, QueuedJob] = field(default_factory=dict)
    answered: bool = True
    """Whether the queue is what Slurm says; else it could not be asked."""

    @classmethod
    def of(cls, sweep: Path, *, locked: bool = False) -> Tracker:
        """Ask the queue once, adopt what an interrupted submission left; raises `SchedulerError` without an answer.

        Whoever holds the sweep's lock (`locked`) also forgets what Slurm never got: nobody is just submitting it.
        """
        submissions = record.submissions(sweep)
        if not submissions:
            return cls()
        settled = [submission if submission.job else _adopt(sweep, submission, locked) for submission in submissions]
        return cls(_by_run(submission for submission in settled if submission is not None), scheduler.queue())

    @classmethod
    def unanswered(cls, sweep: Path) -> Tracker:
        """What the records alone say, where Slurm gives no answer."""
        return cls(_by_run(record.submissions(sweep)), answered=False)

    def queued(self, submission: Submission, task: int) -> QueuedJob | None:
        """The job of a task, if it is in the queue; one of the same id and another name is somebody else's."""
        found = self.queue.get(submission.job_of(task) or "")
        return found if found is not None and found.name == submission.name else None

    def status(self, folder: RunFolder, state: State | None = None) -> RunStatus:
        """One run's; `state` where its folder has been looked at already."""
        state = state or folder.state()
        if folder.path.name not in self.jobs:
            return RunStatus(state)
        submission, task = self.jobs[folder.path.name]
        job = submission.job_of(task)
        if job is None or not self.answered:
            return RunStatus(state, job or "", name=submission.name, unknown=state.state == "missing")
        queued = self.queued(submission, task)
        if queued is not None and _worked_through(state, submission, queued):
            queued = None
        return RunStatus(state, job, queued, submission.name)


def _by_run(submissions: Iterable[Submission]) -> dict[str, tuple[Submission, int]]:
    return {
        name: (submission, task)
        for submission in submissions
        for task, names in enumerate(submission.tasks)
        for name in names
    }


def _worked_through(state: State, submission: Submission, queued: QueuedJob) -> bool:
    """Whether the run is over although its job is not: one of several in a packed job, or in its last moments."""
    if state.state != "failed" or state.outcome is None or not state.outcome.finished_at:
        return False
    return queued.state not in WAITING and not state.to_run and state.outcome.finished_at > submission.created_at


def explained(statuses: Iterable[RunStatus]) -> list[RunStatus]:
    """Add what accounting knows about jobs that left no word of their own."""
    statuses = list(statuses)
    ended = scheduler.ended({status.job: status.name for status in statuses if _silent(status)})
    return [replace(status, ended=ended.get(status.job, "")) if _silent(status) else status for status in statuses]


def _silent(status: RunStatus) -> bool:
    if not status.job or status.live:
        return False
    return status.state.state == "missing" or (
        status.state.outcome is not None and not status.state.outcome.finished_at
    )


def _adopt(sweep: Path, submission: Submission, locked: bool) -> Submission | None:
    """Find the job of a submission that was cut off; None where Slurm never got it."""
    if found := scheduler.named(submission.name):
        submission = msgspec.structs.replace(submission, job=found[-1])
        with record.private():
            jobs.leave_calls(record.folder_of(sweep, submission.token) / "submission.json", submission)
        record.write(sweep, submission)
        return submission
    if time.time() - submission.created_at <= UNSEEN_S:
        return submission
    if locked:
        record.withdraw(sweep, submission)
    return None
