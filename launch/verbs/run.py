"""The verbs that start work: `run`, `submit` and `prepare`; changed sources of a plugin."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import psutil

from launch.attempt.processes import before_the_program, environment
from launch.checks import prepare_all
from launch.launcher import SubmitOptions, launcher_of
from launch.slurm.errands import queue_report
from launch.states import glance, states_below
from launch.sweep import expand, one_run
from launch.verbs.console import console, say
from launch.verbs.report import report
from launch.verbs.status import disturbed_below, require_ended
from parallelbench.config.build import COMPONENTS, PLUGIN_SOURCES, load_yaml, to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import ConfigError, choices, count_of, one_line
from parallelbench.frameworks.program import Program
from parallelbench.processes import unread_output
from parallelbench.results.attempt import DISTURBED, OUTCOMES, PUBLISHED
from parallelbench.results.folder import FORGOTTEN, RunFolder, find_runs
from parallelbench.training.checks import own_parts
from parallelbench.training.checks.own_parts import is_own

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from launch.launcher import Prepared
    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig


def run(overrides: Sequence[str], extension: Extension) -> int:
    """Train one run on this machine, also if it failed before. The last line printed is the run folder."""
    planned = one_run(overrides, extension)
    _tell_of_sources([planned])
    launcher = launcher_of(planned.run)
    if not launcher.trains_here:
        raise ConfigError(f"launcher={launcher.name} queues jobs, but `run` trains here: use `parallelbench submit`")
    prepared, again = _prepared([planned]), frozenset(OUTCOMES) - {*PUBLISHED}
    _check_own_parts(prepared, again)
    folder = prepared[0].folder
    if (state := folder.state()).state == "done":
        how = f"repeat=1 measures it again, `parallelbench forget {shlex.quote(str(folder.path))}` in its place"
        console().print(f"this run is done already ({state.label}); {how}")
    code = launcher.submit(prepared, SubmitOptions(retry=again), console())
    if code in (0, 1):
        _tell_of_disturbed(folder.path, extension)
    verb = "report" if code == 0 else "logs"
    say(f"next: parallelbench {verb} {shlex.quote(str(folder.path))}")
    print(folder.path)
    return code


def submit(
    overrides: Sequence[str],
    extension: Extension,
    *,
    retry: str | None,
    max_gpu_hours: float | None,
    then: str | None,
) -> int:
    """Train the missing runs of a sweep with its launcher; `then`: what follows once all are over (`report`).

    It goes on where nobody reads its output any more: runs are not lost with a pipe or a terminal.
    """
    with unread_output():
        return _submit(overrides, extension, SubmitOptions(_outcomes(retry), max_gpu_hours), then=then)


def _submit(overrides: Sequence[str], extension: Extension, options: SubmitOptions, *, then: str | None) -> int:
    plan = expand(overrides, extension, tell=say)
    launcher = launcher_of(plan[0].run)
    _tell_of_sources(plan)
    prepared = _prepared(plan)
    _check_own_parts(prepared, options.retry)
    folders = [item.folder for item in prepared] if options.retry & {*PUBLISHED, DISTURBED} else []
    measured = {folder: manifest for folder in folders if (manifest := folder.manifest())}
    with _disturbed_put_aside(list(measured), extension) if DISTURBED in options.retry else nullcontext():
        code = launcher.submit(prepared, options, console())
    if moved := [folder for folder, manifest in measured.items() if folder.manifest() != manifest]:
        say(f"{count_of(len(moved), 'earlier result')} moved to {moved[0].path.parent / FORGOTTEN}")
    if then and launcher.trains_here and code in (0, 1):  # not interrupted
        report(str(prepared[0].folder.path.parent), extension, out=None, target=None)
        return code
    if then and not launcher.trains_here:
        say(queue_report(prepared[0].planned.run))
    if launcher.trains_here and code in (0, 1):
        _tell_of_disturbed(prepared[0].folder.path.parent, extension, again=DISTURBED in options.retry)
    say(_next_command(prepared, code))
    return code


def _check_own_parts(prepared: Sequence[Prepared], retry: frozenset[str]) -> None:
    """Raise `ConfigError` where models and data of the user's own don't fit together, before any of their runs starts.

    That loads torch, in a process of its own. Runs that train in this process are not asked: they report a misfit
    themselves, at once.
    """
    asked: dict[str, RunConfig] = {}
    for item in prepared:
        run = item.planned.run
        if (is_own(run.model) or is_own(run.data)) and not run.launcher.in_this_process:
            plain = to_mapping(run)
            if glance(item.folder).starts(retry):
                asked.setdefault(canonical_json([plain["model"], plain["data"], run.global_batch_size]), run)
    runs = list(asked.values())
    if not runs or importlib.util.find_spec("torch") is None:  # which may be in the jobs' container alone
        return
    here = launcher_of(runs[0]).trains_here  # the nodes of queued runs may see files that this one does not
    try:
        made = subprocess.run(
            [sys.executable, "-m", own_parts.__name__, "data" if here else "models", *plugin_of(runs[0])],
            input=canonical_json([to_mapping(run) for run in runs]).encode(),
            capture_output=True,
            env=environment(runs[0], "cpu", os.environ),
            preexec_fn=before_the_program,
            check=False,
            timeout=_FIT_S,
        )
    except subprocess.TimeoutExpired:
        reason = f"it took longer than {_FIT_S:.0f} s"
    else:
        if made.returncode == 0:
            return
        if made.returncode == 2 and made.stdout:
            raise ConfigError(made.stdout.decode(errors="replace").strip())
        *_, last = made.stderr.decode(errors="replace").strip().rpartition("\n")
        reason = one_line(last) or f"exit code {made.returncode}"
    say(f"whether your model and data fit together could not be found out beforehand: {reason}")


def _tell_of_disturbed(folder: Path, extension: Extension, *, again: bool = False) -> None:
    """`again`: the runs have just been measured anew, since they had been disturbed."""
    disturbed = disturbed_below(folder, states_below(folder), extension.plugin)
    for line in disturbed.lines:
        say(line)
    if not disturbed.runs:
        return
    if busy := busy_programs():
        say(f"busy on this machine at this moment: {', '.join(busy)}")
    if again:
        say(
            "they were disturbed again: end what else runs here, leave it a core (fewer devices), or come at another "
            "time; losses, accuracies, bytes and peaks of memory hold as they are"
        )


_FIT_S = 120.0
"""How long a user's own code is waited for before its runs start all the same."""
_LOOK_S = 1.0
_BUSY_PERCENT = 10.0
"""Share of a core."""


def busy_programs() -> list[str]:
    """ "firefox (process 4711, 35 % of a core)": what else computes here at this moment, most first."""
    others = [each for each in psutil.process_iter(["name"]) if each.pid != os.getpid()]
    list(_shares(others))  # what follows is of the time since then
    time.sleep(_LOOK_S)
    busy = sorted(each for each in _shares(others) if each[0] >= _BUSY_PERCENT and each[1])
    return [f"{name} (process {pid}, {share:.0f} % of a core)" for share, name, pid in reversed(busy)]


def _shares(processes: Sequence[psutil.Process]) -> Iterator[tuple[float, str, int]]:
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            name = (process.info["name"] or "").encode(errors="replace").decode()  # it may be no UTF-8
            yield process.cpu_percent(), name, process.pid


@contextmanager
def _disturbed_put_aside(folders: Sequence[RunFolder], extension: Extension) -> Iterator[None]:
    """While the context lasts, the results of one sweep's disturbed runs are forgotten, so that they are run again.

    Afterwards those come back that were not submitted again, since the launcher refused them, say. Raises `ConfigError`
    where one of them has a job.
    """
    forgotten: dict[RunFolder, Path] = {}
    try:
        for folder in _disturbed(folders, extension):
            forgotten[folder] = folder.forget()
        yield
    finally:
        for folder, former in forgotten.items():
            if not os.path.lexists(folder.path):
                os.rename(former, folder.path)


def _disturbed(folders: Sequence[RunFolder], extension: Extension) -> list[RunFolder]:
    if not folders:
        return []
    from analysis import excluded, load  # which loads Polars

    gone = excluded(load(folders[0].path.parent, plugin=extension.plugin))
    run_ids = set(gone.filter(gone["exclusion"] == DISTURBED)["run_id"])
    found = [folder for folder in folders if (manifest := folder.manifest()) and manifest["run_id"] in run_ids]
    require_ended(found)
    return found


def _tell_of_sources(plan: Sequence[PlannedRun]) -> None:
    for line in notes_on_sources(plan):
        say(line)


def _next_command(prepared: Sequence[Prepared], code: int) -> str:
    """What to do once a sweep was submitted: look at it while it waits, or where a run failed; else report."""
    trains_here = launcher_of(prepared[0].planned.run).trains_here
    verb = "report" if code == 0 and trains_here else "status"
    line = f"next: parallelbench {verb} {shlex.quote(str(prepared[0].folder.path.parent))}"
    folders = [item.folder for item in prepared] if code and trains_here else []
    failed = next((folder for folder in folders if folder.state().state == "failed"), None)
    return line if failed is None else f"{line}, or parallelbench logs {shlex.quote(str(failed.path))}"


def prepare_data(overrides: Sequence[str], extension: Extension) -> int:
    """Download and convert a data set once."""
    from parallelbench.data.prepare import prepare

    planned = one_run(overrides, extension, instead="prepare one data set at a time").run
    prepare(planned.data, planned.site.data_folder, progress=lambda text: console().print(text, highlight=False))
    return 0


def _prepared(plan: Sequence[PlannedRun]) -> list[Prepared]:
    return prepare_all(plan, launcher_of(plan[0].run).prepare)


def _outcomes(text: str | None) -> frozenset[str]:
    """The outcomes that `--retry` names."""
    names = text.split(",") if text else []
    valid = [*(name for name in OUTCOMES if name != "ok"), DISTURBED]
    for name in names:
        if name not in valid:
            raise ConfigError(f"--retry {text}: {name} is no outcome to try again; {choices(name, valid)}")
    return frozenset(names)


def notes_on_sources(plan: Sequence[PlannedRun]) -> Iterator[str]:
    """A line for each sweep that holds runs of other versions of a plugin's or program's files: why some are new."""
    missing: dict[Path, list[RunConfig]] = {}
    programs: dict[tuple[Path, str], list[RunConfig]] = {}
    for run in (planned.run for planned in plan):
        if run.plugin_sources and not RunFolder.of(run).path.exists():
            missing.setdefault(run.sweep_folder, []).append(run)
        elif isinstance(run.strategy, Program):
            programs.setdefault((run.sweep_folder, run.model.name), []).append(run)
    for (sweep, name), runs in programs.items():
        yield from _of_program(sweep, name, runs)
    for sweep, runs in missing.items():
        now = runs[0].plugin_sources
        package = now.partition("@")[0]
        former = _former_sources(sweep, package)
        if former and former != now:
            yield (
                f"{count_of(len(runs), 'run')} {'is' if len(runs) == 1 else 'are'} new, since {package} has changed: "
                f"it is {now} now, and earlier runs in {sweep} are of {former}"
            )


def _of_program(sweep: Path, name: str, runs: Sequence[RunConfig]) -> Iterator[str]:
    """That runs are new because files of the program have changed since its latest run in the sweep's folder."""
    missing = [run for run in runs if not RunFolder.of(run).path.exists()]
    now = runs[0].strategy
    if not missing or not isinstance(now, Program):
        return
    there = [folder for folder in find_runs(sweep) if os.path.exists(folder.path / "config.yaml")]
    for folder in sorted(there, key=lambda each: os.path.getmtime(each.path / "config.yaml"), reverse=True):
        with suppress(ConfigError):
            run = folder.config()
            if run.model.name == name and isinstance(run.strategy, Program):
                if run.strategy.sources != now.sources:
                    changed = run.strategy.changes(now) or f"the program ({run.strategy.sources} then)"
                    new = count_of(len(missing), "run is", "runs are")
                    yield f"{new} new: {changed} changed since {folder.path.name}"
                return


def _former_sources(sweep: Path, package: str) -> str:
    """The sources that the latest run of a package in a sweep is of; empty: there is no such run."""
    latest, found = 0.0, ""
    for folder in find_runs(sweep):
        with suppress(OSError, ValueError, AttributeError):  # a configuration that can't be read
            path = folder.path / "config.yaml"
            plain, written_at = load_yaml(path.read_bytes()), path.stat().st_mtime
            nodes = (plain.get(key) for key in COMPONENTS)
            own = [str(node[PLUGIN_SOURCES]) for node in nodes if isinstance(node, dict) and PLUGIN_SOURCES in node]
            if written_at > latest and own and own[0].startswith(f"{package}@"):
                latest, found = written_at, own[0]
    return found
