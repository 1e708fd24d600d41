"""`prune`: show what nothing needs any more below a folder, and remove it where that is said."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.markup import escape

from launch.launcher import all_launchers, states_below
from launch.leftovers import stale
from launch.verbs.console import console, existing, listing, say
from launch.verbs.status import overview
from parallelbench.errors import ConfigError, count_of
from parallelbench.results.folder import find_runs, no_runs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from launch.launcher import Launcher
    from launch.sweep.compose import Extension


def prune(folder: str, extension: Extension, *, yes: bool) -> int:
    """List stale folders; `yes`: remove them. Returns 1 if some could not be removed."""
    root, launchers = existing(folder), all_launchers(extension.plugin)
    with ExitStack() as held:
        sweeps = sorted({run.path.absolute().parent for run in find_runs(root)}) if yes else []
        for launcher in launchers:  # from the look to the removal, nobody queues what is found
            held.enter_context(launcher.holding([sweep for sweep in sweeps if launcher.submitted(sweep)]))
        return _prune(root, folder, launchers, yes=yes)


def _prune(root: Path, folder: str, launchers: Sequence[Launcher], *, yes: bool) -> int:
    """`folder` is the root as the user has named it."""
    runs = states_below(root)
    if not runs:
        raise ConfigError(no_runs(root))
    view = overview(runs, launchers)
    found = list(stale(view.runs))
    for note in view.notes:
        say(note)
    if not found:
        say("nothing to prune: no stale folder is older than 10 minutes")
        return 0
    rows = [(escape(str(each.path)), _megabytes(each.size_bytes), escape(each.what)) for each in found]
    console().print(listing(("folder", "size", "why"), rows), crop=False)
    counted = f"{count_of(len(found), 'folder')}, {_megabytes(sum(each.size_bytes for each in found))}"
    if not yes:
        say(f"{counted}; `parallelbench prune {shlex.quote(folder)} --yes` removes them")
        return 0
    stayed = [each.path for each in found if not each.remove()]
    say(f"{counted}; removed" if not stayed else f"{len(stayed)} of {counted} could not be removed, first {stayed[0]}")
    return int(bool(stayed))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
