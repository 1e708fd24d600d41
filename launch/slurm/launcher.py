"""`launcher=slurm`: runs as jobs of a cluster; what `plan` says of them, and how they are cancelled."""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import reduce
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from launch.known_times import Known
from launch.launcher import Launcher
from launch.slurm import cluster, errands, record, scheduler
from launch.slurm.cluster import ignored_variables, known_cluster
from launch.slurm.errands import report_states, reports
from launch.slurm.order import in_turns, interleaving, out_of_turn
from launch.slurm.queue import Tracker, track, used
from launch.slurm.record import FOLDER
from launch.slurm.sbatch import Hours, HoursExpected, job_groups
from launch.slurm.scheduler import NoSlurmError, SchedulerError
from launch.slurm.submit import device_type_of, limits, not_submitted, prepare_for_site, submit
from launch.slurm.time_limit import Limits
from launch.states import RunStatus, SweepStatus, resumption, states_of
from launch.sweep import one_run
from parallelbench.errors import ConfigError, StorageError, count_of, duration
from parallelbench.results.files import is_there
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from rich.console import Console

    from launch.known_times import Estimate
    from launch.launcher import Prepared, SubmitOptions
    from launch.slurm.cluster import Cluster
    from launch.slurm.queue import JobStatus
    from launch.slurm.record import Submission
    from launch.slurm.sbatch import JobGroup
    from launch.states import Look
    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig
    from parallelbench.results.folder import State


class OnSlurm(Launcher):
    """Slurm jobs: one array for each shape of job. Nothing stays running on the login node."""

    name, trains_here = "slurm", False

    def device_type(self, run: RunConfig) -> str:
        """The site's devices, unless the run chooses some."""
        return device_type_of(run)

    def prepare(self, planned: PlannedRun) -> Prepared:
        """Check a run as far as the login node can."""
        return prepare_for_site(planned)

    def submit(self, prepared: Sequence[Prepared], options: SubmitOptions, console: Console) -> int:
        """Queue the missing runs."""
        sweep = prepared[0].planned.run.sweep_folder

        def say(text: str) -> None:
            _print(console, text)

        submissions = submit(prepared, options, say)
        jobs = ", ".join(str(submission.job) for submission in submissions)
        line = f"submitted: {jobs}" if submissions else "nothing to submit"
        say(f"{line}; `parallelbench status {shlex.quote(str(sweep))}` shows each run")
        return 0

    def show_plan(
        self, prepared: Sequence[Prepared], states: Sequence[State], console: Console
    ) -> tuple[bool, list[bool]]:
        """Print batch scripts, hours and the cluster's refusals; runs with a job that waits or runs don't start."""
        statuses = _statuses(prepared, states)
        starts = [status.starts(frozenset()) for status in statuses]
        to_start, rest = list(compress(prepared, starts)), not_submitted(statuses, frozenset())
        cluster = known_cluster()
        by = limits(prepared, statuses, to_start, most_min=cluster.most_min)
        known = Known.of(prepared, states) if to_start and not by.known.count else by.known
        if rest:
            console.print(f"\n{rest}", markup=False, highlight=False)
        repeats = {item.planned.run.repeat for item in prepared}
        return _show_plan(job_groups(to_start, by), cluster, known, repeats, console), starts

    def wait_s(self, prepared: Prepared) -> float | None:
        """As Slurm expects (`sbatch --test-only`)."""
        cluster = known_cluster()
        (group,) = job_groups([prepared], Limits(most_min=cluster.most_min))
        return cluster.answer(group.job).wait_s

    def calibrate(self, prepared: Prepared, path: Path) -> None:
        """In a short job on the run's nodes."""
        errands.calibrate(prepared, path)


def submitted(sweep: Path) -> bool:
    """Whether runs of a sweep were submitted to Slurm."""
    return is_there(sweep / FOLDER)


def sweep_status(sweeps: Mapping[Path, Look]) -> SweepStatus:
    """The runs of submitted sweeps with their jobs, and the device-hours. One query for all sweeps."""
    trackers, trouble, without = _trackers(sweeps)
    runs: dict[RunFolder, RunStatus] = {}
    spent = Hours()
    away: Counter[str] = Counter()
    for sweep, members in sweeps.items():
        if (tracker := trackers.get(sweep)) is None:
            runs |= {folder: _unseen(state) for folder, state in members}
            continue
        statuses = {folder: tracker.status(folder, state) for folder, state in members}
        away.update(status.elsewhere for status in statuses.values() if status.elsewhere)
        shown = {folder: status.shown() for folder, status in statuses.items()}
        runs |= {folder: _hidden(each, trouble) if without else each for folder, each in shown.items()}
        for folder, _ in members:
            if submissions := [each for each, _ in tracker.jobs.get(folder.path.name, [])]:
                spent += used(submissions, folder.attempts())
    hours = f"{spent} used" if spent else ""
    report = report_states([job for sweep, tracker in trackers.items() for job in reports(sweep, tracker.queue)])
    return SweepStatus(runs, [line for line in (hours, *report, *_gone_to(away), trouble) if line])


def logs(run: RunFolder) -> list[Path]:
    """The output of a run's latest job that Slurm and submitit caught. Slurm is not queried."""
    sweep, latest = run.path.parent, _latest(run)
    if latest is None:
        return []
    submission, task = latest
    # The job of an interrupted submission is known only by the names of its logs.
    job = submission.job_of(task) or (f"*_{task}" if len(submission.tasks) > 1 else "*")
    return sorted(record.folder_of(sweep, submission.token).glob(f"{job}_*_log.out"))


def silence(run: RunFolder) -> str:
    """Why the latest job of a run can print nothing: its sweep was renamed. Empty where it has only not begun."""
    sweep, latest = run.path.parent, _latest(run)
    folder = record.folder_of(sweep, latest[0].token) if latest else sweep
    for script in folder.glob("*_submission.sh"):
        (flag,) = (line for line in script.read_text().splitlines() if line.startswith("#SBATCH --output="))
        submitted_to = Path(shlex.split(flag)[1].partition("=")[2]).parent
        if not (submitted_to.exists() and submitted_to.samefile(folder)):
            return (
                f"its sweep's folder was renamed after it was queued: the job looks for {submitted_to.parents[1]}; "
                f"rename it back before the job starts, or `parallelbench cancel {shlex.quote(str(sweep))}` and "
                "submit again"
            )
    return ""


def findings() -> Iterable[tuple[str, str]]:
    """(what, finding) pairs for `doctor`: the cluster's partitions and limits."""
    if scheduler.available():
        return cluster.findings()
    return [("Slurm", "no sbatch here: sweeps run with launcher=local")]


def site_findings(overrides: Sequence[str], extension: Extension) -> Iterable[tuple[str, str]]:
    """Whether the cluster takes a job of one device, and one of all devices of the nodes of the site in `overrides`."""
    run, cluster, untold = one_run(["launcher=slurm", *overrides], extension).run, known_cluster(), ""
    for devices in dict.fromkeys((1, run.site.devices_per_node)):
        whole = [f"devices={devices}", f"batch_size={devices}", f"strategy={'ddp' if devices > 1 else 'single'}"]
        planned = one_run(["launcher=slurm", "data=synthetic", *overrides, *whole], extension)
        (group,) = job_groups([prepare_for_site(planned)], Limits(most_min=cluster.most_min))
        answer = cluster.answer(group.job, untold=untold)
        untold = answer.untold
        found = [*answer.refusals, *answer.notes, cluster.unknown]
        took = f"the cluster takes it{f', and it {answer.start}' if answer.start else ''}"
        said = "; ".join(filter(None, found)) or took
        yield f"site={run.site.name}, {count_of(devices, 'device')}", f"{group.shape}: {said}"


def _print(console: Console, text: str) -> None:
    """A line as it is: paths may have brackets, which rich would take for markup, and commands are copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _trackers(sweeps: Mapping[Path, Look]) -> tuple[dict[Path, Tracker], str, bool]:
    """The jobs of sweeps; why not more is known, empty: nothing failed; and whether no Slurm is here."""
    records, trouble = {}, ""
    for sweep in sweeps:
        try:
            records[sweep] = record.submissions(sweep)
        except ConfigError as error:
            others = record.belongs_to_another(sweep)
            trouble = f"{sweep} was submitted by another user: who knows its jobs" if others else str(error)
    try:
        return track(records, sweeps), trouble, False
    except SchedulerError as error:
        unanswered = {sweep: Tracker.unanswered(submissions) for sweep, submissions in records.items()}
        return unanswered, str(error), isinstance(error, NoSlurmError)


def _hidden(status: RunStatus, why: str) -> RunStatus:
    """A run whose job nobody can know on this machine."""
    known = status.label != "unknown"
    return status if known else replace(status, reason=f"it may be queued, but {why}", hidden=True)


def _unseen(state: State) -> RunStatus:
    """A run whose jobs can't be known: it may be queued, where its folder says no more."""
    if state.state == "missing":
        return RunStatus(state, "unknown", "it may be queued: its submission can't be read", hidden=True)
    return RunStatus.of_folder(state)


def _gone_to(clusters: Counter[str]) -> Iterator[str]:
    """Lines about runs whose jobs other clusters may have; cluster → how many."""
    for name, count in sorted(clusters.items()):
        runs = f"{count_of(count, 'run')} went to the cluster {name}"
        yield f"{runs}, whose jobs are known only there: submit or cancel there"


def _latest(run: RunFolder) -> tuple[Submission, int] | None:
    """The latest submission of a run, and its task."""
    try:
        return Tracker.unanswered(record.submissions(run.path.parent)).of(run.path.name)
    except ConfigError:
        return None


def _show_plan(
    groups: Sequence[JobGroup], cluster: Cluster, known: Known, repeats: Collection[int], console: Console
) -> bool:
    """Print what is submitted; returns whether the cluster takes all jobs. `repeats`: of all that was asked for."""
    accepted = not scheduler.available() or bool(cluster.kinds)
    turns = in_turns(groups)
    answers = cluster.answers([group.job for group in groups])
    for shape, (group, answer) in enumerate(zip(groups, answers, strict=True)):
        lengths = _lengths([len(turn.group.tasks()) for turn in turns if turn.shape == shape], cluster.longest)
        in_turn = ", in turn with the other shapes" if sum(turn.shape == shape for turn in turns) > 1 else ""
        what = f"[bold]{_arrays(lengths)}[/] of {group.shape}{in_turn}"
        console.print(f"\n{what}: {_priced(group.expected_hours(known), group.most_in_words())}", soft_wrap=True)
        if group.limit.why:
            console.print(f"time limit {group.limit.minutes} min: {group.limit.why}", highlight=False, soft_wrap=True)
        if (waited_s := known.waits(group.takes)) is not None:
            console.print(f"jobs of this shape waited {_range(waited_s)}", highlight=False)
        accepted = accepted and not answer.refusals
        for refusal in answer.refusals:
            console.print(f"[red]refused by the cluster[/]: {escape(refusal)}")
        for note in answer.notes:
            console.print(f"[yellow]note[/]: {escape(note)}")
        if answer.start:
            console.print(answer.start, highlight=False)
        console.print(group.job.script(lengths[0]), style="dim", markup=False, highlight=False, soft_wrap=True)
    if turns_in_words := interleaving(groups):
        console.print(f"\ninterleaved: {turns_in_words}", highlight=False)
    for warning in filter(None, [*out_of_turn(groups, repeats=repeats), ignored_variables()]):
        console.print(f"[yellow]note[/]: {escape(warning)}", soft_wrap=True)
    most = sum((group.most_hours for group in groups), Hours())
    each = [hours for group in groups if (hours := group.expected_hours(known)) is not None]
    expected = reduce(HoursExpected.__add__, each) if each else None
    in_all = _priced(expected, f"{most} in all, if every attempt takes its whole time limit")
    console.print(f"\n{in_all}", highlight=False)
    if cluster.unknown:
        console.print(cluster.unknown, markup=False, highlight=False)
    return accepted


def _priced(expected: HoursExpected | None, most: str) -> str:
    """ "about 9.00 GPU-hours (6.00–14.00), at most 40.00 GPU-hours"; without what nobody knows yet."""
    return f"at most {most}" if expected is None else f"about {expected}, at most {most}"


def _range(time_s: Estimate) -> str:
    """ "12 min (3 min–40 min)"."""
    several = f" ({duration(time_s.low)}–{duration(time_s.high)})" if time_s.low < time_s.high else ""
    return f"{duration(time_s.middle)}{several}"


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


def cancel_sweeps(sweeps: Sequence[Path], console: Console) -> None:
    """End all jobs of sweeps, whether they run or wait, with one query and one command to Slurm."""
    with _locked_trackers(sweeps) as trackers:
        jobs = [job for tracker in trackers.values() for job in tracker.in_queue()]
        to_report = [job for sweep, tracker in trackers.items() for job in reports(sweep, tracker.queue)]
        unfinished = list(_unfinished(trackers))
        next_time = resumption(folder for folder, status in unfinished if status.queued is not None)
        if jobs or to_report:
            # A sweep is cancelled as a whole, so the ids of its arrays are enough.
            scheduler.tell(["scancel", *sorted({job.whole for job in (*jobs, *to_report)}, key=int)])
        for sweep, tracker in trackers.items():
            _tell_other_clusters(sweep, tracker, tracker.jobs)
    away = Counter(status.elsewhere for _, status in unfinished if status.elsewhere)
    jobless = sum(_is_jobless(each, tracker) for tracker in trackers.values() for each in tracker.submissions)
    also = " and the job that writes the report" if to_report else ""
    console.print(f"{count_of(len(jobs), 'job')}{also} cancelled; submitting again starts the missing runs{next_time}")
    if jobless:
        console.print(
            f"it is not known yet whether Slurm has {count_of(jobless, 'more array')}: cancel again in a minute",
            highlight=False,
        )
    for line in _gone_to(away):
        _print(console, line)


def _tell_other_clusters(sweep: Path, tracker: Tracker, runs: Iterable[str]) -> None:
    """Note in the records of this cluster's submissions that the jobs of these runs are over: others can't see that."""
    for submission in tracker.submissions:
        own = submission.cluster and submission.job is not None and not submission.is_elsewhere(tracker.here)
        if own and (noted := submission.with_cancelled(runs)) != submission:
            with suppress(StorageError):  # jobs end on a full disk, too
                record.write(sweep, noted)


def _unfinished(trackers: Mapping[Path, Tracker]) -> Iterator[tuple[RunFolder, JobStatus]]:
    """All runs that were submitted and are not done."""
    for sweep, tracker in trackers.items():
        folders = [RunFolder(sweep / name) for name in sorted(tracker.jobs)]
        for folder, state in zip(folders, states_of(folders), strict=True):
            if state.state != "done":
                yield folder, tracker.status(folder, state)


def cancel_runs(folders: Sequence[RunFolder], console: Console) -> None:
    """End the jobs of these runs only; raises `ConfigError` where a job works on other runs as well."""
    sweeps: dict[Path, list[RunFolder]] = {}
    for folder in folders:
        sweeps.setdefault(folder.path.parent, []).append(folder)
    with _locked_trackers(list(sweeps)) as trackers:
        found = {folder: _jobs(trackers[sweep], folder) for sweep, members in sweeps.items() for folder in members}
        next_time = resumption(folder for folder, jobs in found.items() if jobs)
        jobs = [job for each in found.values() for job in each]
        if jobs:
            scheduler.tell(["scancel", *jobs])
        for sweep, members in sweeps.items():
            _tell_other_clusters(sweep, trackers[sweep], [folder.path.name for folder in members])
        unsure = {each for each in found if _jobless(trackers[each.path.parent], each)}
        away = {each: trackers[each.path.parent].status(each).elsewhere for each in found if not found[each]}
    for folder, other in away.items():
        name = folder.path.name
        if other:
            _print(console, f"{name} went to the cluster {other}: cancel it there")
        elif folder in unsure:
            _print(console, f"it is not known yet whether Slurm has a job of {name}: cancel again in a minute")
        else:
            _print(console, f"{name} has no job in the queue")
    console.print(f"{count_of(len(jobs), 'job')} cancelled; submitting again starts the missing runs{next_time}")


def _jobless(tracker: Tracker, folder: RunFolder) -> bool:
    """Whether the answer to a submission of the run was lost a moment ago."""
    return any(_is_jobless(submission, tracker) for submission, _ in tracker.jobs.get(folder.path.name, []))


def _is_jobless(submission: Submission, tracker: Tracker) -> bool:
    return submission.job is None and not submission.is_elsewhere(tracker.here)


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
def _locked_trackers(sweeps: Sequence[Path]) -> Iterator[Mapping[Path, Tracker]]:
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
