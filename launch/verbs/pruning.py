"""`prune`: show what nothing needs any more below a folder, and remove it where that is said."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.markup import escape

from launch.launcher import all_launchers
from launch.stale import stale
from launch.states import states_below
from launch.verbs.console import console, existing, say
from launch.verbs.listing import listing
from launch.verbs.overview import overview
from parallelbench.errors import ConfigError, count_of
from parallelbench.store.named_folder import no_runs

if TYPE_CHECKING:
    from launch.sweep.compose import Extension


def prune(folder: str, extension: Extension, *, yes: bool) -> int:
    """List stale folders; `yes`: remove them. Returns 1 if some could not be removed."""
    root = existing(folder)
    runs = states_below(root)
    if not runs:
        raise ConfigError(no_runs(root))
    view = overview(runs, all_launchers(extension.plugin))
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
