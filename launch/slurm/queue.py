"""What Slurm knows of the runs of a sweep, laid over what their folders say. The folders come first.

Order of truth: a valid result, the attempt's own last word, the queue, then accounting, which is asked only about what
the others leave open. However many sweeps there are, `track` asks the queue once and accounting at most once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from launch.slurm import job as jobs
from launch.slurm import record, scheduler
from parallelbench.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from launch.slurm.record import Submission
    from launch.slurm.scheduler import QueuedJob
    from parallelbench.store.folder import RunFolder, State

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
    unknown: bool = False
    """It was submitted, and whether Slurm has it can't be said yet."""
    ended: str = ""
    """What accounting says of a job that left no word."""
    packed: bool = False
    """Its job works through several runs."""
    tried: bool = False
    """The outcome in its folder is later than the submission of its job."""

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
        if self.queued.state in WAITING:
            return "queued"
        if not self.packed or self.state.state == "running":
            return "running"
        return self.state.label if self.tried else "queued"

    @property
    def reason(self) -> str:
        """One line: why it waits, or how it ended."""
        told = self.state.outcome.reason if self.state.outcome else ""
        if self.label == "unknown":
            before = f"; before that: {self.state.label}" if told else ""
            return f"submitted; whether Slurm has the job can't be said yet{before}"
        if self.label == "queued" and self.queued is not None:
            return _waiting(self.queued)
        if self.label == "running":
            return ""
        if self.state.state == "missing" and self.job:
            how = f"ended before the run began: {self.ended}" if self.ended else "left no word"
            return f"its job {self.job} {how}; `parallelbench logs` shows what it printed"
        return f"{told} ({self.ended})" if self.ended else told

    def wanted(self, retry: frozenset[str]) -> bool:
        """Whether submitting should start it; `retry` are outcomes to try again besides those that always are."""
        if self.live or self.state.state in ("done", "running"):
            return False
        return self.state.to_run or self.state.label in retry


def _waiting(queued: QueuedJob) -> str:
    """Why a run has not begun."""
    if queued.state not in WAITING:
        return "waits in its packed job"
    at = f", expected to start {queued.starts_at}" if queued.starts_at else ""
    # "None": the scheduler has not looked at it yet.
    return f"{queued.reason if queued.reason != 'None' else 'just submitted'}{at}"


@dataclass(frozen=True)
class Tracker:
    """The jobs of one sweep."""

    jobs: dict[str, list[tuple[Submission, int]]] = field(default_factory=dict)
    """Run → its submissions, the latest last, and the task of each."""
    queue: dict[str, QueuedJob] = field(default_factory=dict)
    answered: bool = True
    """Whether the queue is what Slurm says; else it could not be asked."""
    ended: dict[tuple[str, str], str] = field(default_factory=dict)
    """(job, its name) → how accounting says that it ended."""

    @classmethod
    def unanswered(cls, submissions: Iterable[Submission]) -> Tracker:
        """What the records alone say, where Slurm gives no answer."""
        return cls(by_run(submissions), answered=False)

    @property
    def submissions(self) -> list[Submission]:
        """All that a run of the sweep is in, also those that a later one has tried again."""
        return list({each.token: each for found in self.jobs.values() for each, _ in found}.values())

    def queued(self, submission: Submission, task: int) -> QueuedJob | None:
        """The job of a task, if it is in the queue; one of the same id and another name is somebody else's."""
        found = self.queue.get(submission.job_of(task) or "")
        return found if found is not None and found.name == submission.name else None

    def in_queue(self) -> list[QueuedJob]:
        """All jobs of the sweep that are in the queue."""
        names = {submission.name for submission in self.submissions}
        return [job for job in self.queue.values() if job.name in names]

    def of(self, name: str) -> tuple[Submission, int] | None:
        """The latest submission of a run that has a job in the queue, else its latest, and the task of it."""
        found = self.jobs.get(name, [])
        queued = [each for each in found if self.queued(*each) is not None]
        return next(reversed(queued or found), None)

    def status(self, folder: RunFolder, state: State | None = None) -> RunStatus:
        """One run's; `state` where its folder has been looked at already."""
        state = state or folder.state()
        found = self.of(folder.path.name)
        if found is None:
            return RunStatus(state)
        submission, task = found
        job = submission.job_of(task)
        tried = state.outcome is not None and state.outcome.finished_at > submission.created_at
        if job is None or not self.answered:
            over = tried and (self.answered or not _may_start_again(folder, state, submission))
            return RunStatus(state, job or "", unknown=state.state in ("missing", "failed") and not over)
        queued = self.queued(submission, task)
        if queued is not None and tried and _worked_through(folder, state, submission, queued):
            queued = None
        ended = self.ended.get((job, submission.name), "")
        return RunStatus(state, job, queued, ended=ended, packed=len(submission.tasks[task]) > 1, tried=tried)

    def silent(self, folder: RunFolder, state: State) -> bool:
        """Whether only accounting may know why the job of a run has ended: it left no word of its own."""
        status = self.status(folder, state)
        wordless = state.outcome is not None and not state.outcome.finished_at
        return bool(status.job) and not status.live and (state.state == "missing" or wordless)


Look = Sequence[tuple["RunFolder", "State"]]
"""Runs of one sweep, whose folders have been looked at."""


def track(
    records: Mapping[Path, Sequence[Submission]],
    runs: Mapping[Path, Look] | None = None,
    *,
    locked: bool = False,
    patient: bool = False,
    writes: bool = True,
) -> dict[Path, Tracker]:
    """The jobs of sweeps (folder → its submissions), and how those of `runs` have ended that left no word.

    Where all `runs` are done, nobody is asked. Adopts what interrupted submissions have left, for good unless `writes`
    is false; raises `SchedulerError` where the queue can't be asked. Whoever holds the sweeps' locks (`locked`) also
    forgets what Slurm never got: nobody is just submitting it.
    """
    if not any(records.values()):
        return {sweep: Tracker() for sweep in records}
    if runs is not None and all(state.state == "done" for sweep in records for _, state in runs.get(sweep, ())):
        return {sweep: Tracker.unanswered(submissions) for sweep, submissions in records.items()}
    queue = scheduler.queue(patient=patient)
    ids = {job.name: job.whole for job in queue.values()}
    known = {
        sweep: [_adopted(sweep, submission, ids, locked=locked, writes=writes) for submission in submissions]
        for sweep, submissions in records.items()
    }
    trackers = {sweep: Tracker(by_run(submissions), queue) for sweep, submissions in known.items()}
    lost = [submission for submissions in known.values() for submission in submissions if submission.job is None]
    silent = [
        found[0]
        for sweep, tracker in trackers.items()
        for folder, state in (runs or {}).get(sweep, ())
        if tracker.silent(folder, state) and (found := tracker.of(folder.path.name))
    ]
    if not (open_ := [*lost, *silent]):
        return trackers
    told = scheduler.accounted(
        {submission.name for submission in open_}, since=min(submission.created_at for submission in open_)
    )
    ids = {job.name: job.job.partition("_")[0] for job in told}
    ended = {(job.job, job.name): job.ended for job in told}
    return {
        sweep: Tracker(by_run(_settled(sweep, submissions, ids, locked, writes)), queue, ended=ended)
        for sweep, submissions in known.items()
    }


def by_run(submissions: Iterable[Submission]) -> dict[str, list[tuple[Submission, int]]]:
    """Run → its submissions in the order given, and the task of each."""
    found: dict[str, list[tuple[Submission, int]]] = {}
    for submission in submissions:
        for task, names in enumerate(submission.tasks):
            for name in names:
                found.setdefault(name, []).append((submission, task))
    return found


def _worked_through(folder: RunFolder, state: State, submission: Submission, queued: QueuedJob) -> bool:
    """Whether the run is over although its job is not: one of several in a packed job, or in its last moments."""
    if state.state != "failed" or queued.state in WAITING:
        return False
    return not _may_start_again(folder, state, submission)


def _may_start_again(folder: RunFolder, state: State, submission: Submission) -> bool:
    """Whether the job of a failed run would try it once more."""
    began = (attempt.supervisor() for attempt in folder.attempts())
    starts = sum(each is not None and each.job.startswith(f"{submission.token}.") for each in began)
    return state.to_run and starts < submission.launcher.attempts


def _adopted(sweep: Path, submission: Submission, ids: Mapping[str, str], *, locked: bool, writes: bool) -> Submission:
    """A submission that was cut off, with its job, if that is among those known by name."""
    if submission.job is not None or submission.name not in ids:
        return submission
    submission = msgspec.structs.replace(submission, job=ids[submission.name])
    if not writes:
        return submission
    try:
        with record.private():
            jobs.leave_calls(record.folder_of(sweep, submission.token) / "submission.json", submission)
        record.write(sweep, submission)
    except StorageError:
        if locked:
            raise  # who only looks says what there is, also where nothing can be written
    return submission


def _settled(
    sweep: Path, submissions: Sequence[Submission], ids: Mapping[str, str], locked: bool, writes: bool
) -> Iterator[Submission]:
    """Submissions less those that Slurm never got: their jobs are in neither answer, and had the time to turn up."""
    for submission in submissions:
        settled = _adopted(sweep, submission, ids, locked=locked, writes=writes)
        if settled.job is not None or time.time() - settled.created_at <= UNSEEN_S:
            yield settled
        elif locked:
            record.withdraw(sweep, settled)
