"""The verbs that look after runs that were started: `status`, `cancel` and `logs`; and `doctor`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from launch.launcher import all_launchers
from launch.states import states_below
from launch.verbs.console import console, existing
from launch.verbs.overview import overview, rendered
from parallelbench.errors import ConfigError
from parallelbench.store.folder import RunFolder, instead_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from launch.states import Look
    from launch.sweep.compose import Extension

WATCH_PAUSE_S, MOST_PAUSE_S = 5.0, 60.0
"""Between two updates of `status --watch`, at first and at most: each one queries the scheduler."""


def status(folder: str, extension: Extension, *, watch: bool, every: bool) -> int:
    """The state of the runs below a folder; `watch`: repeated until all have ended; `every`: a row for each run."""
    root, pause_s, launchers = existing(folder), WATCH_PAUSE_S, all_launchers(extension.plugin)
    view = overview(_states(root), launchers)
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
        raise ConfigError(f"{root} holds no runs: {instead_of(root)}")
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
    """What the latest attempt of a run printed, and its job."""
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
        console().print("nothing was printed yet: the run has not begun")
    return 0


def doctor(overrides: Sequence[str], *, bandwidth: bool) -> int:
    """What this machine and its cluster have; `bandwidth`: instead, how fast the cluster's nodes exchange data."""
    from launch.verbs.doctor import findings

    if overrides and not bandwidth:
        raise ConfigError(f"doctor takes {overrides[0]} only with --bandwidth")
    measured = (launcher.bandwidth(overrides) for launcher in all_launchers()) if bandwidth else [findings()]
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for rows in measured:
        for name, text in rows:
            table.add_row(name, text)
    console().print(table)
    return 0
