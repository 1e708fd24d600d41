"""What the verbs of the program do where Slurm is involved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from launch.slurm import record, scheduler
from launch.slurm.queue import Tracker
from launch.slurm.site import refusals
from launch.slurm.submit import batch_script, batches, submit
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from launch.local import Prepared


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
    kinds = scheduler.partitions() if scheduler.available() else None
    groups, accepted = batches(prepared), True
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
    if kinds is None:
        console.print("no Slurm here, so its limits were not looked at: plan again on the login node")
    return accepted


def cancel(sweeps: Sequence[Path], console: Console) -> int:
    """End the jobs of sweeps, whether they run or wait."""
    cancelled = 0
    for sweep in sweeps:
        with record.lock(sweep):
            tracker = Tracker.of(sweep, locked=True)
            found = [tracker.queued(submission, task) for submission, task in tracker.jobs.values()]
            jobs = sorted({queued.job for queued in found if queued is not None})
            if jobs:
                scheduler.tell(["scancel", *jobs])
        cancelled += len(jobs)
    console.print(f"{cancelled} job(s) cancelled; finished epochs are kept; submitting again starts what is missing")
    return 0


def job_logs(sweep: Path, name: str) -> list[Path]:
    """What Slurm and submitit caught of the latest job of a run, beside the attempts' own logs."""
    try:
        found = Tracker.of(sweep).jobs.get(name)
    except ConfigError:
        return []
    if found is None:
        return []
    submission, task = found
    job = submission.job_of(task)
    return sorted(record.folder_of(sweep, submission.token).glob(f"{job}_*_log.out")) if job else []
