"""What the verbs of the program do where Slurm is involved."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.markup import escape

from launch.slurm import record, scheduler
from launch.slurm.hours import Hours
from launch.slurm.limits import allowed
from launch.slurm.queue import Tracker, track
from launch.slurm.scheduler import SchedulerError
from launch.slurm.site import refusals, warnings
from launch.slurm.submit import batch_script, batches, not_wanted, submit
from launch.states import begin_again, states_of
from parallelbench.errors import ConfigError
from parallelbench.store.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from launch.local.local_launcher import Prepared
    from launch.slurm.limits import Allowed
    from launch.slurm.queue import RunStatus
    from launch.slurm.scheduler import Partition
    from launch.slurm.submit import Batch
    from parallelbench.store.folder import State


def submit_all(
    prepared: Sequence[Prepared], console: Console, *, retry: frozenset[str], max_gpu_hours: float | None
) -> int:
    """Submit what is missing; returns the exit code. Nothing stays running here."""
    sweep = prepared[0].planned.run.sweep_folder
    submissions = submit(
        prepared, retry=retry, max_gpu_hours=max_gpu_hours, say=lambda text: console.print(text, highlight=False)
    )
    if submissions:
        jobs = ", ".join(str(submission.job) for submission in submissions)
        console.print(f"submitted: {jobs}; `parallelbench status {sweep}` shows how they get on", highlight=False)
    else:
        console.print(f"nothing to submit; `parallelbench status {sweep}` shows each run", highlight=False)
    return 0


def show_plan(prepared: Sequence[Prepared], states: Sequence[State], console: Console) -> bool:
    """What submitting would do: batch scripts, hours, and what the cluster refuses; returns whether it takes all."""
    cluster = _cluster()
    statuses = _statuses(prepared, states)
    todo = [item for item, status in zip(prepared, statuses, strict=True) if status.wanted(frozenset())]
    if rest := not_wanted(statuses, frozenset()):
        console.print(f"\n{rest}", highlight=False)
    groups, accepted = batches(todo), not scheduler.available() or cluster.kinds is not None
    for group in groups:
        console.print(
            f"\n[bold]{_arrays(len(group.tasks()), cluster.longest)}[/], each {group.shape}: at most {group.most_hours}"
        )
        for refusal in cluster.refusals(group):
            accepted = False
            console.print(f"[red]refused by the cluster[/]: {escape(refusal)}")
        for warning in warnings(group, cluster.kinds or ()):
            console.print(f"[yellow]note[/]: {escape(warning)}")
        script = batch_script(group, min(len(group.tasks()), cluster.longest or len(group.tasks())))
        console.print(script, style="dim", markup=False, highlight=False, soft_wrap=True)
    for warning in cluster.allowed.warnings(groups) if cluster.allowed else ():
        console.print(f"[yellow]note[/]: {escape(warning)}")
    most = sum((group.most_hours for group in groups), Hours())
    console.print(f"\nat most {most} in all: time limits × launcher.attempts", highlight=False)
    if cluster.unknown:
        console.print(cluster.unknown, markup=False, highlight=False)
    return accepted


def _statuses(prepared: Sequence[Prepared], states: Sequence[State]) -> list[RunStatus]:
    """What Slurm does about the runs, as far as it can be asked."""
    sweep = prepared[0].planned.run.sweep_folder
    found = record.submissions(sweep)
    try:
        tracker = track({sweep: found}, writes=False)[sweep]
    except SchedulerError:
        tracker = Tracker.unanswered(found)
    return [tracker.status(item.folder, state) for item, state in zip(prepared, states, strict=True)]


def _arrays(jobs: int, longest: int | None) -> str:
    """In which arrays so many jobs are submitted; `longest`: what the cluster takes, where that is known."""
    if longest is None or jobs <= longest:
        return f"{jobs} job(s)"
    lengths = [str(min(longest, jobs - done)) for done in range(0, jobs, longest)]
    return f"{jobs} job(s) in arrays of {', '.join(lengths)} (the first is shown)"


@dataclass(frozen=True)
class _Cluster:
    """What a cluster offers and allows; None where that is not known."""

    kinds: list[Partition] | None = None
    longest: int | None = None
    """Of its arrays."""
    allowed: Allowed | None = None
    unknown: str = ""
    """What could not be looked at, and why."""

    def refusals(self, group: Batch) -> Iterator[str]:
        yield from refusals(group, self.kinds) if self.kinds is not None else ()
        yield from self.allowed.refusals(group) if self.allowed else ()


def _cluster() -> _Cluster:
    if not scheduler.available():
        return _Cluster(unknown="no Slurm here, so its limits were not looked at: plan again on the login node")
    try:
        cluster = _Cluster(scheduler.partitions(), scheduler.max_array_size())
    except SchedulerError as error:
        return _Cluster(unknown=f"the cluster's limits could not be looked at: {error}")
    try:
        default = next((kind.name for kind in cluster.kinds or () if kind.default), "")
        return replace(cluster, allowed=allowed(default))
    except SchedulerError as error:
        return replace(cluster, unknown=f"what your account may do could not be looked at: {error}")


def cancel(sweeps: Sequence[Path], console: Console) -> int:
    """End the jobs of sweeps, whether they run or wait: one question to Slurm, and one order, for all of them."""
    with ExitStack() as locks:
        for sweep in sweeps:
            locks.enter_context(record.lock(sweep))
        trackers = track({sweep: record.submissions(sweep) for sweep in sweeps}, locked=True)
        jobs = [job for tracker in trackers.values() for job in tracker.in_queue()]
        again = begin_again(_live(trackers))
        if jobs:
            # A sweep is cancelled as a whole, so its arrays are: their own ids will do.
            scheduler.tell(["scancel", *sorted({job.whole for job in jobs}, key=int)])
    lost = sum(submission.job is None for tracker in trackers.values() for submission in tracker.submissions)
    console.print(f"{len(jobs)} job(s) cancelled; submitting again starts what is missing{again and f': {again}'}")
    if lost:
        console.print(
            f"whether Slurm has got {lost} more array(s) can't be said yet: cancel again in a minute", highlight=False
        )
    return 0


def _live(trackers: Mapping[Path, Tracker]) -> Iterator[RunFolder]:
    """Runs that a job in the queue is about."""
    for sweep, tracker in trackers.items():
        names = {name for name, found in tracker.jobs.items() if any(tracker.queued(*each) for each in found)}
        folders = [RunFolder(sweep / name) for name in sorted(names)]
        for folder, state in zip(folders, states_of(folders), strict=True):
            if tracker.status(folder, state).live:
                yield folder


def job_logs(sweep: Path, name: str) -> list[Path]:
    """What Slurm and submitit caught of the latest job of a run, beside the attempts' own logs. Slurm is not asked."""
    try:
        found = Tracker.unanswered(record.submissions(sweep)).of(name)
    except ConfigError:
        return []
    if found is None:
        return []
    submission, task = found
    # Of a submission that was cut off, the job's id is known by the names of its logs alone.
    job = submission.job_of(task) or (f"*_{task}" if len(submission.tasks) > 1 else "*")
    return sorted(record.folder_of(sweep, submission.token).glob(f"{job}_*_log.out"))
