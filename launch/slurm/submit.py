"""Submit the runs of a sweep to Slurm: one array for each shape. No process stays on the login node."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from launch.checks import checked
from launch.known_times import Known
from launch.slurm import job, record, scheduler
from launch.slurm.cluster import known_cluster, require_accepted
from launch.slurm.limits import check_budget
from launch.slurm.order import holds_back, in_turns, out_of_turn
from launch.slurm.queue import track
from launch.slurm.sbatch import check_container, job_groups, job_of_runs, shape_of, site_flags, slurm
from launch.slurm.scheduler import NoJob, SchedulerError, SubmissionError
from launch.slurm.time_limit import Limits
from launch.states import states_of
from parallelbench.config.dataset_check import require_memory
from parallelbench.errors import ConfigError, StorageError, count_of
from parallelbench.results.files import storage_errors
from parallelbench.results.folder import FORGOTTEN, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from launch.launcher import Prepared, SubmitOptions
    from launch.slurm.order import Turn
    from launch.slurm.queue import JobStatus
    from launch.slurm.record import Submission
    from launch.slurm.sbatch import Job, JobGroup, Shape
    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Site


def device_type_of(run: RunConfig) -> str:
    """The type of the run's devices: the site's, unless the run chooses one."""
    return run.site.device if run.device == "auto" else run.device


def prepare_for_site(planned: PlannedRun) -> Prepared:
    """Check a run as far as the login node can, and fix its device type."""
    site_flags(planned.run.site)  # refuses options that the suite sets
    run = msgspec.structs.replace(planned.run, device=device_type_of(planned.run))
    shape = shape_of(run, run.device)
    if run.launcher.packed and run.nodes > 1:
        raise ConfigError(
            f"launcher.pack=true with nodes={run.nodes} is refused: warm processes serve one node; "
            "choose nodes=1 or launcher.pack=false"
        )
    prepared = checked(replace(planned, run=run))
    require_memory(
        run,
        node_bytes=None if run.site.memory_by == "none" else shape.memory_mib_per_node * 2**20,
        device_bytes=None if run.site.hardware is None else run.site.hardware.memory_gib * 2**30,
        more="launcher.memory_gib_per_device",
    )
    check_container(run)
    check_plain(run.sweep_folder.absolute())
    return prepared


def check_plain(folder: Path) -> None:
    """Refuse a folder whose name the shell would read as a new line, or Slurm as a pattern such as %j."""
    odd = next((character for character in str(folder) if character in "%\\" or not character.isprintable()), None)
    if odd is not None:
        raise ConfigError(f"results={str(folder)!r} has {odd!r}, which no path of a Slurm job may have: choose another")


def submit(prepared: Sequence[Prepared], options: SubmitOptions, say: Callable[[str], None]) -> list[Submission]:
    """Submit the missing runs and those to try again; returns the new submissions.

    Raises `ConfigError` if they could exceed `max_gpu_hours`, or if the cluster would refuse one of them, before
    anything is written, and `SchedulerError` where Slurm takes no more. Jobs that were submitted before stay, and are
    not submitted again.
    """
    sweep = prepared[0].planned.run.sweep_folder
    statuses, to_start = _to_start(prepared, options.retry, locked=False)  # before the lock, which makes a folder
    by = limits(prepared, statuses, to_start)
    wanted = job_groups(to_start, by)
    check_budget(wanted, options.max_gpu_hours)
    notes = require_accepted([group.job for group in wanted])
    for note in [*notes, *out_of_turn(wanted, repeats={item.planned.run.repeat for item in prepared})]:
        say(f"note: {note}")
    with record.lock(sweep):
        statuses, to_start = _to_start(prepared, options.retry, locked=True)
        if rest := not_submitted(statuses, options.retry):
            say(rest)
        groups = job_groups(to_start, limits(prepared, statuses, to_start, most_min=by.most_min))
        check_budget(groups, options.max_gpu_hours)
        submissions = []
        settings = scheduler.configuration(patient=True) if groups else {}
        waits_for: list[str] = []
        for _, shapes in groupby(in_turns(groups), key=attrgetter("number")):
            held: list[str] = []
            for turn in shapes:
                for submission in _submit_turn(sweep, turn, settings, say, after=waits_for):
                    submissions.append(submission)
                    held += [str(submission.job)] if holds_back(submission) else []
                    say(f"job {submission.job}: {count_of(len(submission.tasks), 'task')} of {turn.group.shape}")
            waits_for = held or waits_for  # those have waited for the arrays before them
    return submissions


def _to_start(
    prepared: Sequence[Prepared], retry: frozenset[str], *, locked: bool
) -> tuple[list[JobStatus], list[Prepared]]:
    """The statuses of the runs, and those that are to be submitted; writes nothing unless the sweep is `locked`.

    Raises `ConfigError` where one of them waits on another cluster, whose jobs can't be seen from here.
    """
    sweep, folders = prepared[0].planned.run.sweep_folder, [item.folder for item in prepared]
    looks = {sweep: list(zip(folders, states_of(folders), strict=True))}
    tracker = track({sweep: record.submissions(sweep)}, looks, locked=locked, writes=locked, patient=True)[sweep]
    statuses = [tracker.status(item.folder, run=item.planned.run) for item in prepared]
    if away := [status.elsewhere for status in statuses if status.elsewhere]:
        clusters = " and ".join(sorted(set(away)))
        raise ConfigError(
            f"{count_of(len(away), 'run')} of {sweep} went to the cluster {clusters}, whose jobs are known only there: "
            f"submit there, or `parallelbench cancel {shlex.quote(str(sweep))}` there first"
        )
    both = zip(prepared, statuses, strict=True)
    return statuses, [replace(item, found=status.state) for item, status in both if status.starts(retry)]


def limits(
    prepared: Sequence[Prepared],
    statuses: Sequence[JobStatus],
    to_start: Sequence[Prepared],
    *,
    most_min: Callable[[Site], int | None] | None = None,
) -> Limits:
    """What the time limits of the runs to start are chosen by; `statuses` are those of all that was asked for.

    `most_min`: what the cluster allows; None: it is asked.
    """
    if not to_start or slurm(to_start[0].planned.run).time_limit_min != "auto":
        return Limits()  # the times of thousands of runs are not read for nothing
    both = zip(prepared, statuses, strict=True)
    reached = {item.folder.path.name: status.reached_min for item, status in both if status.reached_min}
    known = Known.of(prepared, [status.state for status in statuses])
    return Limits(known, reached, most_min or known_cluster().most_min)


def not_submitted(statuses: Sequence[JobStatus], retry: frozenset[str]) -> str:
    """How many runs are not submitted and why, in one line; empty where all are."""
    rest = [status for status in statuses if not status.starts(retry)]
    kinds = Counter("done" if status.label == "ok" else status.label for status in rest)
    if not kinds:
        return ""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    failed = sorted({status.label for status in rest if status.state.unsuccessful and not status.live})
    again = f" (--retry {','.join(failed)} tries again)" if failed else ""
    needed = sorted({f"; {status.reason}" for status in rest if status.needs or status.elsewhere})
    return f"not submitted: {counts}{again}; {count_of(len(statuses) - len(rest), 'run')} to submit{''.join(needed)}"


def _submit_turn(
    sweep: Path, turn: Turn, settings: Mapping[str, str], say: Callable[[str], None], *, after: Sequence[str]
) -> Iterator[Submission]:
    """Submit arrays of the largest size that the cluster's settings allow; halve it if a user limit refuses them."""
    group = turn.group
    tasks, folders = group.tasks(), {item.folder.path.name: item for item in group.runs}
    size, done = min(len(tasks), scheduler.max_array_size(settings)), 0
    while done < len(tasks):
        taken, intents = tasks[done : done + size], Intents()
        if over := intents.write([folders[name] for task in taken for name in task]):
            say(f"not submitted: {count_of(len(over), 'run')} whose result has come in meanwhile")
        chunk = [rest for task in taken if (rest := [name for name in task if name not in over])]
        tasks[done : done + size] = chunk
        if not chunk:
            continue
        try:
            yield _submit_chunk(sweep, group, chunk, scheduler.cluster_name(settings), after)
        except SubmissionError as error:
            if error.why is not NoJob.LOST:
                intents.take_back()
            if size == 1 or error.why is not NoJob.LIMIT:
                whole = count_of(turn.whole, "task")
                text = f"{error} ({turn.before + done} of {whole} of this shape submitted)"
                raise SchedulerError(text) from None
            size = (min(size, len(chunk)) + 1) // 2
        else:
            done += len(chunk)


def _submit_chunk(
    sweep: Path, group: JobGroup, tasks: list[list[str]], cluster: str, after: Sequence[str]
) -> Submission:
    asked = group.submission(tasks, record.new_token())
    submission = msgspec.structs.replace(asked, cluster=cluster, after=list(after))
    path = _recorded(sweep, submission)
    try:
        number = sbatch(path, submission, group.shape)
    except SubmissionError as error:
        number = _found(sweep, submission, error)
        with record.private():
            job.leave_calls(path, msgspec.structs.replace(submission, job=number))
    submission = msgspec.structs.replace(submission, job=number)
    record.write(sweep, submission)
    return submission


def _recorded(sweep: Path, submission: Submission) -> Path:
    """Write the record before sbatch is called; raises `SubmissionError` where that fails, and leaves nothing."""
    try:
        return record.write(sweep, submission)
    except StorageError as error:
        record.withdraw(sweep, submission)
        raise SubmissionError(str(error), NoJob.NOT_REACHED) from None


def _found(sweep: Path, submission: Submission, error: SubmissionError) -> str:
    """The job of a submission whose answer was lost ("Socket timed out"): it may exist.

    Raises `error` where it does not. If it may still appear, the record stays, and a later query finds it.
    """
    refused = error.why is not NoJob.LOST
    try:
        asked = error.why is not NoJob.NOT_REACHED
        number = scheduler.named(submission.name, since=submission.created_at) if asked else None
    except SchedulerError:
        number, refused = None, False
    if number is not None:
        return number
    if not refused:
        raise SubmissionError(str(error), NoJob.LOST) from None
    record.withdraw(sweep, submission)
    raise error


def sbatch(path: Path, submission: Submission, shape: Shape) -> str:
    """One sbatch through submitit; returns the job's id. The pickles hold a function and a path, nothing else."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if not shutil.which("srun"):  # which submitit asks for, and the batch script calls
        raise SubmissionError(str(scheduler.no_program("srun")), NoJob.REFUSED)
    executor = _executor(job_of_runs(submission, shape, path.parent))
    quiet = contextlib.redirect_stderr(io.StringIO())
    with scheduler.clean_environment(), record.private(), quiet, time_limit() as exceeded:
        try:
            with storage_errors(path):
                jobs = executor.map_array(job.run_task, [str(path)] * len(submission.tasks))
        except StorageError as error:  # mostly before sbatch was called: its name tells whether there is a job
            raise SubmissionError(str(error), NoJob.REFUSED) from None
        except (FailedJobError, FailedSubmissionError) as error:
            raise no_answer() if exceeded.is_set() else scheduler.refusal(str(error)) from None
    return str(jobs[0].job_id).partition("_")[0]


def _executor(asked: Job) -> Any:
    from submitit.slurm.slurm import SlurmExecutor

    # Of the class itself, since submitit hands arrays to another executor than the one below.
    SlurmExecutor._get_job_id_from_submission_command = staticmethod(job_in)  # type: ignore[assignment]

    class Executor(SlurmExecutor):
        """Checks the folder's owner before anything in it is loaded."""

        @property
        def _submitit_command_str(self) -> str:
            return asked.command()

    executor = Executor(folder=asked.folder, max_num_timeout=asked.launcher.attempts)
    executor.update_parameters(**asked.batch())
    return executor


def job_in(answer: str) -> str:
    """The id of the job in sbatch's answer; a script in its place may have printed other lines, of other jobs, before.

    submitit would take the first number after "job". Its own error where there is no such line: the job may exist.
    """
    from submitit.core.utils import FailedSubmissionError

    found = re.findall(r"^Submitted batch job (\d+)", answer, re.MULTILINE)
    if not found:
        raise FailedSubmissionError(f'Could not make sense of sbatch output "{answer}"')
    return str(found[-1])


_WRITERS = 16


@dataclass
class Intents:
    """What one array's runs got written before Slurm was asked for it."""

    made: dict[str, tuple[RunFolder, Path | None]] = field(default_factory=dict)
    """Run → its folder, which was not there before, and where the result is that it had; None: it had none."""

    def write(self, items: Sequence[Prepared]) -> set[str]:
        """Write several at a time: each waits for the disk, or for a file server, longer than it computes.

        Returns the names of those that were overtaken, of which nothing is written. Where one can't be written, none
        stays.
        """
        try:
            with ThreadPoolExecutor(_WRITERS) as pool:
                written = list(pool.map(self._write, items))
        except BaseException:
            self.take_back()
            raise
        return {item.folder.path.name for item, done in zip(items, written, strict=True) if not done}

    def take_back(self) -> None:
        """Remove the folders of runs that have no jobs, and bring back the results that they had."""
        for folder, former in self.made.values():
            if untouched(folder):
                remove_intent(folder)
            if former is not None and not os.path.lexists(folder.path):
                with suppress(OSError):
                    os.rename(former, folder.path)

    def _write(self, item: Prepared) -> bool:
        if item.overtaken:
            return False
        folder = item.folder
        was_there, former = os.path.lexists(folder.path), item.put_aside()
        if former is not None or not was_there:
            self.made[folder.path.name] = (folder, former)  # before the write, which may fail half-way
        folder.write_intent(item.planned.run, item.planned.recorded)
        return True


_INTENT = {"config.yaml", "overrides.txt"}
"""All that a run consists of that was never begun."""


def untouched(folder: RunFolder) -> bool:
    """Whether a run's folder holds its intent and nothing else."""
    try:
        begun = set(os.listdir(folder.path)) - _INTENT
        return not begun or (begun == {"attempts"} and not os.listdir(folder.path / "attempts"))
    except OSError:
        return False


def remove_intent(folder: RunFolder) -> None:
    """Remove a run that was never begun; a folder that something else was put into stays.

    It is looked at once more under a name at which nobody begins it.
    """
    path = folder.path
    aside = path.with_name(f"{FORGOTTEN}-{uuid.uuid4().hex}.tmp")
    with suppress(OSError):
        if path.is_symlink():
            return
        os.rename(path, aside)
        if not untouched(RunFolder(aside)):
            os.rename(aside, path)
            return
        if os.path.lexists(path):  # somebody who knew its configuration has begun it, so this is needed there
            for name in sorted(_INTENT & set(os.listdir(aside)) - set(os.listdir(path))):
                os.rename(aside / name, path / name)
        shutil.rmtree(aside)


@contextmanager
def time_limit() -> Iterator[threading.Event]:
    """End an sbatch that takes longer than every command of Slurm's may; the event says whether that has happened."""
    exceeded = threading.Event()

    def end() -> None:
        exceeded.set()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == "sbatch":
                    # Itself first: a script in its place would go on where its child was ended, and say it is done.
                    for process in (child, *child.children(recursive=True)):
                        process.kill()

    timer = threading.Timer(scheduler.TIMEOUT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield exceeded
    finally:
        timer.cancel()


def no_answer() -> SubmissionError:
    """What is said of an sbatch that was ended: its job may exist all the same."""
    text = f"sbatch gave no answer within {scheduler.TIMEOUT_S:g} s: run the same command later"
    return SubmissionError(text, NoJob.LOST)
