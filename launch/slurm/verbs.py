"""What the verbs of the program do where Slurm is involved."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.markup import escape

from launch.slurm import record, scheduler
from launch.slurm.queue import by_run, track
from launch.slurm.scheduler import SchedulerError
from launch.slurm.site import refusals
from launch.slurm.submit import batch_script, batches, submit
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from launch.local import Prepared
    from launch.slurm.scheduler import Partition


def submit_all(
    prepared: Sequence[Prepared], console: Console, *, retry: frozenset[str], max_device_hours: float | None
) -> int:
    """Submit what is missing; returns the exit code. Nothing stays running here."""
    sweep = prepared[0].planned.run.sweep_folder
    submissions = submit(
        prepared, retry=retry, max_device_hours=max_device_hours, say=lambda text: console.print(text, highlight=False)
    )
    if submissions:
        jobs = ", ".join(str(submission.job) for submission in submissions)
        console.print(f"submitted: {jobs}; `parallelbench status {sweep}` shows how they get on", highlight=False)
    else:
        console.print(f"nothing to submit; `parallelbench status {sweep}` shows why", highlight=False)
    return 0


def show_plan(prepared: Sequence[Prepared], console: Console) -> bool:
    """The batch script of each shape, device-hours, and what the cluster refuses; returns whether it takes all."""
    kinds, unknown = _partitions()
    groups, accepted = batches(prepared), not scheduler.available() or kinds is not None
    for group in groups:
        tasks = len(group.tasks())
        console.print(
            f"\n[bold]{tasks} job(s)[/], each {group.shape}: at most {group.most_device_hours:.1f} device-hours"
        )
        for refusal in refusals(group, kinds) if kinds is not None else ():
            accepted = False
            console.print(f"[red]refused by the cluster[/]: {escape(refusal)}")
        console.print(batch_script(group), style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nat most {sum(group.most_device_hours for group in groups):.1f} device-hours in all")
    if unknown:
        console.print(unknown, markup=False, highlight=False)
    return accepted


def _partitions() -> tuple[list[Partition] | None, str]:
    """What the cluster offers; None, and why, where that is not known."""
    if not scheduler.available():
        return None, "no Slurm here, so its limits were not looked at: plan again on the login node"
    try:
        return scheduler.partitions(), ""
    except SchedulerError as error:
        return None, f"the cluster's limits could not be looked at: {error}"


def cancel(sweeps: Sequence[Path], console: Console) -> int:
    """End the jobs of sweeps, whether they run or wait: one question to Slurm, and one order, for all of them."""
    with ExitStack() as locks:
        for sweep in sweeps:
            locks.enter_context(record.lock(sweep))
        trackers = track({sweep: record.submissions(sweep) for sweep in sweeps}, locked=True)
        jobs = [job for tracker in trackers.values() for job in tracker.in_queue()]
        if jobs:
            # A sweep is cancelled as a whole, so its arrays are: their own ids will do.
            scheduler.tell(["scancel", *sorted({job.whole for job in jobs}, key=int)])
    console.print(f"{len(jobs)} job(s) cancelled; finished epochs are kept; submitting again starts what is missing")
    return 0


def job_logs(sweep: Path, name: str) -> list[Path]:
    """What Slurm and submitit caught of the latest job of a run, beside the attempts' own logs. Slurm is not asked."""
    try:
        found = by_run(record.submissions(sweep)).get(name)
    except ConfigError:
        return []
    if found is None:
        return []
    submission, task = found
    # Of a submission that was cut off, the job's id is known by the names of its logs alone.
    job = submission.job_of(task) or (f"*_{task}" if len(submission.tasks) > 1 else "*")
    return sorted(record.folder_of(sweep, submission.token).glob(f"{job}_*_log.out"))
