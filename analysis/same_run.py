"""Runs that lie in several folders: which one is read, and what is said of the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.text import listed
from parallelbench.results.files import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from analysis.compact import Found


@dataclass(frozen=True)
class Skipped:
    """A folder that was not read, and why."""

    path: Path
    reason: str
    is_run: bool = True
    """Whether it was made for a run, as far as its files tell."""
    twin: Path | None = None
    """The folder that was read instead: it holds the same run, or another measurement of it."""


def without_twins(found: list[Found]) -> tuple[set[Path], list[Skipped], set[Path]]:
    """The folders to read, those to skip, whose run lies in another folder, too, and the sweeps that measured it anew.

    The finished run is read; of several, the one in the largest sweep, which was measured in turn with most others.
    """
    if len({run.run_id for run in found}) == len(found):
        return {run.folder.path for run in found}, [], set()
    sizes = Counter(run.folder.path.parent for run in found)
    twins: dict[str, list[Found]] = defaultdict(list)
    for run in sorted(found, key=lambda run: (run.state != "done", -sizes[run.folder.path.parent])):
        twins[run.run_id].append(run)
    pairs = [
        (run, first)
        for first, *others in twins.values()
        for run in others
        if run.state == "done" or first.state != "done"  # a finished run has all that its unfinished twin has
    ]
    skipped = [_skipped(run, first, sizes) for run, first in pairs]
    homes = {run.folder.path.parent for run, first in pairs if _is_measured_anew(run, first)}
    return {first.folder.path for first, *_ in twins.values()}, skipped, homes


def _is_measured_anew(run: Found, first: Found) -> bool:
    """Whether a finished run is no copy of another one."""
    return run.state == "done" and _manifest(run) != _manifest(first)


def _skipped(run: Found, first: Found, sizes: Counter[Path]) -> Skipped:
    what, where = "the same run as", "name one folder to read this one"
    if _is_measured_anew(run, first):
        what = "another measurement of the same configuration and repeat as"
        where = "runs of its own sweep are compared with it, unless something excludes it"
    size, others = (sizes[each.folder.path.parent] for each in (first, run))
    if (first.state == "done") != (run.state == "done"):
        why = "it is finished"
    else:
        why = "its sweep has more runs" if size > others else "its folder comes first"
    path, twin = run.folder.path, first.folder.path
    of = f"in {twin.parent}" if twin.name == path.name else twin
    return Skipped(path, f"{what} {of} (equal run id), which is read instead, as {why}; {where}", twin=twin)


def _manifest(run: Found) -> bytes:
    return read_record(run.folder.result / "manifest.json")


def format_skipped(skipped: Iterable[Skipped], *, root: Path | None = None) -> list[str]:
    """The folders that were not read, each with the reason; those of one sweep and one reason together.

    `root`: what paths are relative to; None for none.
    """
    folders: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for each in skipped:
        folders[each.path.parent, each.reason].append(each.path)
    lines = []
    for (sweep, reason), paths in folders.items():
        whole = str(paths[0] if len(paths) == 1 else sweep)
        shown = whole.removeprefix(f"{root}/") if root else whole
        runs = f" ({len(paths)} folders: {listed([path.name for path in paths])})" if len(paths) > 1 else ""
        lines.append(f"Skipped: {shown}{runs}: {reason}.")
    return lines
