"""What each verb of the program does, short of the work itself."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from launch.compose import group_choices
from launch.listing import listing
from launch.states import begin_again, states_below, states_of
from launch.sweep import expand, one_run
from parallelbench.attempt import OUTCOMES, PUBLISHED
from parallelbench.config import run_id, to_mapping
from parallelbench.errors import ConfigError, choices
from parallelbench.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launch.compose import Extension
    from launch.local import Prepared
    from launch.sweep import PlannedRun
    from parallelbench.folder import State

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
WATCH_PAUSE_S, MOST_PAUSE_S = 5.0, 60.0
"""Between two looks of `status --watch`: at first, and in the end. Every look is a query to the scheduler."""


def run(overrides: Sequence[str], extension: Extension) -> int:
    """One run, here, now, also where it failed before. The last line printed is the run folder."""
    planned = one_run(overrides, extension)
    if _is_slurm(planned):
        raise ConfigError("launcher=slurm queues jobs, and `run` runs here, now: use `parallelbench submit`")
    prepared = _prepared(_tuned([planned]))
    folder = prepared[0].folder
    if (state := folder.state()).state == "done":
        _console().print(f"this run is done already ({state.label}); repeat=1 measures it once more")
    code = _submit_here(prepared, retry=frozenset(OUTCOMES))
    print(folder.path)
    return code


def submit(overrides: Sequence[str], extension: Extension, *, retry: str | None, max_gpu_hours: float | None) -> int:
    """Run what is missing of a sweep, here or by Slurm."""
    again, plan = _outcomes(retry), _tuned(expand(overrides, extension))
    if _is_slurm(plan[0]):
        from launch.slurm.verbs import submit_all

        return submit_all(_prepared(plan), _console(), retry=again, max_gpu_hours=max_gpu_hours)
    if max_gpu_hours is not None:
        raise ConfigError("--max-gpu-hours is about queued jobs: use it with launcher=slurm")
    return _submit_here(_prepared(plan), retry=again)


def tune(overrides: Sequence[str], extension: Extension) -> int:
    """Try settings here, and keep what is fastest for `submit … tune=true` of the same sweep; runs nothing."""
    from launch.tuning import try_out_here, tuned

    plan = [replace(planned, tune=True) for planned in expand(overrides, extension)]
    _prepared(plan)
    tuned(plan, try_out_here, _say, again=True)
    _say(f"`parallelbench submit` with the same overrides and tune=true uses this for {len(plan)} run(s)")
    return 0


def _tuned(plan: list[PlannedRun]) -> list[PlannedRun]:
    """The plan with what a trial chooses, where it asks for one."""
    if not any(planned.tune for planned in plan):
        return plan
    from launch.tuning import known, try_out_here, tuned

    if _is_slurm(plan[0]):
        return known(plan)
    _prepared(plan)  # nothing is tried for what can't be done
    return tuned(plan, try_out_here, _say)


def _say(text: str) -> None:
    _console().print(text, highlight=False, markup=False, soft_wrap=True)


def _prepared(plan: Sequence[PlannedRun]) -> list[Prepared]:
    from launch.local import prepare

    return prepare(plan, _preparer(plan[0]))


def _preparer(planned: PlannedRun) -> Callable[[PlannedRun], Prepared]:
    """What checks a run for the place where it will train."""
    if _is_slurm(planned):
        from launch.slurm.submit import prepare_for_site

        return prepare_for_site
    from launch.local import prepare_here
    from parallelbench.devices import this_machine

    return partial(prepare_here, machine=this_machine())


def _is_slurm(planned: PlannedRun) -> bool:
    return planned.run.launcher.name == "slurm"


def _outcomes(text: str | None) -> frozenset[str]:
    """The outcomes that `--retry` names."""
    names = text.split(",") if text else []
    valid = [name for name in OUTCOMES if name not in PUBLISHED]
    for name in names:
        if name not in valid:
            raise ConfigError(f"--retry {text}: {name} is no outcome to try again; {choices(name, valid)}")
    return frozenset(names)


def _submit_here(prepared: Sequence[Prepared], *, retry: frozenset[str]) -> int:
    from launch.local import submit as submit_local
    from launch.progress import Display
    from launch.supervise import Interrupted

    try:
        states = submit_local(prepared, Display(_console()), retry=retry)
    except Interrupted as interruption:
        again = begin_again(item.folder for item in prepared if item.folder.state().label in ("killed", "running"))
        _console().print(
            f"interrupted by {interruption}; the same command starts what is missing{again and f': {again}'}"
        )
        return EXIT_INTERRUPTED
    return 0 if all(state.label in ("ok", "running") for state in states) else EXIT_FAILED


def show(overrides: Sequence[str], extension: Extension) -> int:
    """The resolved configuration of one run, its id, and the choices of each group."""
    import yaml

    from parallelbench.devices import this_machine

    (planned,) = _as_tuned([one_run(overrides, extension)])
    device_type = this_machine().device_type(planned.run.device)
    planned = replace(planned, run=msgspec.structs.replace(planned.run, device=device_type))
    print(yaml.safe_dump(to_mapping(planned.run), sort_keys=False), end="")
    print(f"\nrun id      {run_id(planned.run)}")
    print(f"run folder  {RunFolder.of(planned.run).path}\n")
    print("choices:")
    for group, names in group_choices(extension.conf).items():
        print(f"  {group:10} {' '.join(names)}")
    return 0


def plan(overrides: Sequence[str], extension: Extension) -> int:
    """Every run of a sweep, its resources, and its state; for Slurm also the batch scripts. Writes nothing."""
    runs = _as_tuned(expand(overrides, extension))
    checked = _checked(runs)
    prepared = [item for item in checked if not isinstance(item, ConfigError)]
    found = states_of(item.folder for item in prepared)
    states = iter(found)
    rows = []
    for planned, item in zip(runs, checked, strict=True):
        if isinstance(item, ConfigError):
            name, run, processes = RunFolder.of(planned.run).path.name, planned.run, "–"
            state = f"[red]refused[/]: {escape(str(item))}"
        else:
            name, run = item.folder.path.name, item.planned.run
            processes, state = str(run.strategy.processes(run, item.device_type)), _describe(next(states))
        rows.append((name, f"{run.devices} {run.device}", processes, str(run.nodes), str(run.epochs), state))
    _console().print(listing(("run", "devices", "processes", "nodes", "epochs", "state"), rows), crop=False)
    accepted = True
    if prepared and _is_slurm(runs[0]):
        from launch.slurm.verbs import show_plan

        accepted = show_plan(prepared, found, _console())
    return 0 if accepted and len(prepared) == len(runs) else 2


def _as_tuned(plan: list[PlannedRun]) -> list[PlannedRun]:
    """The plan with what was chosen before; says where nothing was yet."""
    if not any(planned.tune for planned in plan):
        return plan
    from launch.tuning import tuned, untried

    if waiting := untried(plan):
        who = (
            "`parallelbench tune`, on one of the cluster's nodes," if _is_slurm(plan[0]) else "a trial, when submitted,"
        )
        _say(f"tune=true: {who} is to choose settings for {waiting} of these runs; they are shown without")
    return tuned(plan, None, _say)


def _checked(runs: Sequence[PlannedRun]) -> list[Prepared | ConfigError]:
    """Each run, ready for the place where it will train, or why that can't be."""
    prepare_one = _preparer(runs[0])
    checked: list[Prepared | ConfigError] = []
    for planned in runs:
        try:
            checked.append(prepare_one(planned))
        except ConfigError as error:
            checked.append(error)
    return checked


def status(folder: str, *, watch: bool, every: bool) -> int:
    """The state of the runs below a folder; `watch`: again and again, until nothing is to come; `every`: all rows."""
    from launch.status import overview, rendered

    root, pause_s = _existing(folder), WATCH_PAUSE_S
    view = overview(_states(root))
    if not watch:
        _console().print(rendered(view, every=every), crop=False)
        return 0
    with Live(rendered(view, every=every), console=_console(), auto_refresh=False) as live:
        while view.live:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, MOST_PAUSE_S)
            view = overview(_states(root))
            live.update(rendered(view, every=every), refresh=True)
    return 0


def _states(root: Path) -> list[tuple[RunFolder, State]]:
    states = states_below(root)
    if not states:
        raise ConfigError(f"{root} holds no runs: name a results folder, a sweep's folder, or a run's")
    return states


def cancel(folder: str) -> int:
    """End the jobs of the sweeps below a folder."""
    from launch.slurm.record import FOLDER
    from launch.slurm.verbs import cancel as cancel_jobs

    root = _existing(folder)
    sweeps = [path.parent for pattern in (FOLDER, f"*/{FOLDER}") for path in sorted(root.glob(pattern))]
    if not sweeps:
        raise ConfigError(f"{folder} holds no sweep that went to Slurm: name a sweep's folder or one above it")
    return cancel_jobs(sweeps, _console())


def logs(folder: str) -> int:
    """What the latest attempt of a run printed, and its job."""
    from launch.slurm.verbs import job_logs

    path = _existing(folder).absolute()
    if not (path / "config.yaml").exists():
        raise ConfigError(f"{folder} is no run's folder: `parallelbench status DIR` names those below DIR")
    attempts = RunFolder(path).attempts()
    files = [*job_logs(path.parent, path.name), *(sorted(attempts[-1].path.glob("log*.txt")) if attempts else ())]
    for file in files:
        print(f"==> {file} <==")
        print(file.read_text(errors="replace"))
    if not files:
        _console().print("nothing was printed yet: the run has not begun")
    return 0


def report(folder: str, extension: Extension) -> int:
    """Write figures, tables and the page; print the summary and where the page is."""
    from analysis import load, summary_table, write_report

    root = _existing(folder)
    page = write_report(root, plugin=extension.plugin)
    _console().print(summary_table(load(root, plugin=extension.plugin)))
    print(page)
    return 0


def claims(folder: str, names: Sequence[str], extension: Extension, *, file: str | None) -> int:
    """What publications claim, held against the runs below a folder: all in one table, or the named ones in full."""
    from analysis import load
    from analysis.claims import Publication, chosen, judge_all
    from analysis.claims.table import details, findings_table

    root = _existing(folder)
    of = chosen([Publication.read(Path(file))] if file else None, names)
    runs = load(root, plugin=extension.plugin)
    if runs.run.is_empty():
        why = f" ({runs.skipped[0].path}: {runs.skipped[0].reason})" if runs.skipped else ""
        raise ConfigError(f"{folder} holds no readable run{why}: name a results folder, a sweep's folder, or a run's")
    findings = judge_all(runs, of)
    for shown in map(details, findings) if names else [findings_table(findings)]:
        _console().print(shown)
    for skipped in runs.skipped:
        _console().print(f"Skipped: {skipped.path}: {skipped.reason}.", markup=False, highlight=False)
    return 0


def compare(folders: Sequence[str], extension: Extension, *, by: str, across: str, fail_if_slower: str) -> int:
    """How the runs of a second folder, or with a second value of a key, do beside those of the first."""
    from launch import comparing

    existing = [str(_existing(folder)) for folder in folders]
    return comparing.compare(existing, extension, _console(), by=by, across=across, fail_if_slower=fail_if_slower)


def prepare_data(overrides: Sequence[str], extension: Extension) -> int:
    """Download and convert a data set once."""
    from parallelbench.data.prepare import prepare

    experiment = one_run(overrides, extension).run
    folder = experiment.site.data_folder
    for part in (partial(prepare, experiment.data), partial(experiment.loader.prepare, experiment.data)):
        part(folder, progress=lambda text: _console().print(text, highlight=False))
    return 0


def doctor(overrides: Sequence[str], *, bandwidth: bool) -> int:
    """What this machine and its cluster have; `bandwidth`: instead, how fast the cluster's nodes exchange data."""
    from launch import doctor as here

    found = here.findings()
    if bandwidth:
        from launch.slurm import bandwidth as between_nodes

        found = between_nodes.findings(
            one_run(["launcher=slurm", "strategy=ddp", "nodes=2", "devices=2", *overrides]).run
        )
    elif overrides:
        raise ConfigError(f"doctor takes {overrides[0]} only with --bandwidth")
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in found:
        table.add_row(name, text)
    _console().print(table)
    return 0


def _describe(state: State) -> str:
    from launch.status import styled

    reason = f": {escape(state.outcome.reason)}" if state.outcome and state.outcome.outcome != "ok" else ""
    again = ", will run again" if state.state == "failed" and state.to_run else ""
    return f"{styled(state.label)}{reason}{again}"


def _existing(folder: str) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{folder} is no folder: name a results folder, a sweep's folder, or a run's")
    return path


def _console() -> Console:
    # Piped output is not cut to the 80 columns that rich assumes without a terminal.
    return Console() if sys.stdout.isatty() else Console(width=160)
