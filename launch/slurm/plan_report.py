"""The part of `plan` about Slurm jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.markup import escape

from launch.slurm import record, scheduler
from launch.slurm.hours import Hours
from launch.slurm.limits import allowed
from launch.slurm.queue import Tracker, track
from launch.slurm.scheduler import SchedulerError
from launch.slurm.site import refusals, warnings
from launch.slurm.submit import batch_script, job_groups, not_submitted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from launch.preparation import Prepared
    from launch.slurm.limits import Allowed
    from launch.slurm.queue import JobStatus
    from launch.slurm.scheduler import Partition
    from launch.slurm.submit import JobGroup
    from parallelbench.store.folder import State


def show_plan(prepared: Sequence[Prepared], states: Sequence[State], console: Console) -> bool:
    """Print batch scripts, hours and the cluster's refusals; returns whether it takes all jobs."""
    cluster = _cluster()
    statuses = _statuses(prepared, states)
    to_start = [item for item, status in zip(prepared, statuses, strict=True) if status.starts(frozenset())]
    if rest := not_submitted(statuses, frozenset()):
        console.print(f"\n{rest}", markup=False, highlight=False)
    groups, accepted = job_groups(to_start), not scheduler.available() or cluster.kinds is not None
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


def verdict(prepared: Prepared) -> str:
    """What a run's job asks for, and what the cluster says to that."""
    (group,) = job_groups([prepared])
    cluster = _cluster()
    found = [*cluster.refusals(group), *warnings(group, cluster.kinds or ()), cluster.unknown]
    return f"{group.shape}: {'; '.join(filter(None, found)) or 'the cluster takes it'}"


def _statuses(prepared: Sequence[Prepared], states: Sequence[State]) -> list[JobStatus]:
    """The runs with their jobs, as far as Slurm answers."""
    sweep = prepared[0].planned.run.sweep_folder
    submissions = record.submissions(sweep)
    try:
        looks = {sweep: [(item.folder, state) for item, state in zip(prepared, states, strict=True)]}
        tracker = track({sweep: submissions}, looks, writes=False)[sweep]
    except SchedulerError:
        tracker = Tracker.unanswered(submissions)
    both = zip(prepared, states, strict=True)
    return [tracker.status(item.folder, state, item.planned.run) for item, state in both]


def _arrays(jobs: int, longest: int | None) -> str:
    """Sizes of the arrays for `count` jobs; `longest`: most tasks of one array (None: unknown)."""
    if longest is None or jobs <= longest:
        return f"{jobs} job(s)"
    lengths = [str(min(longest, jobs - done)) for done in range(0, jobs, longest)]
    return f"{jobs} job(s) in arrays of {', '.join(lengths)} (the first is shown)"


@dataclass(frozen=True)
class _Cluster:
    """What a cluster offers and allows; None where unknown."""

    kinds: list[Partition] | None = None
    longest: int | None = None
    """Most tasks of an array."""
    allowed: Allowed | None = None
    unknown: str = ""
    """What is unknown, and why; empty: everything is known."""

    def refusals(self, group: JobGroup) -> Iterator[str]:
        yield from refusals(group, self.kinds) if self.kinds is not None else ()
        yield from self.allowed.refusals(group) if self.allowed else ()


def _cluster() -> _Cluster:
    if not scheduler.available():
        return _Cluster(unknown="there is no Slurm here, so its limits were not checked: plan again on the login node")
    try:
        cluster = _Cluster(scheduler.partitions(), scheduler.max_array_size())
    except SchedulerError as error:
        return _Cluster(unknown=f"the cluster's limits could not be checked: {error}")
    try:
        default = next((kind.name for kind in cluster.kinds or () if kind.default), "")
        return replace(cluster, allowed=allowed(default))
    except SchedulerError as error:
        return replace(cluster, unknown=f"the limits of your account could not be checked: {error}")
