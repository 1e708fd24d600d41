"""The verbs that look after runs that were started: `status`, `cancel` and `logs`; and `doctor`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.table import Table

from launch.launcher import all_launchers
from launch.states import states_below
from launch.verbs import following
from launch.verbs.as_json import print_findings, print_status
from launch.verbs.console import console, existing, say
from launch.verbs.overview import overview, rendered
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder, no_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from launch.states import Look
    from launch.sweep.compose import Extension
    from launch.verbs.overview import Overview


def status(folder: str, extension: Extension, *, watch: bool, every: bool, as_json: bool) -> int:
    """The state of the runs below a folder; `watch`: repeated until all have ended; `every`: a row for each run."""
    if as_json and watch:
        raise ConfigError("--json answers once, and --watch goes on: leave one of them out")
    root, launchers = existing(folder), all_launchers(extension.plugin)

    def look() -> Overview:
        return overview(_states(root), launchers)

    if watch:
        return following.watch(look, every=every)
    if as_json:
        print_status(look())
    else:
        console().print(rendered(look(), every=every), crop=False)
    return 0


def _states(root: Path) -> Look:
    states = states_below(root)
    if not states:
        raise ConfigError(no_runs(root))
    return states


def cancel(folders: Sequence[str], extension: Extension) -> int:
    """End the jobs of the sweeps below these folders, and of these runs."""
    roots, launchers = [existing(folder) for folder in folders], all_launchers(extension.plugin)
    runs = [RunFolder(root.absolute()) for root in roots if (root / "config.yaml").exists()]
    sweeps: list[Path] = []
    for root in (each for each in roots if RunFolder(each.absolute()) not in runs):
        below = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
        queued = [path for path in below if any(launcher.submitted(path) for launcher in launchers)]
        if not queued:
            raise ConfigError(
                f"{root} holds no sweep with queued jobs: name a sweep's folder or one above it, or a run"
            )
        sweeps += queued
    for run in runs:
        if not any(launcher.submitted(run.path.parent) for launcher in launchers):
            raise ConfigError(f"{run.path} was not queued: what trains here ends with Ctrl-C where it was started")
    for launcher in launchers:
        if mine := [path for path in dict.fromkeys(sweeps) if launcher.submitted(path)]:
            launcher.cancel(mine, console())
        if own := [run for run in dict.fromkeys(runs) if launcher.submitted(run.path.parent)]:
            launcher.cancel_runs(own, console())
    return 0


def logs(folder: str, extension: Extension, *, follow: bool) -> int:
    """Print the output of a run's latest attempt and of its job; `follow`: and what is added, until the run ends."""
    path, launchers = existing(folder).absolute(), all_launchers(extension.plugin)
    if not (path / "config.yaml").exists():
        raise ConfigError(f"{folder} is no run's folder: `parallelbench status DIR` names those below DIR")
    run = RunFolder(path)

    def files() -> list[Path]:
        attempts = run.attempts()
        of_jobs = [file for launcher in launchers for file in launcher.logs(path.parent, path.name)]
        return of_jobs + (sorted(attempts[-1].path.glob("log*.txt")) if attempts else [])

    if follow:
        return following.follow(run, files, launchers)
    found = files()
    for file in found:
        print(f"==> {file} <==")
        print(file.read_text(errors="replace"))
    if not found:
        why = filter(None, (launcher.silence(path.parent, path.name) for launcher in launchers))
        say(f"nothing was printed yet because {next(why, 'the run has not begun')}")
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
                ends = f"`parallelbench cancel {shlex.quote(str(sweep))}` ends the sweep's jobs"
                raise ConfigError(f"{run.path} is {known.label}: {ends}")
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
