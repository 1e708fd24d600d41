"""Slurm's commands: one for all jobs together, never one per job.

Queries for display fail at once where Slurm gives no answer. Callers that need the answer are patient: they ask again
after growing pauses.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError, count_of, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


TIMEOUT_S = 30.0
"""How long any command of Slurm's may take, but for those that wait for a job of their own."""
_LOOK_S = 1.0
"""Between two looks at a job that a command waits for, and that prints."""
_MOST_LOOK_S = 15.0
"""The same while it prints nothing, as in the queue."""
_AWAY_S = 600.0
"""How long no answer may come about it."""
_OVER = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
}
"""The controller's states of jobs that have ended."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Before the second, third … try of a patient query. Slurm's commands also wait for seconds by themselves."""
_GOING_ON = {"PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED"}
"""Accounting's states of jobs that are not over, or whose end has not reached it yet."""
_ADVICE = (
    ("Invalid account", "check site.account (`sacctmgr show assoc user=$USER`)"),
    ("Invalid qos", "check site.qos (`sacctmgr show assoc user=$USER format=qos`)"),
    ("Invalid wckey", "check site.wckey (`sacctmgr show wckey user=$USER`)"),
    ("Invalid partition", "check site.partition (`sinfo`)"),
    ("Invalid feature", "check site.constraint (`sinfo -o %f`)"),
    ("Requested reservation is invalid", "check site.reservation (`scontrol show reservation`)"),
    ("Invalid node name", "check site.nodelist and site.exclude (`sinfo -N`)"),
    ("Invalid Trackable RESource", "check site.gpu_type (`sinfo -o %G`)"),
    ("Requested time limit", "lower launcher.time_limit_min"),
    ("Requested node configuration", "lower devices, launcher.cpus_per_gpu or launcher.memory_gib_per_device"),
    ("Unable to contact slurm controller", "is slurmctld up? Nothing is lost: run the same command again later"),
    ("Socket timed out", "the controller is busy: run the same command again later"),
)
_ANSWER_LOST = (
    *("timed out", "Zero Bytes", "Unexpected message", "Could not make sense"),
    "killed for an unknown reason",  # submitit's words where an answer is no UTF-8, or sbatch was killed
)
_LIMIT_REACHED = ("QOSMaxSubmitJob", "AssocMaxSubmitJob", "MaxSubmitJobs", "Job violates accounting/QOS policy")
_NO_NODES = ("Requested node configuration is not available", "Invalid time specified")
"""The latter is said of a reservation that begins later."""
_BUSY = (
    *("Requested nodes are busy", "allocation failure: Resource temporarily unavailable"),
    *("Requested reservation is in use", "Requested reservation not usable now", "Required node not available"),
    "Requested partition configuration not available now",
)
"""What is said of jobs that sbatch queues (slurmctld's `job_allocate` and its callers)."""
_CLEAR = ("allocation failure", "submission failed", "unrecognized option", "nvalid ")
"""What the controller refuses, or sbatch for one of its options."""
_NO_CONTROLLER = "(connect failure)"

_LEAKING = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SUBMITIT_", "PMI", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_")


class SchedulerError(ConfigError):
    """Slurm refused a command, or gave no answer; the message says what to do."""


class NoSlurmError(SchedulerError):
    """There is no Slurm on this machine, so asking again does not help."""


class NoAnswerError(SchedulerError):
    """A command took longer than `TIMEOUT_S`; asking again would take as long."""


class NoControllerError(SchedulerError):
    """No controller took the connection: it may be started anew."""


class NoJob(Enum):
    """Why sbatch has given no job."""

    REFUSED = "refused"
    LIMIT = "limit"
    """The user may not have so many jobs; fewer may fit."""
    NO_NODES = "no_nodes"
    """No nodes that suit are there or, where only a test was asked for, none that are up at the time."""
    BUSY = "busy"
    """Not now: sbatch queues such a job."""
    UNCLEAR = "unclear"
    """Not in words of Slurm's: it may be a program in sbatch's place that does not know the test."""
    NOT_REACHED = "not_reached"
    """No controller took the connection, so none has heard of the job."""
    LOST = "lost"
    """The answer is missing or has no meaning: the job may exist."""


class SubmissionError(SchedulerError):
    """sbatch has given no job."""

    def __init__(self, message: str, why: NoJob) -> None:
        super().__init__(message)
        self.why = why

    @property
    def refused(self) -> bool:
        """Whether Slurm has answered, and will not answer otherwise to the same question."""
        return self.why in (NoJob.REFUSED, NoJob.LIMIT, NoJob.NO_NODES, NoJob.BUSY)


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

    @property
    def whole(self) -> str:
        """Id of its array, or its own id if it belongs to none."""
        return self.job.partition("_")[0]


@dataclass(frozen=True)
class Accounted:
    """One job, or one task of an array, as accounting knows it."""

    job: str
    name: str
    ended: str
    """How it ended, e.g. TIMEOUT; empty: not over yet, as far as accounting knows."""


def available() -> bool:
    """Whether Slurm is installed here."""
    return all(map(shutil.which, ("sbatch", "srun")))


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


def ask(command: Sequence[str], *, patient: bool = False, timeout_s: float | None = None, script: str = "") -> str:
    """The output of a query; raises `SchedulerError` where Slurm gives none within `timeout_s` (None: `TIMEOUT_S`).

    `script`: what it reads from its standard input.
    """
    for pause_s in PAUSES_S if patient else ():
        try:
            return _run(command, timeout_s=timeout_s, script=script)
        except (NoSlurmError, NoAnswerError):
            raise
        except SchedulerError as error:
            if isinstance(error, SubmissionError) and error.refused:
                raise
            time.sleep(pause_s)
    return _run(command, timeout_s=timeout_s, script=script)


def estimated_start(script: str) -> float | None:
    """When Slurm would start such a job if it were submitted now, Unix time, s; None: it takes it, and names no time.

    Submits nothing, and asks once. Raises a `SubmissionError` that is `refused` where Slurm takes no such job, or none
    such now, and another `SchedulerError` where it doesn't say.
    """
    answer = ask(["sbatch", "--test-only"], script=script)
    found = re.search(r" to start at (\d+-\d\d-\d\dT\d\d:\d\d:\d\d) ", answer)
    return unix_time(found[1]) if found else None


def tell(command: Sequence[str], *, patient: bool = False, script: str = "") -> str:
    """Run a command that changes something, once; raises `SchedulerError`.

    `patient`: again where Slurm gives no answer, of what may be said twice. `script`: what it reads from its standard
    input.
    """
    return ask(command, patient=True, script=script) if patient else _run(command, script=script)


def run_to_its_end(script: str, *, job: str, folder: Path, show: Callable[[str], object]) -> int:
    """Submit a batch script and wait for the end of its job; returns its exit code.

    `show` gets what the job prints, which submitit has Slurm write to a file in `folder`. The job, the only one of its
    name `job`, does not outlive this call: where that is interrupted, e.g. by Ctrl-C, it is cancelled.
    """
    shown = 0
    try:
        answer = tell(["sbatch", "--parsable"], script=script)
        if not (number := job_number(answer)):
            raise SchedulerError(f"sbatch named no job, but said {one_line(answer)!r}: see `squeue --me`")
        asked_at, pause_s = time.monotonic(), _LOOK_S
        while True:
            ended = None
            try:
                ended = _ended_with(number)
                asked_at = time.monotonic()
            except NoSlurmError:
                raise
            except SchedulerError:  # the job goes on while a controller is away
                if time.monotonic() - asked_at > _AWAY_S:
                    raise
            with suppress(OSError), (folder / f"{number}_0_log.out").open("rb") as file:
                file.seek(shown)
                text = file.read()
                shown += len(text)
                show(text.decode(errors="replace"))
            if ended is not None:
                return ended
            time.sleep(pause_s)
            pause_s = _LOOK_S if shown else min(_MOST_LOOK_S, 1.5 * pause_s)
    except BaseException:
        with suppress(SchedulerError):
            _run(["scancel", f"--name={job}"])
        raise


def job_number(answer: str) -> str:
    """The id in what `sbatch --parsable` printed, empty where there is none; a script in its place may print lines of
    its own.
    """
    return str(["", *re.findall(r"^(\d+)(?:;.*)?$", answer, re.MULTILINE)][-1])


def _ended_with(job: str) -> int | None:
    """The exit code of a job, 1 where a signal or Slurm has ended it; None while it waits or runs."""
    try:
        said = ask(["scontrol", "--oneliner", "show", "job", job])
    except SchedulerError as error:
        if "Invalid job id" in str(error):  # Slurm forgets a job minutes after its end
            return 1
        raise
    state, code = re.search(r"\bJobState=(\S+)", said), re.search(r"\bExitCode=(\d+):(\d+)", said)
    if state is None or state[1] not in _OVER:
        return None
    return int(code[1]) if state[1] in ("COMPLETED", "FAILED") and code is not None and code[2] == "0" else 1


def no_program(name: str) -> NoSlurmError:
    """One of Slurm's programs is missing."""
    return NoSlurmError(f"there is no {name} here: run this on the cluster's login node")


def _own_environment() -> dict[str, str]:
    """`clean_environment` for one program: a signal's handler may ask while something else reads `os.environ`."""
    return {name: value for name, value in os.environ.items() if not _leaks(name)}


def _run(command: Sequence[str], *, script: str = "", timeout_s: float | None = None) -> str:
    limit_s, own = timeout_s or TIMEOUT_S, _own_environment()
    try:
        words = os.fsencode(script) or None
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, input=words, env=own)
    except FileNotFoundError:
        raise no_program(command[0]) from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]} gave no answer within {limit_s:g} s: run the same command later") from None
    return answer(subprocess.CompletedProcess(list(command), done.returncode, _text(done.stdout), _text(done.stderr)))


def _text(printed: bytes | None) -> str:
    """What a program of Slurm's has printed: names and comments of jobs are bytes, not always of UTF-8."""
    return (printed or b"").decode(errors="replace")


def answer(done: subprocess.CompletedProcess[str]) -> str:
    """What a command of Slurm's has printed; raises `SchedulerError` where it has failed."""
    command = done.args
    if done.returncode:
        said = done.stderr or done.stdout or f"exit code {done.returncode}"
        if command[0] == "sbatch":
            raise refusal(said)
        kind = NoControllerError if _NO_CONTROLLER in said else SchedulerError
        raise kind(f"{command[0]}: {explain(said).removeprefix(f'{command[0]}: ')}")
    return done.stderr if "--test-only" in command else done.stdout


def explain(text: str) -> str:
    """An error of Slurm's in one line, with the key to change where that is known.

    Of several lines what ended the program, else the first, and how many more there are.
    """
    lines = list(map(one_line, text.strip().splitlines())) or [""]
    line = next((line for line in lines if "fatal: " in line), lines[0])
    if more := len(lines) - 1:
        line += f" (and {count_of(more, 'line')} more)"
    advice = next((advice for sign, advice in _ADVICE if sign.lower() in text.lower()), None)
    return f"{line}: {advice}" if advice else line


def refusal(error: str) -> SubmissionError:
    """What an error of sbatch means. Only its text says that: sbatch exits with 1 for all of them."""
    text = one_line(error.strip().removeprefix("sbatch: error: "))
    if any(sign in text for sign in _ANSWER_LOST):
        why = NoJob.LOST
    elif _NO_CONTROLLER in text:
        why = NoJob.NOT_REACHED
    elif any(sign in text for sign in _LIMIT_REACHED):
        why = NoJob.LIMIT
    elif any(sign in text for sign in _NO_NODES):
        why = NoJob.NO_NODES
    elif any(sign in text for sign in _BUSY):
        why = NoJob.BUSY
    elif any(sign in text for sign in _CLEAR) and "test-only" not in text:
        why = NoJob.REFUSED
    else:
        why = NoJob.UNCLEAR
    return SubmissionError(f"sbatch: {explain(text)}", why)


def queue(*, patient: bool = False) -> dict[str, QueuedJob]:
    """This user's jobs in the queue, by job; array tasks one by one. One query."""
    format_ = "%F|%K|%A|%T|%r|%S|%j"
    jobs = {}
    for line in ask(["squeue", "--me", "--array", "--noheader", f"--format={format_}"], patient=patient).splitlines():
        if line.count("|") < 6:
            continue  # the user's other jobs may have a newline in their names
        array, task, job, state, reason, starts_at, name = line.split("|", 6)
        identity = f"{array}_{task}" if task != "N/A" else job
        known = starts_at if starts_at != "N/A" else ""
        jobs[identity] = QueuedJob(identity, state, reason, known, name)
    return jobs


def accounting() -> bool:
    """Whether Slurm keeps records of finished jobs."""
    return "accounting_storage/none" not in configuration().get("AccountingStorageType", "accounting_storage/none")


def accounted(names: Iterable[str], *, since: float) -> list[Accounted]:
    """This user's jobs of these names in `sacct`, oldest first; [] without accounting. One query.

    `since` (Unix time, s) is when the first of them was submitted. By name, since ids are given out again.

    With the jobs' steps: where a cgroup holds a job to its memory, its step is OUT_OF_MEMORY, and the job FAILED.
    """
    known = set(names)
    # An hour earlier: the clock of the database's host may differ.
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 3600))
    command = ["sacct", "-n", "-P", "--duplicates", "--format=JobID,State,JobName"]
    try:
        lines = ask([*command, f"--name={','.join(sorted(known))}", f"--starttime={begin}"]).splitlines()
    except SchedulerError:
        return []  # no slurmdbd, or none that answers
    mine: list[tuple[str, str, str]] = []
    for job, state, name in (line.split("|", 2) for line in lines if line.count("|") >= 2):
        whole, step, _ = job.partition(".")
        if not step and name in known:
            mine.append((job, name, _ended(state)))
        elif step and mine and mine[-1][0] == whole and (mine[-1][2], _ended(state)) == ("FAILED", OUT_OF_MEMORY):
            mine[-1] = (whole, mine[-1][1], OUT_OF_MEMORY)  # a start's steps follow it
    return [Accounted(each, name, ended) for job, name, ended in mine for each in tasks_of(job)]


OUT_OF_MEMORY = "OUT_OF_MEMORY"


def _ended(state: str) -> str:
    """Of a state such as `CANCELLED by 1000`."""
    word = state.split()[0] if state else ""
    return "" if word in _GOING_ON else word


def named(name: str, *, since: float) -> str | None:
    """The id (of an array: of the whole) of this user's latest job of a name, in the queue or over; None: no such job.

    Patient: a job that is not found may be submitted once more.
    """
    ids = {job.whole for job in queue(patient=True).values() if job.name == name}
    ids = ids or {job.job.partition("_")[0] for job in accounted([name], since=since)}
    return max(ids, key=int, default=None)


def configuration(*, patient: bool = False) -> dict[str, str]:
    """The settings of the cluster (`scontrol show config`)."""
    lines = ask(["scontrol", "show", "config"], patient=patient).splitlines()
    return {key.strip(): value.strip() for key, equals, value in (line.partition("=") for line in lines) if equals}


def max_array_size(settings: Mapping[str, str]) -> int:
    """Most tasks of one array, by `MaxArraySize` and `max_array_tasks` of a cluster's settings."""
    at_once = re.search(r"\bmax_array_tasks=(\d+)", settings.get("SchedulerParameters", ""))
    return max(1, min(int(settings.get("MaxArraySize", "1001")), int(at_once[1]) if at_once else sys.maxsize))


def cluster_name(settings: Mapping[str, str]) -> str:
    """By a cluster's settings; empty where they don't say."""
    return settings.get("ClusterName", "")


def tasks_of(job: str) -> list[str]:
    """`30_[6-7,9%8]`, as sacct shows the tasks that never began, one by one; any other job as it is.

    A list that Slurm has cut off ("...", SLURM_BITSTR_LEN) gives the tasks that are named whole.
    """
    array, bracket, rest = job.partition("_[")
    if not bracket:
        return [job]
    tasks: list[int] = []
    for part in rest.rstrip("]").partition("%")[0].split(","):
        if (found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)) is not None:
            first, last, step = (int(text) if text else None for text in found.groups())
            tasks += range(first or 0, (last if last is not None else first or 0) + 1, step or 1)
    return [f"{array}_{task}" for task in tasks]


def unix_time(text: str) -> float | None:
    """Of a time as Slurm writes it, in this machine's zone, s; None where it names none."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


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
