"""What the verbs do that start, look after or prepare runs, short of the work itself."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from launch.states import begin_again, states_below
from launch.sweep import expand, one_run
from launch.verbs.console import console, existing, say
from launch.verbs.planning import is_slurm, preparer
from parallelbench.errors import ConfigError, choices
from parallelbench.store.attempt import OUTCOMES, PUBLISHED
from parallelbench.store.folder import RunFolder, instead_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from launch.local.local_launcher import Prepared
    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from parallelbench.store.folder import State

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
WATCH_PAUSE_S, MOST_PAUSE_S = 5.0, 60.0
"""Between two looks of `status --watch`: at first, and in the end. Every look is a query to the scheduler."""


def run(overrides: Sequence[str], extension: Extension) -> int:
    """One run, here, now, also where it failed before. The last line printed is the run folder."""
    planned = one_run(overrides, extension)
    if is_slurm(planned):
        raise ConfigError("launcher=slurm queues jobs, and `run` runs here, now: use `parallelbench submit`")
    prepared = _prepared(_tuned([planned]))
    folder = prepared[0].folder
    if (state := folder.state()).state == "done":
        console().print(f"this run is done already ({state.label}); repeat=1 measures it once more")
    code = _submit_here(prepared, retry=frozenset(OUTCOMES))
    print(folder.path)
    return code


def submit(overrides: Sequence[str], extension: Extension, *, retry: str | None, max_gpu_hours: float | None) -> int:
    """Run what is missing of a sweep, here or by Slurm."""
    again, plan = _outcomes(retry), _tuned(expand(overrides, extension))
    if is_slurm(plan[0]):
        from launch.slurm.slurm_launcher import submit_all

        return submit_all(_prepared(plan), console(), retry=again, max_gpu_hours=max_gpu_hours)
    if max_gpu_hours is not None:
        raise ConfigError("--max-gpu-hours is about queued jobs: use it with launcher=slurm")
    return _submit_here(_prepared(plan), retry=again)


def tune(overrides: Sequence[str], extension: Extension) -> int:
    """Try settings here, and keep what is fastest for `submit … tune=true` of the same sweep; trains nothing else."""
    from launch.tuning.choices import try_out_here, tuned

    plan = [replace(planned, tune=True) for planned in expand(overrides, extension)]
    _prepared(plan)
    tuned(plan, try_out_here, say, again=True)
    say(f"`parallelbench submit` with the same overrides and tune=true uses this for {len(plan)} run(s)")
    return 0


def _tuned(plan: list[PlannedRun]) -> list[PlannedRun]:
    """The plan with what a trial chooses, where it asks for one."""
    if not any(planned.tune for planned in plan):
        return plan
    from launch.tuning.choices import known, try_out_here, tuned

    if is_slurm(plan[0]):
        return known(plan)
    _prepared(plan)  # nothing is tried for what can't be done
    return tuned(plan, try_out_here, say)


def _prepared(plan: Sequence[PlannedRun]) -> list[Prepared]:
    from launch.local.local_launcher import prepare

    return prepare(plan, preparer(plan[0]))


def _outcomes(text: str | None) -> frozenset[str]:
    """The outcomes that `--retry` names."""
    names = text.split(",") if text else []
    valid = [name for name in OUTCOMES if name not in PUBLISHED]
    for name in names:
        if name not in valid:
            raise ConfigError(f"--retry {text}: {name} is no outcome to try again; {choices(name, valid)}")
    return frozenset(names)


def _submit_here(prepared: Sequence[Prepared], *, retry: frozenset[str]) -> int:
    from launch.attempt.supervise import Interrupted
    from launch.local.local_launcher import submit as submit_local
    from launch.local.progress import Display

    try:
        states = submit_local(prepared, Display(console()), retry=retry)
    except Interrupted as interruption:
        again = begin_again(item.folder for item in prepared if item.folder.state().label in ("killed", "running"))
        console().print(
            f"interrupted by {interruption}; the same command starts what is missing{again and f': {again}'}"
        )
        return EXIT_INTERRUPTED
    return 0 if all(state.label in ("ok", "running") for state in states) else EXIT_FAILED


def status(folder: str, *, watch: bool, every: bool) -> int:
    """The state of the runs below a folder; `watch`: again and again, until nothing is to come; `every`: all rows."""
    from launch.verbs.overview import overview, rendered

    root, pause_s = existing(folder), WATCH_PAUSE_S
    view = overview(_states(root))
    if not watch:
        console().print(rendered(view, every=every), crop=False)
        return 0
    with Live(rendered(view, every=every), console=console(), auto_refresh=False) as live:
        while view.live:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, MOST_PAUSE_S)
            view = overview(_states(root))
            live.update(rendered(view, every=every), refresh=True)
    return 0


def _states(root: Path) -> list[tuple[RunFolder, State]]:
    states = states_below(root)
    if not states:
        raise ConfigError(f"{root} holds no runs: {instead_of(root)}")
    return states


def cancel(folder: str) -> int:
    """End the jobs of the sweeps below a folder."""
    from launch.slurm.record import FOLDER
    from launch.slurm.slurm_launcher import cancel as cancel_jobs

    root = existing(folder)
    sweeps = [path.parent for pattern in (FOLDER, f"*/{FOLDER}") for path in sorted(root.glob(pattern))]
    if not sweeps:
        raise ConfigError(f"{folder} holds no sweep that went to Slurm: name a sweep's folder or one above it")
    return cancel_jobs(sweeps, console())


def logs(folder: str) -> int:
    """What the latest attempt of a run printed, and its job."""
    from launch.slurm.slurm_launcher import job_logs

    path = existing(folder).absolute()
    if not (path / "config.yaml").exists():
        raise ConfigError(f"{folder} is no run's folder: `parallelbench status DIR` names those below DIR")
    attempts = RunFolder(path).attempts()
    files = [*job_logs(path.parent, path.name), *(sorted(attempts[-1].path.glob("log*.txt")) if attempts else ())]
    for file in files:
        print(f"==> {file} <==")
        print(file.read_text(errors="replace"))
    if not files:
        console().print("nothing was printed yet: the run has not begun")
    return 0


def prepare_data(overrides: Sequence[str], extension: Extension) -> int:
    """Download and convert a data set once."""
    from parallelbench.data.prepare import prepare

    experiment = one_run(overrides, extension, instead="prepare one data set at a time").run
    folder = experiment.site.data_folder
    for part in (partial(prepare, experiment.data), partial(experiment.loader.prepare, experiment.data)):
        part(folder, progress=lambda text: console().print(text, highlight=False))
    return 0


def doctor(overrides: Sequence[str], *, bandwidth: bool) -> int:
    """What this machine and its cluster have; `bandwidth`: instead, how fast the cluster's nodes exchange data."""
    from launch.verbs import doctor as here

    found = here.findings()
    if bandwidth:
        from launch.slurm import node_bandwidth as between_nodes

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
    console().print(table)
    return 0
