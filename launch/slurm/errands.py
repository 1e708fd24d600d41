"""Jobs that train no run: a sweep's report, a calibration, the checks of a GPU.

A report is queued behind the jobs of its sweep. For the others the command waits: it shows what they print, and Ctrl-C
ends them. Their first node executes `python -m parallelbench.entry launch.slurm.errands head INTERFACE NODES COMMAND`,
whose COMMAND is a step: on each node `… launch.slurm.errands KIND FOLDER …`. What the command and its nodes tell each
other is in that folder, which all of them see. `make gpu-check LAUNCHER=slurm` starts
`… launch.slurm.errands gpu-check [OPTION …] [OVERRIDE …]`, with gpu-check's options, `--conf DIR`, `site=…` and
`nodes=…`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.attempt.processes import CALIBRATION, calibration_arguments, command_line, environment
from launch.slurm import record, rendezvous, scheduler
from launch.slurm.cluster import cluster_of, require_accepted
from launch.slurm.queue import track
from launch.slurm.sbatch import Job, Shape, memory_mib, needed_folders, shape_of, shortened, slurm, step_command
from launch.slurm.scheduler import SchedulerError
from launch.sweep import one_run
from launch.sweep.extension import extension
from parallelbench.config.build import from_mapping
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from launch.launcher import Prepared
    from launch.slurm.scheduler import QueuedJob
    from parallelbench.config.run import RunConfig


REPORT_MINUTES = 30
"""Its time limit, unless the site or the cluster allows less; the report of ten thousand runs takes less than one."""
CALIBRATION_MINUTES = 15
"""Its time limit, as that of the next, unless the launcher's is shorter; the measurement takes minutes."""
GPU_CHECK_MINUTES = 60
"""Strategies that compile take most."""
_OF_REPORT = Shape(nodes=1, devices_per_node=0, gpus_per_node=0, cpus_per_node=2, memory_mib_per_node=4096)
_REHEARSED = 2
"""Cores of each node, where CPU processes take the place of GPUs."""


# --- the report of a sweep


def queue_report(run: RunConfig) -> str:
    """Queue the report of a run's sweep, in place of one that waits already; returns what there is to say.

    Raises `SchedulerError` where Slurm takes no such job, or would never start it.
    """
    sweep = run.sweep_folder
    tracker = track({sweep: record.submissions(sweep)}, writes=False)[sweep]
    waits_for = sorted({job.whole for job in tracker.in_queue()}, key=int)
    if not waits_for:
        return f"no job is queued; `parallelbench report {shlex.quote(str(sweep))}` writes the report now"
    former = [job.whole for job in reports(sweep, tracker.queue) if job.state == "PENDING"]
    try:
        job = _that_starts(report_job(run))
        answer = scheduler.tell(["sbatch", "--parsable"], script=report_script(run, waits_for, job))
        number = scheduler.job_number(answer) or "of unknown number"
        if former:
            scheduler.tell(["scancel", *former])
    except SchedulerError as error:
        raise SchedulerError(
            f"the jobs are submitted, but not the one that writes their report: {error}; once they are over, "
            f"`parallelbench report {shlex.quote(str(sweep))}` writes it"
        ) from None
    mail = f", and sends mail to {run.site.mail_user}" if run.site.mail_user else ""
    return f"job {number}: writes the report once the others are over{mail}"


def report_job(run: RunConfig) -> Job:
    """The job that writes the report of a run's sweep.

    The site's nodes are for jobs that train. What it writes may be read by others, as results may.
    """
    sweep, plugin = run.sweep_folder.absolute(), plugin_of(run)
    path = [f"export PYTHONPATH={shlex.quote(plugin[1])}${{PYTHONPATH:+:$PYTHONPATH}}"] if plugin else []
    return Job(
        name=report_name(sweep),
        shape=_OF_REPORT,
        launcher=slurm(run),
        site=msgspec.structs.replace(run.site, exclusive=False, nodelist=None),
        minutes=min(REPORT_MINUTES, run.site.max_time_min or REPORT_MINUTES),
        program=["parallelbench.cli", "report", *(["--plugin", plugin[0]] if plugin else []), str(sweep)],
        folder=sweep / record.FOLDER,
        lines=[f"umask {record.readable_by_others():03o}", *path],
    )


def _that_starts(job: Job) -> Job:
    """The job with the longest time limit that the cluster lets it have; raises `SchedulerError` where it has none."""
    cluster = cluster_of(patient=True)
    for minutes in range(job.minutes, 0, -1):
        job = replace(job, minutes=minutes)
        if not (why := cluster.never(job)):
            return job
    raise SchedulerError(f"it would never start: {'; '.join(why)}")


def report_script(run: RunConfig, waits_for: Sequence[str], job: Job | None = None) -> str:
    """The batch script of a report's job that follows these jobs, however they end."""
    further = {"dependency": f"afterany:{':'.join(waits_for)}"}
    if run.site.mail_user:
        further |= {"mail_user": run.site.mail_user, "mail_type": "END,FAIL"}
    return (job or report_job(run)).script(further=further)


def report_name(sweep: Path) -> str:
    """The name of the jobs that write a sweep's report."""
    return f"parallelbench-report-{hashlib.sha256(str(sweep.resolve()).encode()).hexdigest()[:12]}"


def report_states(jobs: Sequence[QueuedJob]) -> Iterator[str]:
    """Lines about the jobs that write reports: what they wait for."""
    if following := [job.job for job in jobs if job.state == "PENDING" and job.reason in ("Dependency", "None")]:
        yield f"writing reports once the others are over: {', '.join(following)}"
    for job in jobs:
        if job.job not in following:
            state = f"waits: {job.reason}" if job.state == "PENDING" else f"is {job.state.lower()}"
            yield f"the job {job.job}, which writes the report, {state}"


def reports(sweep: Path, queue: Mapping[str, QueuedJob]) -> list[QueuedJob]:
    """The jobs in the queue that write a sweep's report."""
    return [job for job in queue.values() if job.name == report_name(sweep)]


# --- on the login node: jobs that the command waits for


def errand(run: RunConfig, shape: Shape, folder: Path, *words: str, minutes: int) -> Job:
    """A job on a run's nodes. The first of `words` is its kind, the others are arguments on each node.

    No other job has its name, as no other has its folder.
    """
    kind, *rest = words
    folders = needed_folders(run.site, folder.parent, plugin_of(run))
    interface = run.site.network_interface or ""
    on_node = ["launch.slurm.errands", f"{kind}-on-node", str(folder), interface, *rest]
    head = ["launch.slurm.errands", "head", interface, str(shape.nodes)]
    return Job(
        name=f"parallelbench-{kind}-{folder.name.rpartition('-')[2]}",
        shape=shape,
        launcher=slurm(run),
        site=run.site,
        minutes=shortened(minutes, run),
        program=[*head, *step_command(shape, run.site, folders, on_node)],
        folder=folder,
    )


@contextmanager
def _shared_folder(run: RunConfig, kind: str) -> Iterator[Path]:
    """A folder that all nodes see, below that of the results; raises `ConfigError` where there is no Slurm."""
    if not scheduler.available():
        raise ConfigError("there is no Slurm here: run this on the login node, or without launcher=slurm")
    results = run.sweep_folder.parent.absolute()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{kind}-", dir=results, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _waited_for(job: Job, *, show: Callable[[str], object]) -> int:
    """Submit a job and wait for its end; returns its exit code. Raises `ConfigError` where it would wait for ever."""
    for note in require_accepted([job]):
        print(f"note: {note}", file=sys.stderr)
    nodes = count_of(job.shape.nodes, "node")
    print(f"waiting for {nodes} of the cluster; Ctrl-C gives up", file=sys.stderr, flush=True)
    return scheduler.run_to_its_end(job.script(), job=job.name, folder=job.folder, show=show)


def calibrate(prepared: Prepared, path: Path) -> None:
    """Measure devices and links of a run's nodes into a table; raises `ConfigError` where the job wrote none."""
    with _shared_folder(prepared.planned.run, "calibration") as folder:
        # All nodes see this folder; the place of the table, they may not.
        table = folder / "table.parquet"
        said: list[str] = []
        code = _waited_for(calibration_job(prepared, folder, table), show=said.append)
        if code or not table.exists():
            raise ConfigError(f"the calibration wrote no table: {''.join(said).strip()[-300:]}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(table.read_bytes())


def calibration_job(prepared: Prepared, folder: Path, table: Path) -> Job:
    """One task on each node, which starts a rank for each of its devices; the first rank writes the table."""
    run = prepared.planned.run
    words = ("calibration", *calibration_arguments(prepared, table))
    return errand(run, shape_of(run, run.device), folder, *words, minutes=CALIBRATION_MINUTES)


def gpu_check(arguments: Sequence[str]) -> int:
    """The checks of a GPU, on all GPUs of one node or several."""
    parser = argparse.ArgumentParser(prog="gpu-check", add_help=False)
    parser.add_argument("--conf")
    chosen, rest = parser.parse_known_args(list(arguments))
    options = [each for each in rest if each.startswith("--")]
    overrides = [each for each in rest if not each.startswith("--")]
    nodes = next((value for key, _, value in (each.partition("=") for each in overrides) if key == "nodes"), "1")
    try:
        run = one_run(["launcher=slurm", *overrides, f"devices={nodes}"], extension(chosen.conf, None)).run
        # What has passed is kept beside this folder.
        with _shared_folder(run, "gpu-check") as folder:
            return _waited_for(gpu_check_job(run, folder, options), show=_print)
    except ConfigError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _print(text: str) -> None:
    print(text, end="", flush=True)


def gpu_check_job(run: RunConfig, folder: Path, options: Sequence[str]) -> Job:
    """One task on each of the nodes, with all of its GPUs."""
    site, launcher = run.site, slurm(run)
    rehearsed = "--rehearse" in options
    if not (rehearsed or site.gpus_per_node):
        raise ConfigError(f"site={site.name} has site.gpus_per_node=0: set it to the GPUs of a node")
    devices = _REHEARSED if rehearsed else site.gpus_per_node
    cores = devices if rehearsed else devices * launcher.cpus_per_gpu
    gpus = site.gpus_per_node if record.asks_for_gpus(site, "cpu" if rehearsed else "cuda") else 0
    shape = Shape(run.nodes, devices, gpus, cores, memory_mib(run, devices))
    return errand(run, shape, folder, "gpu-check", *options, minutes=GPU_CHECK_MINUTES)


# --- in the job


def main(arguments: Sequence[str]) -> int:
    """Start the checks of a GPU, or be a part of an errand's job."""
    kind, *rest = arguments
    if kind == "gpu-check":
        return gpu_check(rest)
    try:
        if kind == "head":
            return _become_step(*rest)
        folder, interface, *words = rest
        on_node = {"calibration": _become_calibration, "gpu-check": _become_checks}[kind.removesuffix("-on-node")]
        return on_node(folder, interface or None, words)
    except OSError as error:
        print(f"parallelbench: the nodes can't meet: {error}", file=sys.stderr)
        return 1


def _become_step(interface: str, nodes: str, *command: str) -> int:
    """Choose where the nodes meet, then become the step."""
    start = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    meeting = rendezvous.choose(start, nodes=int(nodes), interface=interface or None)
    os.execvpe(command[0], command, os.environ | rendezvous.to_environment(meeting))


def _become_calibration(_: str, interface: str | None, words: list[str]) -> int:
    """Become the calibration."""
    device_type, run = words[1], from_mapping(msgspec.json.decode(words[2]))
    meeting = rendezvous.from_environment(interface)
    command = command_line(words, run.strategy.processes(run, device_type), meeting, program=CALIBRATION)
    os.execve(command[0], command, environment(run, device_type, os.environ, rendezvous=meeting))


def _become_checks(folder: str, interface: str | None, options: list[str]) -> int:
    """The first node checks; the others start their share of what it starts."""
    meeting = rendezvous.from_environment(interface)
    found = {"GLOO_SOCKET_IFNAME": meeting.interface, "NCCL_SOCKET_IFNAME": interface}
    os.environ |= {name: each for name, each in found.items() if each}
    share = ["parallelbench.gpu_check.nodes", folder, str(meeting.node)]
    if meeting.node == 0:
        several = ["--nodes", str(meeting.nodes), "--host", meeting.host, "--folder", folder]
        share = ["parallelbench.gpu_check", *several, *options]
    os.execv(sys.executable, [sys.executable, "-m", *share])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
