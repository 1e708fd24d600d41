"""The supervisor of a Slurm job: its batch script, on the first node, outside any container.

Every task of an array executes `run_task` with the path of its submission; its index chooses its runs. Their processes
are in steps of the job (`launch.slurm.step`). The run folders are the record of what happened; exit codes are only for
`sacct`.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.attempt.outcome import unsaved
from launch.attempt.processes import Training, WarmWorkers
from launch.attempt.signals import action_of, heed, noting
from launch.attempt.supervisor import Interrupted, NotBegun, carry_out, stoppable, supervise
from launch.slurm import record, rendezvous, scheduler
from launch.slurm.order import holds_back
from launch.slurm.sbatch import ENDS_AT, STARTED_AT
from launch.slurm.scheduler import NoSlurmError, SchedulerError
from launch.slurm.step import STEP_TERMINATED, Allocation
from launch.states import saved
from parallelbench.config.identity import slug
from parallelbench.errors import ConfigError, StorageError, ends_the_program
from parallelbench.redaction import redacted
from parallelbench.results.attempt import PUBLISHED
from parallelbench.results.files import storage_errors
from parallelbench.results.folder import RunFolder
from parallelbench.world.affinity import own_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.slurm.record import Submission
    from parallelbench.config.run import RunConfig
    from parallelbench.results.attempt import Attempt, Outcome
    from parallelbench.results.folder import State


WARNING = signal.SIGUSR2
"""The signal that Slurm sends some time before a job's limit, as submitit asks it to."""
QUEUEING_S = 45.0
"""What an attempt leaves of the time after a warning, at most half of it: ranks may need `GRACE_S` to end, what they
measured is judged, and Slurm may take `TIMEOUT_S` to answer that it has queued the job again."""


@dataclass
class Job:
    """The job that this process is a part of."""

    submission: Submission
    id: str = field(default_factory=lambda: os.environ["SLURM_JOB_ID"])
    """Each task of an array has its own."""
    array: str = field(default_factory=lambda: os.environ.get("SLURM_ARRAY_JOB_ID", ""))
    """The array's id, which is also that of its last task to start."""
    restarts: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    task: int = field(default_factory=lambda: int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")))
    ends_at: float | None = field(default_factory=lambda: float(os.environ.get(ENDS_AT, "0")) or None)
    """When Slurm ends it, Unix time, s; None: not known."""
    warned: bool = False
    """Whether Slurm has warned of the time limit, or of a preemption."""
    preempted: bool = False
    """Whether Slurm takes the nodes away after a grace time."""
    until: float = math.inf
    """When the present attempt must end, by the monotonic clock, so that the job can be queued again."""
    attempt: Attempt | None = None
    """The present attempt."""
    led: int = 0
    """Attempts that this start has led. Only the first one had the whole time limit."""
    left: list[str] = field(default_factory=list)
    """Runs that were not over at the warning; a later start of this job may resume them."""
    workers: WarmWorkers = field(default_factory=lambda: WarmWorkers(Allocation()))

    @property
    def task_id(self) -> str:
        """What Slurm calls it and no other task of its array: by the array's id, all of them would be queued again."""
        return f"{self.array}_{self.task}" if self.array else self.id

    @property
    def start(self) -> str:
        """Identifies this start of the job. The token is in it because Slurm may use a job id again."""
        return f"{self.submission.token}.{self.id}.{self.restarts}"

    @property
    def waited_s(self) -> float | None:
        """From its submission to its start, s; None: it was started again, or waited for other jobs of its sweep."""
        if self.restarts or self.submission.after or holds_back(self.submission):
            return None
        started_at = float(os.environ.get(STARTED_AT, "0")) or (
            self.ends_at - 60.0 * self.submission.launcher.limit_min if self.ends_at else time.time()
        )
        return max(0.0, started_at - self.submission.created_at)

    def began(self, attempt: Attempt) -> bool:
        """Whether an earlier start of this job, or this one, began the attempt."""
        supervisor = attempt.supervisor()
        return supervisor is not None and supervisor.job.rpartition(".")[0] == f"{self.submission.token}.{self.id}"

    def save(self) -> None:
        """Ask the ranks to save their state after their epoch, and to stop."""
        if self.attempt is not None:
            with suppress(StorageError):
                self.attempt.ask_to_stop()

    def warn(self, left_s: float) -> None:
        """Ask the ranks to stop after their epoch, and begin no other run; `left_s`: until Slurm ends the job."""
        self.warned = True
        self.until = min(self.until, time.monotonic() + left_s - min(QUEUEING_S, left_s / 2))
        self.save()

    def preempt(self, left_s: float) -> None:
        """The same as a warning, except that what is not over is queued again in any case."""
        self.preempted = True
        self.warn(left_s)

    def is_in_grace(self) -> bool:
        """Ask Slurm whether it takes the nodes away, and prepare for that; False also where it gives no answer."""
        with suppress(SchedulerError):
            if (ends_at := preempted_at(self.task_id)) is not None:
                self.preempt(ends_at - time.time())
                return True
        return False

    @contextmanager
    def leads(self, attempt: Attempt) -> Iterator[None]:
        """Pass a warning on to this attempt, also one that came before it was claimed."""
        self.attempt, self.led = attempt, self.led + 1
        if self.warned:
            attempt.ask_to_stop()
        try:
            yield
        finally:
            self.attempt = None


def run_task(path: str) -> None:
    """Work through the runs of this task; the target of the submission's pickles."""
    submission = record.read(Path(path))
    job = Job(submission)
    say(f"submission {submission.token}, job {job.start}")
    if job.restarts >= (most := submission.launcher.attempts):  # else device-hours would have no bound
        say(f"not started again: it was started {job.restarts} times, and launcher.attempts={most}")
        sys.exit(1)
    try:
        cores = own_cores(submission.device_type)
        with record.private(submission.umask), stoppable(), handling_signals(job), cores, job.workers:
            folders = [RunFolder(Path(path).parents[2] / name) for name in submission.tasks[job.task]]
            # What an earlier start has not finished comes last: it may need more time than any start has.
            folders.sort(key=lambda folder: any(map(job.began, folder.attempts())))
            went_well = [take_part(folder, job) for folder in folders]
            if job.left:
                _requeue(job)
    except Interrupted as interruption:
        say(f"interrupted by {interruption}")
        sys.exit(1)
    if not all(went_well):
        sys.exit(1)


@contextmanager
def handling_signals(job: Job) -> Iterator[None]:
    """Handle Slurm's signals throughout the job, instead of submitit, which does not know runs.

    The time limit's warning and a cancellation reach this process; that a preemption's grace begins, only the steps.
    """
    interrupt, is_silent = action_of(signal.SIGTERM), False

    def warned(_: signal.Signals) -> None:
        job.warn(job.submission.launcher.signal_delay_s)

    def step_terminated(_: signal.Signals) -> None:
        nonlocal is_silent
        try:  # srun also ends a step whose task has failed
            ends_at = preempted_at(job.task_id)
        except SchedulerError:
            is_silent = True
            job.save()
        else:
            if ends_at is not None:
                job.preempt(ends_at - time.time())

    def terminated(number: signal.Signals) -> None:
        job.save()  # first: Slurm may take as long to answer as it leaves the job
        # A cancellation tells the steps as well: who has just got no answer doesn't wait for one again.
        if not is_silent and job.is_in_grace():
            return
        if interrupt is not None:
            interrupt(number)

    with noting([WARNING], warned), noting([STEP_TERMINATED], step_terminated), noting([signal.SIGTERM], terminated):
        yield


def take_part(folder: RunFolder, job: Job) -> bool:
    """One run; returns whether it went well."""
    heed()
    if job.warned:
        job.left += [] if _over(folder, job) else [folder.path.name]
        return _skip(folder, "is left to a later start of this job, whose time is nearly up", ok=True)
    try:
        return lead(folder, launched(folder, job.submission), job)
    except (ConfigError, StorageError) as error:
        say(f"{folder.path.name}: {error}")
        return False  # and the next run may succeed
    except SystemExit as error:
        say(f"{folder.path.name}: {ends_the_program(error)}")
        return False


def _over(folder: RunFolder, job: Job) -> bool:
    """Whether a run is done, or has failed for good in an earlier start of this job."""
    state = folder.state()
    return state.state == "done" or _failed_before(state, folder.attempts(), job)


def _failed_before(state: State, attempts: Sequence[Attempt], job: Job) -> bool:
    """Whether a run has failed for good in an earlier start of this job."""
    return state.state == "failed" and not state.to_run and bool(attempts) and job.began(attempts[-1])


def launched(folder: RunFolder, submission: Submission) -> RunConfig:
    """The run as this submission starts it: its intent, with launcher and site of the submission.

    Raises `ConfigError` where this version of the program gives it another run id than the submitting one did.
    """
    plugin = submission.plugin[0] if submission.plugin else None
    sys.path.extend(path for path in submission.plugin[1:] if path not in sys.path)
    run = folder.config(plugin)
    if slug(run) != folder.path.name:
        raise ConfigError(
            "was submitted by another version of parallelbench, for which this is another run: submit the sweep again"
        )
    return msgspec.structs.replace(run, launcher=submission.launcher, site=submission.site)


def lead(folder: RunFolder, run: RunConfig, job: Job) -> bool:
    """Claim an attempt, start its processes, and see it through."""

    def skip(state: State, attempts: Sequence[Attempt]) -> str:
        if state.state == "done":
            return "is done already"
        # A job starts again only after Slurm has ended its earlier start: that attempt is fenced, not waited for.
        if state.state == "running" and not (attempts and job.began(attempts[-1])):
            return "runs elsewhere"
        before = _failed_before(state, attempts, job)
        return f"has failed in an earlier start of this job: {state.label}" if before else ""

    def leading(training: Training) -> Outcome:
        with job.leads(training.attempt):
            return train(training, job)

    device_type = job.submission.device_type
    submit = job.submission.submit or job.submission.token
    outcome = carry_out(
        folder,
        run,
        device_type=device_type,
        skip=skip,
        train=leading,
        job=job.start,
        submit=submit,
        job_ends_at=job.ends_at,
        waited_s=job.waited_s,
    )
    heed()
    if isinstance(outcome, NotBegun):
        failed = outcome.published is not None and outcome.published.outcome not in PUBLISHED
        return _skip(folder, outcome.reason, ok=not failed)
    say(f"{folder.path.name}: {outcome.outcome}: {outcome.reason}")
    if outcome.outcome == "killed" and not job.warned:
        job.is_in_grace()  # the task of a step that is not ready yet dies of the SIGTERM that it should pass on
    if job.preempted and outcome.outcome in ("timeout", "killed"):  # killed: Slurm may signal the ranks as well
        job.left.append(folder.path.name)
    elif job.warned and outcome.outcome == "timeout":
        if job.led > 1 or (run.launcher.checkpoint != "never" and saved(folder)):
            job.left.append(folder.path.name)
        else:
            why = unsaved(folder.attempts()[-1]) or "another start would have no more time"
            say(f"{folder.path.name}: not queued again: nothing was saved, and {why}")
    return outcome.outcome == "ok"


def _skip(folder: RunFolder, why: str, *, ok: bool) -> bool:
    """Start nothing."""
    say(f"{folder.path.name}: {why}")
    return ok


def train(training: Training, job: Job) -> Outcome:
    """See a described attempt to its end."""
    run, attempt = training.run, training.attempt
    if run.nodes > 1:
        try:
            meeting = rendezvous.choose(job.start, nodes=run.nodes, interface=run.site.network_interface)
        except OSError as error:
            return attempt.finish("error", f"the nodes can't meet: {error}")
        training = replace(training, rendezvous=meeting)
    try:
        return supervise(training, begin=job.workers.start, until=lambda: job.until)
    except ConfigError as error:
        return attempt.finish("error", str(error))


def _requeue(job: Job) -> None:
    most = job.submission.launcher.attempts
    if job.restarts + 1 >= most:
        say(f"not queued again: started {job.restarts + 1} times, and launcher.attempts={most}")
        return
    try:
        scheduler.tell(["scontrol", "requeue", job.task_id], patient=True)  # where it has heard, it ends the job anyway
    except ConfigError as error:
        say(f"could not be queued again ({error}): submitting the sweep again resumes it")


def leave_calls(path: Path, submission: Submission) -> None:
    """Put submitit's pickles where the jobs of an adopted submission look for them."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    call = DelayedSubmission(run_task, str(path))
    call.set_timeout(submission.launcher.limit_min, submission.launcher.attempts)
    for task in range(len(submission.tasks)):
        pickle = JobPaths(path.parent, submission.job_of(task)).submitted_pickle
        if not pickle.exists():
            # In one step: a waiting task loads it as soon as it exists.
            temporary = pickle.with_name(f"{pickle.name}.{uuid.uuid4().hex}.tmp")
            with storage_errors(pickle):
                call.dump(temporary)
                temporary.replace(pickle)


def say(text: str) -> None:
    """A line in the job's log."""
    with suppress(OSError):  # the log may be on the disk that is full
        print(f"parallelbench: {redacted(text)}", flush=True)


ANSWER_S = 10.0
"""How long Slurm may take to say whether this is a preemption; by default, it kills a job 30 s after SIGTERM."""
_PAUSE_S = 0.5
_STATE = re.compile(r"\bJobState=(\S+)")
_RUNS = {"RUNNING", "SIGNALING", "STOPPED"}
"""The last two until Slurm has heard that its SIGCONT arrived, which it sends just before the SIGTERM."""
_PREEMPTED_AT = re.compile(r"\bPreemptTime=(\S+)")
_ENDS_AT = re.compile(r"\bEndTime=(\d+-\d\d-\d\dT\d\d:\d\d:\d\d)\b")


def preempted_at(job: str) -> float | None:
    """When Slurm takes a running job's nodes, Unix time, s; None: it does not.

    Raises `SchedulerError` where it gives no answer within `ANSWER_S`.
    """
    deadline = time.monotonic() + ANSWER_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with _spared():
                return end_of_grace(scheduler.ask(["scontrol", "--oneliner", "show", "job", job], timeout_s=left_s))
        except NoSlurmError:
            raise
        except SchedulerError:
            time.sleep(_PAUSE_S)
    raise SchedulerError(f"scontrol gave no answer within {ANSWER_S:g} s")


@contextmanager
def _spared() -> Iterator[None]:
    """Let programs that are started here outlive a SIGTERM: Slurm may send one to all that a job is running by then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_of_grace(shown: str) -> float | None:
    """When the grace time of a job ends of which `scontrol show job` tells: it still runs, and has a `PreemptTime`."""
    state, at, ends = (pattern.search(shown) for pattern in (_STATE, _PREEMPTED_AT, _ENDS_AT))
    if state is None or state[1] not in _RUNS or at is None or at[1] in ("None", "N/A", "Unknown"):
        return None
    return time.mktime(time.strptime(ends[1], "%Y-%m-%dT%H:%M:%S")) if ends else math.inf
