"""What a Slurm job does on each of its nodes: node 0 leads the attempt, the others follow.

Every task of an array executes `run_task` with the path of its submission; which runs are its own, its index says. What
counts is what the run folders say: exit codes are for `sacct` alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launch import processes
from launch.outcome import publish_if_finished
from launch.slurm import record, scheduler
from launch.slurm.rendezvous import POLL_S, join, offer
from launch.states import saved
from launch.supervise import Interrupted, stoppable, supervise
from launch.warm import WarmWorkers
from parallelbench.errors import ConfigError, StorageError
from parallelbench.rank.devices import this_machine
from parallelbench.rank.worker import RankError
from parallelbench.spec.identity import slug
from parallelbench.store.attempt import PUBLISHED
from parallelbench.store.durable import fill, storage_errors
from parallelbench.store.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launch.slurm.record import Submission
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.attempt import Attempt, Outcome

WARNING = signal.SIGUSR2
"""The signal that Slurm sends some time before a job's limit, as submitit asks it to."""


@dataclass
class Job:
    """The job that this process is a part of."""

    token: str
    """Of its submission."""
    id: str = field(default_factory=lambda: os.environ["SLURM_JOB_ID"])
    """What `scontrol requeue` wants to hear; a number of its own for each task of an array."""
    restarts: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    task: int = field(default_factory=lambda: int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")))
    node: int = field(default_factory=lambda: int(os.environ.get("SLURM_NODEID", "0")))
    warned: bool = False
    """Whether Slurm has warned of the time limit."""
    attempt: Attempt | None = None
    """What this node leads just now."""
    led: int = 0
    """Attempts that this start has led: only the first had all of its time."""
    left: list[str] = field(default_factory=list)
    """Runs that the warning came too early for, and that a later start of this job may go on with."""

    @property
    def start(self) -> str:
        """Tells this start of the job from all others; with the token, for Slurm may give out an id again."""
        return f"{self.token}.{self.id}.{self.restarts}"

    def began(self, attempt: Attempt) -> bool:
        """Whether an earlier start of this job, or this one, began the attempt."""
        supervisor = attempt.supervisor()
        return supervisor is not None and supervisor.job.rpartition(".")[0] == f"{self.token}.{self.id}"

    def warn(self) -> None:
        """Ask the ranks to stop after their epoch, and begin no other run."""
        self.warned = True
        if self.attempt is not None:
            self.attempt.ask_to_stop()

    @contextmanager
    def leads(self, attempt: Attempt) -> Iterator[None]:
        """Pass a warning on to this attempt, even one that came a moment too early for it."""
        self.attempt = attempt
        self.led += 1
        if self.warned:
            attempt.ask_to_stop()
        try:
            yield
        finally:
            self.attempt = None


def run_task(path: str) -> None:
    """Work through the runs of this task; the target of the submission's pickles."""
    submission = record.read(Path(path))
    job = Job(submission.token)
    say(f"submission {submission.token}, job {job.start}, node {job.node}")
    if job.restarts >= (most := submission.launcher.attempts):  # else the bound on device-hours would be none
        say(f"not started again: it was started {job.restarts} times, and launcher.attempts={most}")
        sys.exit(1)
    sweep = Path(path).parents[2]
    try:
        with record.private(submission.umask), stoppable(), heeding(job), WarmWorkers() as workers:
            folders = [RunFolder(sweep / name) for name in submission.tasks[job.task]]
            went_well = [take_part(folder, submission, job, workers) for folder in folders]
            if job.left:
                _requeue(job, submission)
    except Interrupted as interruption:
        say(f"interrupted by {interruption}")
        sys.exit(1)
    if not all(went_well):
        sys.exit(1)


@contextmanager
def heeding(job: Job) -> Iterator[None]:
    """Heed Slurm's warning, at any moment of the job: submitit, which would otherwise, knows nothing of runs."""
    heed = (lambda _number, _frame: job.warn()) if job.node == 0 else signal.SIG_IGN  # the head decides
    before = signal.signal(WARNING, heed)
    try:
        yield
    finally:
        signal.signal(WARNING, before)


def take_part(folder: RunFolder, submission: Submission, job: Job, workers: WarmWorkers) -> bool:
    """This node's share of one run; returns whether it went well, as far as this node can tell."""
    if job.warned:
        job.left += [] if _over(folder, job) else [folder.path.name]
        return _pass(folder, "is left to a later start of this job: its time is nearly up", well=True)
    try:
        run = launched(folder, submission)
        return lead(folder, run, submission, job, workers) if job.node == 0 else follow(folder, run, submission, job)
    except (ConfigError, StorageError) as error:
        say(f"{folder.path.name}: {error}")
        return False  # and the next run may well go


def _over(folder: RunFolder, job: Job) -> bool:
    """Whether a run is done, or has failed for good in an earlier start of this job."""
    state, attempts = folder.state(), folder.attempts()
    failed = state.state == "failed" and not state.to_run and bool(attempts) and job.began(attempts[-1])
    return state.state == "done" or failed


def launched(folder: RunFolder, submission: Submission) -> RunConfig:
    """The run as this submission starts it: the intent, with the launcher and the site of today.

    Raises `ConfigError` where this version of the program takes it for another run than the one that was submitted.
    """
    plugin = submission.plugin[0] if submission.plugin else None
    sys.path.extend(path for path in submission.plugin[1:] if path not in sys.path)
    run = folder.config(plugin)
    if slug(run) != folder.path.name:
        raise ConfigError(
            "was submitted by another version of parallelbench, for which this is another run: submit the sweep again"
        )
    return msgspec.structs.replace(run, launcher=submission.launcher, site=submission.site)


def lead(folder: RunFolder, run: RunConfig, submission: Submission, job: Job, workers: WarmWorkers) -> bool:
    """Claim an attempt, start this node's processes, and see the attempt through."""
    attempts = folder.attempts()
    state = folder.state()
    alone = run.nodes == 1
    if state.state == "done":
        return _pass(folder, "is done already", well=alone)
    if state.state == "running" and not (attempts and job.began(attempts[-1])):
        return _pass(folder, "runs elsewhere", well=alone)  # perhaps with all its epochs behind it
    if attempts and (late := publish_if_finished(folder, run, attempts[-1])):
        return _pass(folder, f"had finished: {late.outcome}: {late.reason}", well=alone and late.outcome in PUBLISHED)
    if _over(folder, job):
        return _pass(folder, f"has failed in an earlier start of this job: {state.label}", well=alone)
    # A job starts again only once Slurm has given up its earlier start, so that attempt is fenced, not waited for.
    attempt = folder.claim(after=attempts[-1].number if attempts else 0, job=job.start)
    if attempt is None:
        return _pass(folder, "was taken by another job", well=alone)
    with job.leads(attempt):
        outcome = _lead(folder, run, attempt, submission, job.start, workers)
    say(f"{folder.path.name}: {outcome.outcome}: {outcome.reason}")
    if job.warned and outcome.outcome == "timeout":
        if job.led > 1 or (submission.launcher.checkpoint != "never" and saved(folder)):
            job.left.append(folder.path.name)
        else:
            say(f"{folder.path.name}: not queued again: nothing was saved, and another start would have no more time")
    return outcome.outcome == "ok"


def _pass(folder: RunFolder, why: str, *, well: bool) -> bool:
    """Leave a run alone. Where that is not well, srun ends the tasks of the other nodes, which wait for this one."""
    say(f"{folder.path.name}: {why}")
    return well


def _lead(
    folder: RunFolder, run: RunConfig, attempt: Attempt, submission: Submission, start: str, workers: WarmWorkers
) -> Outcome:
    try:
        refusal = describe(attempt, run, submission.device_type)
    except StorageError:
        attempt.withdraw()
        raise
    if refusal is not None:
        return attempt.finish("error", refusal)
    rendezvous = None
    try:
        if run.nodes > 1:
            rendezvous = offer(attempt.path, start, nodes=run.nodes, interface=run.site.network_interface)
    except OSError as error:
        return attempt.finish("error", f"the nodes can't meet: {error}")
    except StorageError as error:
        return attempt.finish("storage", str(error))
    return supervise(
        folder,
        run,
        attempt,
        device_type=submission.device_type,
        watcher=_Quiet(),
        rendezvous=rendezvous,
        begin=workers.start,
    )


def describe(attempt: Attempt, run: RunConfig, device_type: str) -> str | None:
    """Record what is started; returns why it can't be, where this node has less than was planned with."""
    needed = _needed(run, device_type)
    attempt.write_config(run)
    attempt.describe(
        processes=run.strategy.processes(run, device_type),
        device_type=device_type,
        oversubscribed=run.launcher.oversubscribe and not this_machine().suffices(**needed),
        warnings=this_machine().caveats(**needed),
    )
    return _too_small(run, device_type)


def _too_small(run: RunConfig, device_type: str) -> str | None:
    try:
        this_machine().require(**_needed(run, device_type), oversubscribe=run.launcher.oversubscribe)
    except ConfigError as error:
        return str(error)
    return None


def _needed(run: RunConfig, device_type: str) -> dict[str, Any]:
    """What a run needs of each of its nodes."""
    devices = run.devices // run.nodes
    return {"devices": devices, "device_type": device_type, "cores_per_device": run.cores_per_device}


def _requeue(job: Job, submission: Submission) -> None:
    if job.restarts + 1 >= submission.launcher.attempts:
        say(f"not queued again: started {job.restarts + 1} times, and launcher.attempts={submission.launcher.attempts}")
        return
    try:
        scheduler.tell(["scontrol", "requeue", job.id])
    except ConfigError as error:
        say(f"could not be queued again ({error}): submitting the sweep again goes on from here")


def follow(folder: RunFolder, run: RunConfig, submission: Submission, job: Job) -> bool:
    """Start this node's processes of the attempt that node 0 leads, and end them with it."""
    attempt, rendezvous = join(folder, job.start, node=job.node, nodes=run.nodes)
    if attempt is None or rendezvous is None:
        return _pass(folder, "node 0 has ended it", well=True)
    if (refusal := _too_small(run, submission.device_type)) is not None:
        rank = job.node * (run.strategy.processes(run, submission.device_type) // run.nodes)
        error = RankError(rank=rank, kind="error", reason=f"on node {job.node}: {refusal}", time=time.time())
        fill(attempt.error_file(rank), msgspec.json.encode(error))
        return False  # and srun ends the other nodes' tasks
    with (attempt.path / f"log-node{job.node}.txt").open("wb") as log:
        process = processes.start(
            folder, run, attempt, device_type=submission.device_type, log=log, rendezvous=rendezvous
        )
        try:
            while process.poll() is None and attempt.outcome() is None:
                time.sleep(POLL_S)
        finally:
            processes.end(process)
    # What went wrong the head finds out, from what the ranks have left.
    return True


def leave_calls(path: Path, submission: Submission) -> None:
    """Put submitit's pickles where the jobs of an adopted submission look for them."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    call = DelayedSubmission(run_task, str(path))
    call.set_timeout(submission.launcher.time_limit_min, submission.launcher.attempts)
    for task in range(len(submission.tasks)):
        pickle = JobPaths(path.parent, submission.job_of(task)).submitted_pickle
        if not pickle.exists():
            # In one step: a task that waits for it loads it the moment that it is there.
            temporary = pickle.with_name(f"{pickle.name}.{uuid.uuid4().hex}.tmp")
            with storage_errors(pickle):
                call.dump(temporary)
                temporary.replace(pickle)


class _Quiet:
    """The journal is the record; nobody watches a job's output."""

    def event(self, event: dict[str, Any]) -> None:
        """Pass over it."""


def say(text: str) -> None:
    """A line in the job's log."""
    with suppress(OSError):  # the log may be on the disk that is full
        print(f"parallelbench: {text}", flush=True)
