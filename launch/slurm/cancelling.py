"""End the jobs of whole sweeps, or of single runs; also where nothing can be written."""

from __future__ import annotations

import shlex
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from launch.slurm import record, scheduler
from launch.slurm.queue import Tracker, track
from launch.slurm.report_job import reports
from launch.states import resumption, states_of
from parallelbench.errors import ConfigError, StorageError, count_of
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console


def cancel_sweeps(sweeps: Sequence[Path], console: Console) -> None:
    """End all jobs of sweeps, whether they run or wait, with one query and one command to Slurm."""
    with _trackers(sweeps) as trackers:
        jobs = [job for tracker in trackers.values() for job in tracker.in_queue()]
        to_report = [job for sweep, tracker in trackers.items() for job in reports(sweep, tracker.queue)]
        next_time = resumption(_live(trackers))
        if jobs or to_report:
            # A sweep is cancelled as a whole, so the ids of its arrays are enough.
            scheduler.tell(["scancel", *sorted({job.whole for job in (*jobs, *to_report)}, key=int)])
    jobless = sum(submission.job is None for tracker in trackers.values() for submission in tracker.submissions)
    also = " and the job that writes the report" if to_report else ""
    console.print(f"{count_of(len(jobs), 'job')}{also} cancelled; submitting again starts the missing runs{next_time}")
    if jobless:
        console.print(
            f"it is not known yet whether Slurm has {count_of(jobless, 'more array')}: cancel again in a minute",
            highlight=False,
        )


def cancel_runs(folders: Sequence[RunFolder], console: Console) -> None:
    """End the jobs of these runs only; raises `ConfigError` where a job works on other runs as well."""
    sweeps: dict[Path, list[RunFolder]] = {}
    for folder in folders:
        sweeps.setdefault(folder.path.parent, []).append(folder)
    with _trackers(list(sweeps)) as trackers:
        found = {folder: _jobs(trackers[sweep], folder) for sweep, members in sweeps.items() for folder in members}
        next_time = resumption(folder for folder, jobs in found.items() if jobs)
        jobs = [job for each in found.values() for job in each]
        if jobs:
            scheduler.tell(["scancel", *jobs])
        unsure = {each for each in found if _jobless(trackers[each.path.parent], each)}
    for folder in (each for each in found if not found[each]):
        unclear = "it is not known yet whether Slurm has a job of {}: cancel again in a minute"
        text = unclear if folder in unsure else "{} has no job in the queue"
        console.print(text.format(folder.path.name), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{count_of(len(jobs), 'job')} cancelled; submitting again starts the missing runs{next_time}")


def _jobless(tracker: Tracker, folder: RunFolder) -> bool:
    """Whether the answer to a submission of the run was lost a moment ago."""
    return any(submission.job is None for submission, _ in tracker.jobs.get(folder.path.name, []))


def _jobs(tracker: Tracker, folder: RunFolder) -> list[str]:
    """The jobs of a run that are in the queue."""
    name, jobs = folder.path.name, []
    for submission, task in tracker.jobs.get(name, []):
        queued = tracker.queued(submission, task)
        others = [other for other in submission.tasks[task] if other != name]
        if queued is not None and others:
            raise ConfigError(
                f"the job {queued.job} of {name} works on {count_of(len(others), 'other run')} as well "
                f"(launcher.pack=true): `parallelbench cancel {shlex.quote(str(folder.path.parent))}` ends it"
            )
        jobs += [queued.job] if queued is not None else []
    return jobs


@contextmanager
def _trackers(sweeps: Sequence[Path]) -> Iterator[Mapping[Path, Tracker]]:
    """The jobs of sweeps, to which nobody submits meanwhile; where no lock can be written, that is not prevented."""
    with ExitStack() as locks:
        try:
            for sweep in sweeps:
                locks.enter_context(record.lock(sweep))
            found = track(_records(sweeps), locked=True)
        except StorageError:  # a full disk is a reason more to end the jobs that fill it
            found = track(_records(sweeps), writes=False)
        yield found


def _records(sweeps: Iterable[Path]) -> dict[Path, list[record.Submission]]:
    return {sweep: record.submissions(sweep) for sweep in sweeps}


def _live(trackers: Mapping[Path, Tracker]) -> Iterator[RunFolder]:
    """Runs that a job in the queue still works on."""
    for sweep, tracker in trackers.items():
        names = {name for name, each in tracker.jobs.items() if any(tracker.queued(*entry) for entry in each)}
        folders = [RunFolder(sweep / name) for name in sorted(names)]
        for folder, state in zip(folders, states_of(folders), strict=True):
            if tracker.status(folder, state).live:
                yield folder
