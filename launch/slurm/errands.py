"""Jobs that train no run: a sweep's report, a calibration, the checks of a GPU.

A report is queued behind the jobs of its sweep. For the others the command waits: `srun` shows what they print, and
Ctrl-C ends them. On each of their nodes: `python -m parallelbench.entry launch.slurm.errands KIND FOLDER INTERFACE …`;
what the command and its nodes tell each other is in that folder, which all of them see. `make gpu-check LAUNCHER=slurm`
starts `… launch.slurm.errands gpu-check [OPTION …] [OVERRIDE …]`, with gpu-check's options, `--conf DIR`, `site=…` and
`nodes=…`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
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
from launch.slurm.sbatch import Job, Shape, memory_mib, needed_folders, shape_of, shortened, slurm
from launch.slurm.scheduler import SchedulerError
from launch.sweep import one_run
from launch.sweep.extension import extension
from parallelbench.config.build import from_mapping
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import ConfigError, StorageError, count_of
from parallelbench.frameworks.control_group import PatienceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from launch.attempt.processes import Rendezvous
    from launch.launcher import Prepared
    from launch.slurm.scheduler import QueuedJob
    from parallelbench.config.run import RunConfig


REPORT_MINUTES = 30
"""Its time limit, unless the site or the cluster allows less; the report of ten thousand runs takes less than one."""
CALIBRATION_MINUTES = 15
"""Its time limit, as that of the next, unless the launcher's is shorter; the measurement takes minutes."""
GPU_CHECK_MINUTES = 60
"""Strategies that compile take most."""
WAIT_S = 90.0
"""How long a node waits for the first one's address, which a file server may show a minute late."""
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
        # A script in sbatch's place may print lines of its own.
        number = (re.findall(r"^(\d+)(?:;.*)?$", answer, re.MULTILINE) or ["of unknown number"])[-1]
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
        folders=needed_folders(run.site, sweep, plugin),
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
    return Job(
        name=f"parallelbench-{kind}-{folder.name.rpartition('-')[2]}",
        shape=shape,
        launcher=slurm(run),
        site=run.site,
        minutes=shortened(minutes, run),
        program=["launch.slurm.errands", f"{kind}-on-node", str(folder), run.site.network_interface or "", *rest],
        folder=folder,
        folders=needed_folders(run.site, folder.parent, plugin_of(run)),
    )


@contextmanager
def _shared_folder(run: RunConfig, kind: str) -> Iterator[Path]:
    """A folder that all nodes see, below that of the results; raises `ConfigError` where there is no Slurm."""
    if not scheduler.available():
        raise ConfigError("there is no Slurm here: run this on the login node, or without launcher=slurm")
    results = run.sweep_folder.parent.absolute()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{kind}-", dir=results) as folder:
        yield Path(folder)


def _announce(job: Job) -> None:
    """Say what is waited for; raises `ConfigError` where that would be for ever."""
    for note in require_accepted([job]):
        print(f"note: {note}", file=sys.stderr)
    nodes = count_of(job.shape.nodes, "node")
    print(f"waiting for {nodes} of the cluster; Ctrl-C gives up", file=sys.stderr, flush=True)


def calibrate(prepared: Prepared, path: Path) -> None:
    """Measure devices and links of a run's nodes into a table; raises `ConfigError` where the job wrote none."""
    with _shared_folder(prepared.planned.run, "calibration") as folder:
        # All nodes see this folder; the place of the table, they may not.
        table = folder / "table.parquet"
        job = calibration_job(prepared, folder, table)
        _announce(job)
        text = scheduler.answer(scheduler.wait_for(job.srun(), job=job.name))
        if not table.exists():
            raise ConfigError(f"the calibration wrote no table: {text.strip()[-300:]}")
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
            job = gpu_check_job(run, folder, options)
            _announce(job)
            return scheduler.wait_for(job.srun(), job=job.name, shown=True).returncode
    except ConfigError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


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


# --- on each node, under srun


def main(arguments: Sequence[str]) -> int:
    """Start the checks of a GPU, or be one of an errand's tasks."""
    kind, *rest = arguments
    if kind == "gpu-check":
        return gpu_check(rest)
    folder, interface, *words = rest
    on_node = {"calibration": _calibrating, "gpu-check": _checking}
    try:
        return on_node[kind.removesuffix("-on-node")](Path(folder), interface or None, words)
    except (ConfigError, StorageError, OSError) as error:
        print(f"parallelbench: node {os.environ['SLURM_PROCID']}: {error}", file=sys.stderr)
        return 1


def _calibrating(folder: Path, interface: str | None, words: list[str]) -> int:
    """Meet the other nodes, then become the calibration."""
    device_type, run = words[1], from_mapping(msgspec.json.decode(words[2]))
    meeting = met(folder, interface)
    processes = run.strategy.processes(run, device_type)
    command = command_line(words, processes, meeting, program=CALIBRATION)
    os.execve(command[0], command, environment(run, device_type, os.environ, rendezvous=meeting))


def _checking(folder: Path, interface: str | None, options: list[str]) -> int:
    """The first node checks; the others start their share of what it starts."""
    node, nodes = os.environ["SLURM_PROCID"], int(os.environ["SLURM_NTASKS"])
    _through(interface)
    if node != "0":
        os.execv(sys.executable, [sys.executable, "-m", "parallelbench.gpu_check.nodes", str(folder), node])
    host = rendezvous.address_of(interface, nodes=nodes)
    several = ["--nodes", str(nodes), "--host", host, "--folder", str(folder)]
    os.execv(sys.executable, [sys.executable, "-m", "parallelbench.gpu_check", *several, *options])


def _through(interface: str | None) -> None:
    of_gloo = rendezvous.interface_of(interface, nodes=int(os.environ["SLURM_NTASKS"]))
    found = {"GLOO_SOCKET_IFNAME": of_gloo, "NCCL_SOCKET_IFNAME": interface}
    os.environ |= {name: each for name, each in found.items() if each}


def met(folder: Path, interface: str | None) -> Rendezvous:
    """Where a job's nodes meet: the first of them tells the others through the folder.

    Raises `ConfigError` where they don't, and `StorageError` where they don't see the same folder.
    """
    nodes, node = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_PROCID"])
    start = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    try:
        if node == 0:
            return rendezvous.host(folder, start, nodes=nodes, interface=interface)
        if (offer := rendezvous.awaited(lambda: rendezvous.read(folder, start), WAIT_S)) is None:
            raise rendezvous.unseen(folder, WAIT_S)
        return offer.joined(node=node, nodes=nodes, interface=interface)
    except (PatienceError, OSError) as error:
        raise ConfigError(f"the nodes can't meet: {rendezvous.of_nodes(error)}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
