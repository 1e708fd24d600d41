"""The state of every run below a folder, as a table."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from launch.launcher import RunStatus
from launch.sweep.varying import overrides_of, varying
from launch.verbs.listing import listing
from parallelbench.errors import count_of, duration
from parallelbench.results.folder import is_configuration_of_run
from parallelbench.results.journal import read_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from launch.launcher import Launcher
    from launch.states import Look
    from parallelbench.results.folder import RunFolder, State

_ORDER = ("unknown", "running", "queued", "missing", "ok")
CALM = ("queued", "missing", "ok")
ALIKE = 20
"""More runs than this in one of these states share a row."""
_STYLES = {"ok": "green", "running": "cyan", "queued": "blue", "unknown": "yellow", "missing": "dim"}


@dataclass(frozen=True)
class Overview:
    """All runs below a folder, at one moment."""

    runs: Mapping[RunFolder, RunStatus]
    notes: Sequence[str] = ()
    """Lines of the launchers about all runs."""

    @property
    def live(self) -> bool:
        """Whether any run will go on without another submission."""
        return any(status.live for status in self.runs.values())


def overview(runs: Look, launchers: Iterable[Launcher]) -> Overview:
    """The runs as their folders and the launchers that they were submitted with describe them."""
    statuses = {folder: RunStatus.of_folder(state) for folder, state in runs}
    notes: list[str] = []
    sweeps = _by_sweep(runs)
    for launcher in launchers:
        submitted = {sweep: members for sweep, members in sweeps.items() if launcher.submitted(sweep)}
        if submitted:
            report = launcher.status(submitted)
            statuses |= report.runs
            notes += report.notes
    return Overview(statuses, notes)


def _by_sweep(runs: Look) -> dict[Path, list[tuple[RunFolder, State]]]:
    sweeps: dict[Path, list[tuple[RunFolder, State]]] = {}
    for folder, state in runs:
        sweeps.setdefault(folder.path.absolute().parent, []).append((folder, state))
    return sweeps


def rendered(view: Overview, *, every: bool = False) -> Group:
    """Counts and notes, then the runs, those that failed first: a terminal cuts off the end.

    More than `ALIKE` runs that are done, wait or have not begun share a row; `every`: each run has a row of its own.
    """
    counts = Counter(status.label for status in view.runs.values())
    lines = [", ".join(f"{count} {label}" for label, count in sorted(counts.items())), *view.notes]
    many = {label for label in CALM if counts[label] > ALIKE and not every}
    shown = {folder: status for folder, status in view.runs.items() if status.label not in many}
    with_jobs = any(status.job for status in view.runs.values())
    apart = _apart(list(view.runs)) if shown else {}
    columns = ("run", *(("varying",) if apart else ()), *(("job",) if with_jobs else ()), "attempt", "state", "reason")
    several = len({folder.path.parent for folder in view.runs}) > 1
    rows = [
        (
            _name(folder, several=several),
            *((escape(apart[folder]),) if apart else ()),
            *((status.job or "–",) if with_jobs else ()),
            str(status.state.attempt or "–"),
            styled(status.label),
            escape(status.reason or progress(folder, status) or _foreign(folder, status)),
        )
        for folder, status in sorted(shown.items(), key=lambda item: _rank(item[1].label))
    ]
    for label in sorted(many, key=_rank):
        reason = _most_common_reason(status for status in view.runs.values() if status.label == label)
        blank = ("–",) * (1 + bool(apart) + with_jobs)
        rows.append((count_of(counts[label], "run"), *blank, styled(label), escape(reason)))
    if many:
        lines.append("--all lists every run")
    return Group(*(Text(line) for line in lines), listing(columns, rows))


def _rank(label: str) -> int:
    """The place of a state in the table: states that need attention come first."""
    return _ORDER.index(label) if label in _ORDER else -1


def _apart(folders: Sequence[RunFolder]) -> dict[RunFolder, str]:
    """Run → the overrides in which it differs from the others, as far as its name doesn't show them; empty: none."""
    overrides = varying([overrides_of(folder) for folder in folders])
    return dict(zip(folders, overrides, strict=True)) if any(overrides) else {}


def _name(folder: RunFolder, *, several: bool) -> str:
    """The run's folder, as `logs` takes it: below its sweep's folder where there are several sweeps."""
    path = folder.path
    return escape(f"{path.parent.name}/{path.name}" if several else path.name)


def _foreign(folder: RunFolder, status: RunStatus) -> str:
    """Why a folder that has not begun never will: its configuration is not that of a run."""
    foreign = (folder.path / "config.yaml").exists() and not is_configuration_of_run(folder.path)
    return "its config.yaml is no run's" if status.label == "missing" and foreign else ""


def _most_common_reason(statuses: Iterable[RunStatus]) -> str:
    """Most common reason; runs that are done have none."""
    reasons = Counter(status.reason for status in statuses if status.state.state != "done" and status.reason)
    ((reason, count),) = reasons.most_common(1) or [("", 0)]
    return f"{reason} ({count} of them)" if len(reasons) > 1 else reason


def progress(folder: RunFolder, status: RunStatus) -> str:
    """The epoch of a running run, and about how long it will take."""
    if status.label != "running" or not (attempts := folder.attempts()):
        return ""
    total, began, rows = 0, 0.0, []
    for line in read_entries(attempts[-1].path / "journal-rank0.jsonl"):
        if line.get("event") == "phase" and "epochs" in line:
            total, began = line["epochs"], began or line["time"]
        elif line.get("table") == "epochs":
            rows.append((line["row"]["epoch"], line["row"]["finished_at"]))
    if not total:
        return "starting"
    # A resumed attempt's journal begins with the epochs of earlier ones, which say nothing of the time since it began.
    own = [(epoch, finished_at) for epoch, finished_at in rows if finished_at > began]
    if not own:
        return f"epoch {rows[-1][0] + 1 if rows else 1}/{total}"
    epoch, last = own[-1]
    left_s = (last - began) / len(own) * (total - epoch) - (time.time() - last)
    return f"epoch {epoch}/{total}, about {duration(max(0.0, left_s))} left"


def styled(label: str) -> str:
    """A state, coloured."""
    return f"[{_STYLES.get(label, 'red')}]{label}[/]"
