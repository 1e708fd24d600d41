"""The verbs that look after runs that were started: `status`, `cancel` and `logs`; and `doctor`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from launch.launcher import all_launchers
from launch.states import states_below
from launch.verbs.as_json import print_findings, print_status
from launch.verbs.console import console, existing
from launch.verbs.overview import overview, rendered
from parallelbench.errors import ConfigError
from parallelbench.store.folder import RunFolder
from parallelbench.store.named_folder import no_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from launch.states import Look
    from launch.sweep.compose import Extension

WATCH_PAUSE_S, MOST_PAUSE_S = 5.0, 60.0
"""Between two updates of `status --watch`, at first and at most: each one queries the scheduler."""


def status(folder: str, extension: Extension, *, watch: bool, every: bool, as_json: bool) -> int:
    """The state of the runs below a folder; `watch`: repeated until all have ended; `every`: a row for each run."""
    if as_json and watch:
        raise ConfigError("--json answers once, and --watch goes on: leave one of them out")
    root, pause_s, launchers = existing(folder), WATCH_PAUSE_S, all_launchers(extension.plugin)
    view = overview(_states(root), launchers)
    if as_json:
        print_status(view)
        return 0
    if not watch:
        console().print(rendered(view, every=every), crop=False)
        return 0
    with Live(rendered(view, every=every), console=console(), auto_refresh=False) as live:
        while view.live:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, MOST_PAUSE_S)
            view = overview(_states(root), launchers)
            live.update(rendered(view, every=every), refresh=True)
    return 0


def _states(root: Path) -> Look:
    states = states_below(root)
    if not states:
        raise ConfigError(no_runs(root))
    return states


def cancel(folder: str, extension: Extension) -> int:
    """End the jobs of the sweeps below a folder."""
    root, queued = existing(folder), False
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    for launcher in all_launchers(extension.plugin):
        if sweeps := [path for path in folders if launcher.submitted(path)]:
            launcher.cancel(sweeps, console())
            queued = True
    if not queued:
        raise ConfigError(f"{folder} holds no sweep with queued jobs: name a sweep's folder or one above it")
    return 0


def logs(folder: str, extension: Extension) -> int:
    """Print the output of a run's latest attempt and of its job."""
    path = existing(folder).absolute()
    if not (path / "config.yaml").exists():
        raise ConfigError(f"{folder} is no run's folder: `parallelbench status DIR` names those below DIR")
    files = [file for launcher in all_launchers(extension.plugin) for file in launcher.logs(path.parent, path.name)]
    attempts = RunFolder(path).attempts()
    files += sorted(attempts[-1].path.glob("log*.txt")) if attempts else []
    for file in files:
        print(f"==> {file} <==")
        print(file.read_text(errors="replace"))
    if not files:
        console().print("nothing was printed yet because the run has not begun")
    return 0


def forget(folders: Sequence[str], extension: Extension) -> int:
    """Move runs out of their sweeps, so that submitting measures them anew; prints where they are then."""
    runs = [RunFolder(existing(folder)) for folder in folders]
    launchers = all_launchers(extension.plugin)
    for run in runs:
        if not (run.path / "config.yaml").exists():
            raise ConfigError(f"{run.path} is no run's folder: `parallelbench status DIR` names those below DIR")
        sweep = run.path.parent
        look = {sweep: [(run, run.state())]}
        for launcher in (each for each in launchers if each.submitted(sweep)):
            known = launcher.status(look).runs.get(run)
            if known and known.label in ("queued", "running", "unknown"):
                raise ConfigError(f"{run.path} is {known.label}: `parallelbench cancel {sweep}` ends the sweep's jobs")
    for run in runs:
        print(run.forget())
    return 0


def doctor(overrides: Sequence[str], extension: Extension, *, bandwidth: bool, as_json: bool) -> int:
    """Print what this machine and its cluster have; `bandwidth`: print how fast the cluster's nodes exchange data."""
    from launch.verbs.doctor import findings

    launchers = all_launchers(extension.plugin)
    measured: Iterable[Iterable[tuple[str, str]]] = [findings(overrides, extension)]
    if bandwidth:
        measured = (launcher.bandwidth(overrides, extension) for launcher in launchers)
    if as_json:
        print_findings(row for rows in measured for row in rows)
        return 0
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for rows in measured:
        for name, text in rows:
            table.add_row(name, text)
    console().print(table)
    return 0
