"""`submit --then report`: a job that writes a sweep's report once all its other jobs are over, and may send mail."""

from __future__ import annotations

import hashlib
import shlex
import sys
from typing import TYPE_CHECKING

from launch.slurm import record, scheduler
from launch.slurm.queue import track
from launch.slurm.scheduler import SchedulerError
from launch.slurm.shape import as_words, setup_lines, site_flags
from parallelbench.config.plugin import plugin_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from launch.slurm.scheduler import QueuedJob
    from parallelbench.config.run import RunConfig


MINUTES = 30
"""Time limit of the job, unless the site's is shorter; the report of ten thousand runs takes less than one."""
CORES, MEMORY_MIB = 2, 4096
_NOT_ITS = ("exclusive", "nodelist")
"""Flags of the site that are for jobs that train."""


def queue_report(run: RunConfig) -> str:
    """Queue the report of a run's sweep, in place of one that waits already; returns what there is to say.

    Raises `SchedulerError` where Slurm takes no such job.
    """
    sweep = run.sweep_folder
    tracker = track({sweep: record.submissions(sweep)}, writes=False)[sweep]
    waits_for = sorted({job.whole for job in tracker.in_queue()}, key=int)
    if not waits_for:
        return f"no job is queued; `parallelbench report {shlex.quote(str(sweep))}` writes the report now"
    former = [job.whole for job in reports(sweep, tracker.queue) if job.state == "PENDING"]
    try:
        job = scheduler.tell(command(run, waits_for), script=script(run)).strip().partition(";")[0]
        if former:
            scheduler.tell(["scancel", *former])
    except SchedulerError as error:
        raise SchedulerError(f"the jobs are submitted, but not the one that writes their report: {error}") from None
    mail = f", and sends mail to {run.site.mail_user}" if run.site.mail_user else ""
    return f"job {job}: writes the report once the others are over{mail}"


def command(run: RunConfig, waits_for: Sequence[str]) -> list[str]:
    """The sbatch that queues it, after these jobs, however they end; it reads the script from its input."""
    sweep, site = run.sweep_folder.absolute(), run.site
    flags = {
        "parsable": True,
        "job-name": job_name(sweep),
        "dependency": f"afterany:{':'.join(waits_for)}",
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": CORES,
        "mem": f"{MEMORY_MIB}M",
        "time": min(MINUTES, site.max_time_min or MINUTES),
        **{key: value for key, value in site_flags(site).items() if key not in _NOT_ITS},
        "output": str(sweep / record.FOLDER / "report-%j_log.out"),
        "mail-user": site.mail_user,
        "mail-type": "END,FAIL" if site.mail_user else None,
    }
    return ["sbatch", *as_words(flags)]


def script(run: RunConfig) -> str:
    """What the job executes: the set-up of all jobs, then the report.

    In bash from its first line on, as the runs' jobs are: sbatch's --wrap begins in sh, and where that is dash,
    functions that the user's shell exports (`module` is one on many clusters) are lost to every shell below it.
    """
    plugin = ["--plugin", *plugin_of(run)[:1]] if plugin_of(run) else []
    path = [f"export PYTHONPATH={shlex.quote(plugin_of(run)[1])}${{PYTHONPATH:+:$PYTHONPATH}}"] if plugin else []
    program = [sys.executable, "-m", "parallelbench.cli", "report", *plugin, str(run.sweep_folder.absolute())]
    umask = f"umask {record.readable_by_others():03o}"
    return "\n".join(["#!/bin/bash", *setup_lines(run.site), umask, *path, f"exec {shlex.join(program)}", ""])


def job_name(sweep: Path) -> str:
    """The name of the jobs that write a sweep's report."""
    return f"parallelbench-report-{hashlib.sha256(str(sweep.resolve()).encode()).hexdigest()[:12]}"


def reports(sweep: Path, queue: Mapping[str, QueuedJob]) -> Iterable[QueuedJob]:
    """The jobs in the queue that write a sweep's report."""
    return [job for job in queue.values() if job.name == job_name(sweep)]
