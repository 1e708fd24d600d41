"""The runs of a sweep: the states of their folders, completed by Slurm's answers. The folders come first.

Order of truth: a valid result, the attempt's own outcome, the queue, then accounting, which is asked only about what
the others leave open. However many sweeps there are, `track` asks the queue once and accounting at most once.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from launch.attempt.outcome import unsaved
from launch.slurm import record, scheduler
from launch.slurm.job import leave_calls
from launch.slurm.sbatch import Hours, slurm
from launch.slurm.time_limit import WARNING_OFF_BY_S
from launch.states import RunStatus, saved
from parallelbench.errors import StorageError
from parallelbench.results import liveness
from parallelbench.results.attempt import HEARTBEAT_S, Attempt, Outcome
from parallelbench.results.folder import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from launch.slurm.record import Submission
    from launch.slurm.scheduler import QueuedJob
    from launch.states import Look
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Site, SlurmLauncher
    from parallelbench.results.folder import RunFolder


SILENT_S = 300.0
"""A supervisor whose job Slurm no longer has, and whose heartbeat is older, is dead whatever its lock says: the file
server may keep the lock of a node that died (NFSv3) until that node is back."""
UNSEEN_S = 60.0
"""A submission whose answer was lost, and whose job has not appeared for this time, never reached Slurm."""
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "PREEMPTED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"}
PAUSED = {"SUSPENDED", "STOPPED"}
"""A job has begun, and does nothing until Slurm lets it go on."""


@dataclass(frozen=True)
class JobStatus:
    """One run: the state of its folder, and its job in Slurm."""

    state: State
    job: str = ""
    """The job that works on it, or did; empty: none."""
    queued: QueuedJob | None = None
    """Its job in the queue; None: it is not there (any more)."""
    unknown: bool = False
    """It was submitted, but it is not known yet whether Slurm has its job."""
    ended: str = ""
    """How a job without an outcome ended, according to accounting."""
    packed: bool = False
    """Its job works through several runs."""
    tried: bool = False
    """The outcome in its folder is that of an attempt of its job's."""
    again: bool = False
    """Its job waits for another start, and Slurm has not said what for."""
    needs: str = ""
    """What must change before another try can end otherwise; empty: nothing that is known."""
    elsewhere: str = ""
    """The other cluster that may have its job; empty: none has."""
    reached_min: int = 0
    """The time limit, in minutes, that ended its job; 0: another end, or none."""

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
        if self.queued.state in WAITING | PAUSED:
            return "queued"
        if not self.packed or self.state.state == "running":
            return "running"
        return self.state.label if self.tried else "queued"

    @property
    def reason(self) -> str:
        """One line: why it waits, or how it ended."""
        recorded = self.state.outcome.reason if self.state.outcome else ""
        if self.label == "unknown":
            before = f"; before that: {self.state.label}" if recorded else ""
            if self.elsewhere:
                return f"submitted to the cluster {self.elsewhere}, and its job is known only there{before}"
            return f"submitted; it is not known yet whether Slurm has the job{before}"
        if self.label == "queued" and self.queued is not None:
            return _waiting(self.queued, again=self.again)
        if self.label == "running":
            return ""
        if self.state.state == "missing" and self.job:
            how = f"ended before the run began: {self.ended}" if self.ended else "left no outcome"
            return f"its job {self.job} {how}; `parallelbench logs` shows what it printed"
        how = "; ".join(filter(None, [self.ended, self.needs]))
        return f"{recorded} ({how})" if how else recorded

    def shown(self) -> RunStatus:
        """What `status` lists."""
        return RunStatus(self.state, self.label, self.reason, self.job, hidden=bool(self.elsewhere))

    def starts(self, retry: frozenset[str]) -> bool:
        """Whether submitting starts it; `retry` are outcomes to try again besides those that always are."""
        if self.live or self.state.state == "running":
            return False
        return (self.state.to_run and not self.needs) or (self.state.unsuccessful and self.state.label in retry)


_HELD = {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_HELD_FOR = {
    *("JobHeldUser", "JobHoldMaxRequeue", "launch failed requeued held", "launch_failed_requeued_held"),
    *("job requeued in held state", "job_requeued_in_held_state"),
}
"""States, and reasons of waiting, of jobs that start only once somebody releases them."""


def _waiting(queued: QueuedJob, *, again: bool) -> str:
    """Why a run has not begun, or does not go on; `again`: its job has begun it before."""
    if queued.state in PAUSED:
        return "suspended: it has begun, and Slurm goes on with it later"
    if queued.state not in WAITING:
        return "waits in its packed job"
    at = f", expected to start {queued.starts_at}" if queued.starts_at else ""
    # "None": the scheduler has not looked at it yet.
    reason = queued.reason if queued.reason != "None" else "just queued again" if again else "just submitted"
    if queued.reason == "JobHeldAdmin":
        return f"{reason}: only the cluster's operators can release it"
    if queued.state in _HELD or queued.reason in _HELD_FOR:
        return f"{reason}: held until `scontrol release {queued.job}`"
    return f"{reason}{at}"


@dataclass(frozen=True)
class Tracker:
    """The jobs of one sweep."""

    jobs: dict[str, list[tuple[Submission, int]]] = field(default_factory=dict)
    """Run → its submissions, the latest last, and the task of each."""
    queue: dict[str, QueuedJob] = field(default_factory=dict)
    answered: bool = True
    """Whether Slurm has answered; else `queue` is empty because it could not be asked."""
    ended: dict[tuple[str, str], str] = field(default_factory=dict)
    """(job, its name) → how accounting says that it ended."""
    here: str = ""
    """This cluster's name; empty: not asked, since all jobs are known to be its own."""

    @classmethod
    def unanswered(cls, submissions: Iterable[Submission]) -> Tracker:
        """The records alone, for a Slurm that gives no answer."""
        return cls(by_run(submissions), answered=False)

    @property
    def submissions(self) -> list[Submission]:
        """All submissions of the sweep's runs, also those that a later one repeats."""
        return list({each.token: each for entries in self.jobs.values() for each, _ in entries}.values())

    def queued(self, submission: Submission, task: int) -> QueuedJob | None:
        """The job of a task, if it is in the queue; one with the same id and another name is another user's."""
        job = self.queue.get(submission.job_of(task) or "")
        return job if job is not None and job.name == submission.name else None

    def in_queue(self) -> list[QueuedJob]:
        """All jobs of the sweep that are in the queue."""
        names = {submission.name for submission in self.submissions}
        return [job for job in self.queue.values() if job.name in names]

    def of(self, name: str) -> tuple[Submission, int] | None:
        """A run's latest submission with a job in the queue, else its latest one, and the run's task in it."""
        entries = self.jobs.get(name, [])
        queued = [each for each in entries if self.queued(*each) is not None]
        return next(reversed(queued or entries), None)

    def status(self, folder: RunFolder, state: State | None = None, run: RunConfig | None = None) -> JobStatus:
        """One run's; `state` where its folder has been read already, `run` as it is asked for now."""
        state = self._as_it_is(folder, state or folder.state())
        latest = self.of(folder.path.name)
        if latest is None:
            return JobStatus(state)
        submission, task = latest
        job = submission.job_of(task)
        queued = self.queued(submission, task)
        if queued is None and (away := self._elsewhere(folder, state)):
            return JobStatus(state, job or "", unknown=True, elsewhere=away)
        tried = _tried(folder, state, submission)
        if job is None or not self.answered:
            over = tried and (self.answered or not _may_start_again(folder, state, submission))
            return JobStatus(state, job or "", unknown=state.state in ("missing", "failed") and not over)
        if queued is not None and tried and _worked_through(folder, state, submission, queued):
            queued = None
        ended = self.ended.get((job, submission.name), "")
        packed = len(submission.tasks[task]) > 1
        how = ended if state.label == "killed" else "TIMEOUT" if _ran_out(folder, state, submission) else ""
        alone = queued is None and not packed
        needs = _what_must_change(folder, how, submission, run) if how and alone else ""
        again = queued is not None and queued.reason == "None" and _starts(folder, submission) > 0
        reached = submission.launcher.limit_min if queued is None and "TIMEOUT" in (how, ended) else 0
        return JobStatus(
            state, job, queued, ended=ended, packed=packed, tried=tried, again=again, needs=needs, reached_min=reached
        )

    def _elsewhere(self, folder: RunFolder, state: State) -> str:
        """The other cluster that may still start a run that does not run now; empty: none."""
        if state.state not in ("missing", "failed"):
            return ""
        name = folder.path.name
        for submission, _ in reversed(self.jobs[name]):
            if not submission.is_elsewhere(self.here) or submission.has_cancelled(name):
                continue
            if not _over(folder, state, submission):
                return submission.cluster
        return ""

    def dead(self, folder: RunFolder, state: State) -> Attempt | None:
        """The attempt of a run that seems to be running, if it isn't: Slurm says so, and its heartbeat has stopped."""
        entries = self.jobs.get(folder.path.name, [])
        if state.state != "running" or not self.answered or any(self.queued(*entry) for entry in entries):
            return None
        attempt = Attempt(folder.path / "attempts" / str(state.attempt))
        supervisor = attempt.supervisor()
        if supervisor is None or supervisor.machine == liveness.boot():  # here, a lock that is seen is no old one
            return None
        token = supervisor.job.partition(".")[0]
        own = [each for each, _ in entries if each.token == token and each.job and not each.is_elsewhere(self.here)]
        if not own:
            return None
        try:
            return attempt if liveness.age_s(attempt.heartbeat) > SILENT_S else None
        except OSError:
            return None

    def _as_it_is(self, folder: RunFolder, state: State) -> State:
        """The state of a run's folder, corrected where its attempt is dead."""
        if self.dead(folder, state) is None:
            return state
        return State("failed", Outcome(outcome="killed", reason=_DEAD, finished_at=0.0), state.attempt)

    def silent(self, folder: RunFolder, state: State) -> bool:
        """Whether only accounting may know why the job of a run has ended: it left no outcome, or was killed."""
        status = self.status(folder, state)
        state = status.state
        unrecorded = state.outcome is not None and not state.outcome.finished_at
        killed = state.label == "killed" and status.tried
        return bool(status.job) and not status.live and (state.state == "missing" or unrecorded or killed)


def track(
    records: Mapping[Path, Sequence[Submission]],
    runs: Mapping[Path, Look] | None = None,
    *,
    locked: bool = False,
    patient: bool = False,
    writes: bool = True,
) -> dict[Path, Tracker]:
    """The jobs of sweeps (folder → its submissions), and how those of `runs` have ended that left no outcome.

    Where all `runs` are done, Slurm is not asked. Completes the records of interrupted submissions and of dead
    attempts, on disk unless `writes` is false; raises `SchedulerError` where the queue can't be asked. A caller that
    holds the sweeps' locks (`locked`) also removes what has never reached Slurm: no other process is submitting it at
    that moment.
    """
    if not any(records.values()):
        return {sweep: Tracker() for sweep in records}
    if runs is not None and all(state.state == "done" for sweep in records for _, state in runs.get(sweep, ())):
        return {sweep: Tracker.unanswered(submissions) for sweep, submissions in records.items()}
    queue = scheduler.queue(patient=patient)
    names = {job.name for job in queue.values()}
    unseen = any(each.cluster and each.name not in names for submissions in records.values() for each in submissions)
    here = scheduler.cluster_name(scheduler.configuration(patient=patient)) if unseen else ""
    adoption = _Adoption({job.name: job.whole for job in queue.values()}, locked=locked, writes=writes, here=here)
    known = {sweep: adoption.of(sweep, submissions) for sweep, submissions in records.items()}
    trackers = {sweep: Tracker(by_run(submissions), queue, here=here) for sweep, submissions in known.items()}
    if writes:
        _record_dead(trackers, runs or {}, locked=locked)
    unclear = _unclear(trackers, runs or {})
    if not unclear:
        return trackers
    accounted = scheduler.accounted(
        {submission.name for submission in unclear}, since=min(submission.created_at for submission in unclear)
    )
    adoption = replace(adoption, ids={job.name: job.job.partition("_")[0] for job in accounted})
    ended = {(job.job, job.name): job.ended for job in accounted}
    return {
        sweep: Tracker(by_run(adoption.without_lost(sweep, submissions)), queue, ended=ended, here=here)
        for sweep, submissions in known.items()
    }


_DEAD = "Slurm has its job no longer, and its heartbeat has stopped"


def _record_dead(trackers: Mapping[Path, Tracker], runs: Mapping[Path, Look], *, locked: bool) -> None:
    """Write down that dead attempts have ended: other commands and jobs, which don't ask Slurm, go by their locks."""
    for sweep, tracker in trackers.items():
        for folder, state in runs.get(sweep, ()):
            if (attempt := tracker.dead(folder, state)) is not None:
                try:
                    attempt.finish("killed", _DEAD)
                except StorageError:
                    if locked:
                        raise  # a job that goes by the lock would start nothing


def _unclear(trackers: Mapping[Path, Tracker], runs: Mapping[Path, Look]) -> list[Submission]:
    """Submissions about which accounting may know more: without a job, or whose job left no outcome."""
    jobless = [
        each
        for tracker in trackers.values()
        for each in tracker.submissions
        if each.job is None and not each.is_elsewhere(tracker.here)
    ]
    silent = [
        latest[0]
        for sweep, tracker in trackers.items()
        for folder, state in runs.get(sweep, ())
        if tracker.silent(folder, state) and (latest := tracker.of(folder.path.name))
    ]
    return [*jobless, *silent]


def by_run(submissions: Iterable[Submission]) -> dict[str, list[tuple[Submission, int]]]:
    """Run → its submissions in the order given, and the task of each."""
    entries: dict[str, list[tuple[Submission, int]]] = {}
    for submission in submissions:
        for task, names in enumerate(submission.tasks):
            for name in names:
                entries.setdefault(name, []).append((submission, task))
    return entries


def _worked_through(folder: RunFolder, state: State, submission: Submission, queued: QueuedJob) -> bool:
    """Whether the run is over although its job is not: one of several in a packed job, or in its last moments."""
    if state.state != "failed" or queued.state in WAITING:
        return False
    return not _may_start_again(folder, state, submission)


def _tried(folder: RunFolder, state: State, submission: Submission) -> bool:
    """Whether a failed run's recorded outcome is of an attempt that the submission's job began."""
    if state.state != "failed" or state.outcome is None or not state.outcome.finished_at:
        return False
    supervisor = Attempt(folder.path / "attempts" / str(state.attempt)).supervisor()
    return supervisor is not None and supervisor.job.startswith(f"{submission.token}.")


def _over(folder: RunFolder, state: State, submission: Submission) -> bool:
    """Whether a submission's job has tried a run and won't again, or another has tried it since."""
    began = [attempt.supervisor() for attempt in folder.attempts()]
    own = [each is not None and each.job.startswith(f"{submission.token}.") for each in began]
    if not any(own):
        return False
    return not own[-1] or (_tried(folder, state, submission) and not _may_start_again(folder, state, submission))


def _may_start_again(folder: RunFolder, state: State, submission: Submission) -> bool:
    """Whether the job of a failed run would try it once more."""
    return state.to_run and _starts(folder, submission) < submission.launcher.attempts


def _starts(folder: RunFolder, submission: Submission) -> int:
    """How many attempts of a run a submission's job has begun."""
    began = (attempt.supervisor() for attempt in folder.attempts())
    return sum(each is not None and each.job.startswith(f"{submission.token}.") for each in began)


def _ran_out(folder: RunFolder, state: State, submission: Submission) -> bool:
    """Whether a run stopped by itself when Slurm warned it of its time limit, and not when somebody else did."""
    attempts = folder.attempts()
    info = attempts[-1].info() if attempts else None
    if state.label != "timeout" or state.outcome is None or info is None:
        return False
    warned_at = submission.launcher.warned_at(launched_at=info.launched_at, job_ends_at=info.job_ends_at)
    return state.outcome.finished_at > warned_at - WARNING_OFF_BY_S


def _what_must_change(folder: RunFolder, ended: str, submission: Submission, run: RunConfig | None) -> str:
    """What must change before a run that Slurm has ended is worth another try; empty: nothing, or it has changed in
    `run` already. `ended`: as Slurm says.
    """
    attempts = folder.attempts()
    supervisor = attempts[-1].supervisor() if attempts else None
    if supervisor is None or not supervisor.job.startswith(f"{submission.token}."):
        return ""  # something else has tried it since
    had, site = submission.launcher, submission.site
    has, its_site = (slurm(run), run.site) if run is not None else (had, site)
    asks = its_site.memory_by != "none"
    if ended == scheduler.OUT_OF_MEMORY and asks and _memory_gib(has, its_site) <= _memory_gib(had, site):
        return f"out of host memory: raise launcher.memory_gib_per_device above {_memory_gib(had, site):g}"
    is_auto = has.time_limit_min == "auto" if run is not None else submission.auto
    had_all = (submission.is_most and its_site == site) or had.limit_min >= (its_site.max_time_min or math.inf)
    in_vain = (had_all if is_auto else has.limit_min <= had.limit_min) and not saved(folder)
    if ended == "TIMEOUT" and in_vain and not unsaved(attempts[-1]):  # else it is room that lacks, not time
        fix = "it is all that the site or its partition allows" if is_auto else "raise it"
        return f"nothing was saved within launcher.time_limit_min={had.limit_min}: {fix}"
    return ""


def _memory_gib(launcher: SlurmLauncher, site: Site) -> float:
    """Host memory that a job asks for with each device, GiB."""
    return launcher.memory_gib_per_device or site.memory_gib_per_device


@dataclass(frozen=True)
class _Adoption:
    """Gives interrupted submissions their jobs, which are known by name."""

    ids: Mapping[str, str]
    """Name of a job → its id."""
    locked: bool
    writes: bool
    here: str
    """As `Tracker.here`."""

    def of(self, sweep: Path, submissions: Iterable[Submission]) -> list[Submission]:
        """A sweep's submissions, with their jobs as far as they are known."""
        return [self._adopted(sweep, submission) for submission in submissions]

    def without_lost(self, sweep: Path, submissions: Iterable[Submission]) -> Iterator[Submission]:
        """The same less those that never reached Slurm, whose jobs had the time to appear in one of its answers."""
        for submission in self.of(sweep, submissions):
            unseen = submission.job is not None or submission.is_elsewhere(self.here)
            if unseen or record.age_s(sweep, submission) <= UNSEEN_S:
                yield submission
            elif self.locked:
                record.withdraw(sweep, submission)

    def _adopted(self, sweep: Path, submission: Submission) -> Submission:
        if submission.job is not None or submission.name not in self.ids:
            return submission
        submission = msgspec.structs.replace(submission, job=self.ids[submission.name])
        if not self.writes:
            return submission
        try:
            with record.private():
                leave_calls(record.folder_of(sweep, submission.token) / "submission.json", submission)
            record.write(sweep, submission)
        except StorageError:
            if self.locked:
                raise  # without the lock, `status` shows what there is, also where nothing can be written
        return submission


def used(submissions: Sequence[Submission], attempts: Sequence[Attempt]) -> Hours:
    """Device-hours used by those attempts that jobs started. A job's own start and end are not included.

    `submissions` are all of the run. Each attempt had the devices of its own one; if its record is gone, of the last.
    """
    by_token, total = {each.token: each for each in submissions}, Hours()
    for attempt in attempts:
        if (supervisor := attempt.supervisor()) is not None and supervisor.job:
            own = by_token.get(supervisor.job.partition(".")[0], submissions[-1])
            total += Hours.of(seconds(attempt), devices=own.devices, gpus=own.has_gpus)
    return total


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
