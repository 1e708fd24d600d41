"""What is asked of Slurm: one command for all jobs together, never one per job, and again after a growing pause."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TIMEOUT_S = 30.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Before the second, third … try of a query that got no answer."""
LIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"),
    *("COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "PREEMPTED"),
}
"""States in `squeue` of a job that is not over: one that was preempted waits there to be started again."""
_ADVICE = (
    ("Invalid account", "check site.account (`sacctmgr show assoc user=$USER`)"),
    ("Invalid qos", "check site.qos (`sacctmgr show assoc user=$USER format=qos`)"),
    ("Invalid partition", "check site.partition (`sinfo`)"),
    ("Invalid feature", "check site.constraint (`sinfo -o %f`)"),
    ("Invalid Trackable RESource", "check site.gpu_type (`sinfo -o %G`)"),
    ("Requested time limit", "lower launcher.time_limit_min"),
    ("Requested node configuration", "lower devices, launcher.cpus_per_gpu or launcher.memory_gib_per_device"),
    ("Unable to contact slurm controller", "is slurmctld up? Nothing is lost: run the same command again later"),
    ("Socket timed out", "the controller is busy: run the same command again later"),
)


_LEAKING = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SUBMITIT_", "PMI", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_")


class SchedulerError(ConfigError):
    """Slurm refused a command, or gave no answer; the message says what to do."""


@dataclass(frozen=True)
class QueuedJob:
    """One job, or one task of an array, that `squeue` knows."""

    job: str
    """`17`, or `17_3` for task 3 of the array 17."""
    state: str
    reason: str
    """Why it waits, or where it runs."""
    starts_at: str
    """When Slurm expects it to start; empty: unknown."""
    name: str


def available() -> bool:
    """Whether there is a Slurm to ask."""
    return shutil.which("sbatch") is not None


@contextmanager
def clean_environment() -> Iterator[None]:
    """Without the variables of the job that this process may run in: the new one would be pinned to its cores."""
    leaked = {name: value for name, value in os.environ.items() if _leaks(name)}
    for name in leaked:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(leaked)


def _leaks(name: str) -> bool:
    """Also what would change the answers of squeue and the like, e.g. SQUEUE_PARTITION."""
    return name.startswith(_LEAKING) and name != "SLURM_CONF"


def ask(command: Sequence[str], *, tries: int | None = None) -> str:
    """The output of a query; raises `SchedulerError` where Slurm gives none, after trying again with growing pauses."""
    for pause_s in PAUSES_S if tries is None else PAUSES_S[: tries - 1]:
        try:
            return _run(command)
        except SchedulerError:
            time.sleep(pause_s)
    return _run(command)


def tell(command: Sequence[str], *, timeout_s: float | None = TIMEOUT_S) -> str:
    """Run a command that changes something, once; raises `SchedulerError`. `timeout_s=None`: however long it takes."""
    return _run(command, timeout_s)


def _run(command: Sequence[str], timeout_s: float | None = TIMEOUT_S) -> str:
    try:
        with clean_environment():
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise SchedulerError(f"there is no {command[0]} here: run this on the cluster's login node") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"{command[0]} gave no answer within {timeout_s:g} s: run the same command later"
        ) from None
    if done.returncode:
        raise SchedulerError(f"{command[0]}: {explain(done.stderr or done.stdout or f'exit code {done.returncode}')}")
    return done.stdout


def explain(text: str) -> str:
    """An error of Slurm's in one line, with the key to change where that is known."""
    line = one_line(text.strip())
    advice = next((advice for sign, advice in _ADVICE if sign.lower() in line.lower()), None)
    return f"{line}: {advice}" if advice else line


def queue() -> dict[str, QueuedJob]:
    """This user's jobs in the queue, by job; array tasks one by one. One query."""
    format_ = "%F|%K|%A|%T|%r|%S|%j"
    found = {}
    for line in ask(["squeue", "--me", "--array", "--noheader", f"--format={format_}"]).splitlines():
        if line.count("|") < 6:
            continue  # the user's other jobs may have a newline in their names
        array, task, job, state, reason, starts_at, name = line.split("|", 6)
        identity = f"{array}_{task}" if task != "N/A" else job
        known = starts_at if starts_at != "N/A" else ""
        found[identity] = QueuedJob(identity, state, reason, known, name)
    return found


def accounting() -> bool:
    """Whether Slurm keeps records of jobs that are over."""
    return "accounting_storage/none" not in configuration().get("AccountingStorageType", "accounting_storage/none")


def ended(jobs: Mapping[str, str]) -> dict[str, str]:
    """The state that `sacct` gives each of the jobs, such as OUT_OF_MEMORY; {} without accounting. One query.

    `jobs` is id → name: ids are given out again, so one of another name is somebody else's.
    """
    arrays = sorted({job.partition("_")[0] for job in jobs})
    if not arrays:
        return {}
    command = ["sacct", "-X", "-n", "-P", "--duplicates", "--format=JobID,State,JobName", f"--jobs={','.join(arrays)}"]
    try:
        lines = ask(command, tries=2).splitlines()
    except SchedulerError:
        return {}  # no slurmdbd, or none that answers: what it knows is not known
    # Later lines tell of later starts of the same job.
    told = (line.split("|", 2) for line in lines if line.count("|") >= 2)
    return {job: state.split()[0] for job, state, name in told if state and jobs.get(job) == name}


def named(name: str) -> list[str]:
    """Ids (of arrays: of the whole) of this user's jobs of a name, in the queue or over."""
    found = [job.job.partition("_")[0] for job in queue().values() if job.name == name]
    try:
        lines = ask(
            ["sacct", "-X", "-n", "-P", "--format=JobID", f"--name={name}", "--starttime=now-30days"], tries=2
        ).splitlines()
    except SchedulerError:
        lines = []
    return sorted({*found, *(line.partition("_")[0] for line in lines)}, key=int)


def configuration() -> dict[str, str]:
    """The settings of the cluster (`scontrol show config`)."""
    lines = ask(["scontrol", "show", "config"]).splitlines()
    return {key.strip(): value.strip() for key, found, value in (line.partition("=") for line in lines) if found}


def max_array_size() -> int:
    """Most tasks of one array."""
    return max(1, int(configuration().get("MaxArraySize", "1001")))


@dataclass(frozen=True)
class Partition:
    """What a partition offers, as `sinfo` says."""

    name: str
    default: bool
    available: bool
    limit_min: int | None
    """Longest job, minutes; None: no limit."""
    nodes: int
    cpus_per_node: int
    memory_mib: int
    gres: str
    features: str


def partitions() -> list[Partition]:
    """All partitions; where their nodes differ, one entry for each kind."""
    text = ask(["sinfo", "--noheader", "--format=%R|%P|%a|%l|%D|%c|%m|%G|%f"])
    return [_partition(line) for line in text.splitlines() if line.strip()]


def _partition(line: str) -> Partition:
    name, marked, state, limit, nodes, cpus, memory, gres, features = line.strip().split("|")
    return Partition(
        name=name,
        default=marked.endswith("*"),
        available=state == "up",
        limit_min=minutes(limit),
        nodes=int(nodes),
        cpus_per_node=int(cpus.rstrip("+")),
        memory_mib=int(memory.rstrip("+")),
        gres="" if gres == "(null)" else gres,
        features="" if features == "(null)" else features,
    )


def minutes(text: str) -> int | None:
    """Whole minutes of Slurm's `days-hours:minutes:seconds`; None for `infinite`."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minute, second = (*parts, 0, 0)[:3]
    else:
        hours, minute, second = (0, 0, *parts)[-3:] if len(parts) > 1 else (0, parts[0], 0)
    return (int(days or 0) * 24 + hours) * 60 + minute + (1 if second else 0)
