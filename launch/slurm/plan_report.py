"""The part of `plan` about Slurm jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from launch.slurm import record, scheduler
from launch.slurm.cluster_limits import known_limits
from launch.slurm.hours import Hours
from launch.slurm.job_group import job_groups
from launch.slurm.queue import Tracker, track
from launch.slurm.scheduler import SchedulerError
from launch.slurm.submit import batch_script, not_submitted
from launch.slurm.turns import in_turns
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from launch.preparation import Prepared
    from launch.slurm.queue import JobStatus
    from parallelbench.results.folder import State


def show_plan(prepared: Sequence[Prepared], states: Sequence[State], console: Console) -> bool:
    """Print batch scripts, hours and the cluster's refusals; returns whether it takes all jobs."""
    statuses = _statuses(prepared, states)
    to_start = [item for item, status in zip(prepared, statuses, strict=True) if status.starts(frozenset())]
    groups = job_groups(to_start)
    cluster = known_limits(groups)
    if rest := not_submitted(statuses, frozenset()):
        console.print(f"\n{rest}", markup=False, highlight=False)
    accepted = not scheduler.available() or cluster.kinds is not None
    turns = in_turns(groups)
    for shape, group in enumerate(groups):
        lengths = _lengths([len(turn.group.tasks()) for turn in turns if turn.shape == shape], cluster.longest)
        in_turn = ", in turn with the other shapes" if sum(turn.shape == shape for turn in turns) > 1 else ""
        console.print(f"\n[bold]{_arrays(lengths)}[/]{in_turn}, each {group.shape}: at most {group.most_hours}")
        for refusal in cluster.refusals(group):
            accepted = False
            console.print(f"[red]refused by the cluster[/]: {escape(refusal)}")
        for warning in cluster.notes(group):
            console.print(f"[yellow]note[/]: {escape(warning)}")
        script = batch_script(group, lengths[0])
        console.print(script, style="dim", markup=False, highlight=False, soft_wrap=True)
    for warning in cluster.notes_on_all(groups):
        console.print(f"[yellow]note[/]: {escape(warning)}")
    most = sum((group.most_hours for group in groups), Hours())
    console.print(f"\nat most {most} in all: time limits × launcher.attempts", highlight=False)
    if cluster.unknown:
        console.print(cluster.unknown, markup=False, highlight=False)
    return accepted


def verdict(prepared: Prepared) -> str:
    """What a run's job asks for, and what the cluster says to that."""
    (group,) = job_groups([prepared])
    cluster = known_limits([group])
    found = [*cluster.refusals(group), *cluster.notes(group), cluster.unknown]
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


def _lengths(turns: Sequence[int], longest: int | None) -> list[int]:
    """Sizes of the arrays for so many jobs in each turn; `longest`: most tasks of one array (None: unknown)."""
    return [min(longest or jobs, jobs - done) for jobs in turns for done in range(0, jobs, longest or jobs)]


def _arrays(lengths: Sequence[int]) -> str:
    """How many jobs, in which arrays."""
    if len(lengths) == 1:
        return count_of(lengths[0], "job")
    return f"{count_of(sum(lengths), 'job')} in arrays of {', '.join(map(str, lengths))} (the first is shown)"
