"""The state of every run below a folder, with what Slurm does about it, as a table."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from launch.listing import MANY, listing
from launch.slurm.queue import RunStatus, Tracker, track
from launch.slurm.record import FOLDER as SUBMISSIONS
from launch.slurm.record import submissions
from launch.slurm.scheduler import SchedulerError
from launch.slurm.shape import most_seconds
from parallelbench.attempt import HEARTBEAT_S
from parallelbench.errors import ConfigError
from parallelbench.journal import read_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from launch.slurm.queue import Look
    from parallelbench.attempt import Attempt
    from parallelbench.folder import RunFolder, State

_STYLES = {"ok": "green", "running": "cyan", "queued": "blue", "unknown": "yellow", "missing": "dim"}


@dataclass(frozen=True)
class Entry:
    """One run below the folder."""

    folder: RunFolder
    status: RunStatus


@dataclass(frozen=True)
class Overview:
    """All runs below a folder, at one moment."""

    entries: list[Entry]
    hours: str
    """Device-hours of the sweeps that went to Slurm; empty where none did."""
    trouble: str = ""
    """Why Slurm could not be asked; empty: it could, or need not be."""

    @property
    def live(self) -> bool:
        """Whether anything is still to come without another submission."""
        return any(entry.status.label in ("running", "queued", "unknown") for entry in self.entries)


def overview(runs: Sequence[tuple[RunFolder, State]]) -> Overview:
    """Look at the runs, and ask Slurm about all the sweeps that went there at once."""
    sweeps = _by_sweep(runs)
    trackers, trouble = _trackers(sweeps)
    entries: list[Entry] = []
    used = most = 0.0
    for sweep, members in sweeps.items():
        tracker = trackers.get(sweep, Tracker())
        live = {}
        for folder, state in members:
            entry = Entry(folder, tracker.status(folder, state))
            entries.append(entry)
            if found := tracker.of(folder.path.name):
                submission, task = found
                used += submission.devices * sum(map(seconds, folder.attempts())) / 3600
                if entry.status.live:
                    live[submission.token, task] = submission
        most += sum(submission.devices * most_seconds(submission.launcher) / 3600 for submission in live.values())
    hours = (
        f"device-hours: {used:.2f} used, at most {most:.1f} more by the limits of time and starts"
        if used or most
        else ""
    )
    return Overview(entries, hours, trouble)


def _trackers(sweeps: Mapping[Path, Look]) -> tuple[dict[Path, Tracker], str]:
    """The jobs of the sweeps that went to Slurm, and what is in the way of knowing more; empty: nothing is."""
    records, trouble = {}, ""
    for sweep in sweeps:
        if (sweep / SUBMISSIONS).is_dir():
            try:
                records[sweep] = submissions(sweep)
            except ConfigError as error:
                trouble = str(error)
    try:
        return track(records, sweeps), trouble
    except SchedulerError as error:
        return {sweep: Tracker.unanswered(found) for sweep, found in records.items()}, str(error)


def _by_sweep(runs: Sequence[tuple[RunFolder, State]]) -> dict[Path, list[tuple[RunFolder, State]]]:
    found: dict[Path, list[tuple[RunFolder, State]]] = {}
    for folder, state in runs:
        found.setdefault(folder.path.absolute().parent, []).append((folder, state))
    return found


def seconds(attempt: Attempt) -> float:
    """How long an attempt has taken so far, s: from its description to half a beat after its last heartbeat."""
    try:
        began = os.stat(attempt.path / "attempt.json").st_mtime
    except OSError:
        return 0.0
    try:
        # Not the outcome: it may have been written much later, by whoever found the attempt dead or its result whole.
        return max(0.0, os.stat(attempt.path / "heartbeat").st_mtime + HEARTBEAT_S / 2 - began)
    except OSError:
        return 0.0


def rendered(view: Overview) -> Group:
    """The table, the counts, and what is worth a word. Of many runs, only those that are not done are in the table."""
    shown = [entry for entry in view.entries if len(view.entries) <= MANY or entry.status.state.state != "done"]
    slurm = any(entry.status.job for entry in shown)
    columns = ("run", *(("job",) if slurm else ()), "attempt", "state", "reason")
    rows = []
    for entry in shown:
        status, name = entry.status, escape(entry.folder.path.name)
        job = (status.job or "–",) if slurm else ()
        number = str(status.state.attempt or "–")
        rows.append((name, *job, number, styled(status.label), escape(status.reason or progress(entry))))
    counts = Counter(entry.status.label for entry in view.entries)
    lines = [", ".join(f"{count} {label}" for label, count in sorted(counts.items()))]
    if hidden := len(view.entries) - len(shown):
        lines.insert(0, f"{hidden} run(s) that are done are not shown")
    lines += [line for line in (view.hours, view.trouble) if line]
    return Group(*([listing(columns, rows)] if shown else []), *(Text(line) for line in lines))


def progress(entry: Entry) -> str:
    """How far a running run is, and about how long it will take."""
    if entry.status.label != "running" or not (attempts := entry.folder.attempts()):
        return ""
    epochs = total = 0
    first = last = 0.0
    for line in read_entries(attempts[-1].path / "journal-rank0.jsonl"):
        if line.get("event") == "phase" and "epochs" in line:
            total = line["epochs"]
            first = first or line["time"]
        elif line.get("table") == "epochs":
            epochs, last = line["row"]["epoch"], line["row"]["finished_at"]
    if not total:
        return "starting"
    if not epochs or last <= first:
        return f"epoch 1/{total}"
    left_s = (last - first) / epochs * (total - epochs) - (time.time() - last)
    return f"epoch {epochs}/{total}, about {max(0.0, left_s) / 60:.1f} min left"


def styled(label: str) -> str:
    """A state, coloured."""
    return f"[{_STYLES.get(label, 'red')}]{label}[/]"
