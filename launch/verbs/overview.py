"""The state of every run below a folder, with what Slurm does about it, as a table."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from launch.slurm.hours import Hours, left, used
from launch.slurm.queue import WAITING, RunStatus, Tracker, track
from launch.slurm.record import FOLDER as SUBMISSIONS
from launch.slurm.record import submissions
from launch.slurm.scheduler import SchedulerError
from launch.sweep.varying import overrides_of, varying
from launch.verbs.listing import listing
from parallelbench.errors import ConfigError
from parallelbench.store.journal import read_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from launch.slurm.queue import Look
    from launch.slurm.record import Submission
    from parallelbench.store.attempt import Attempt
    from parallelbench.store.folder import RunFolder, State

_ORDER = ("unknown", "running", "queued", "missing", "ok")
CALM = ("queued", "missing", "ok")
ALIKE = 20
"""More runs than this in one calm state are told in one row."""
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
    """Hours of the sweeps that went to Slurm; empty where none did."""
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
    past, to_come = Hours(), Hours()
    for sweep, members in sweeps.items():
        tracker = trackers.get(sweep, Tracker())
        found = [Entry(folder, tracker.status(folder, state)) for folder, state in members]
        entries += found
        for spent, more in _hours(tracker, found):
            past, to_come = past + spent, to_come + more
    told = f"{past} used, at most {to_come} more by the limits of time and starts" if past or to_come else ""
    return Overview(entries, told, trouble)


def _hours(tracker: Tracker, entries: Sequence[Entry]) -> Iterator[tuple[Hours, Hours]]:
    """(used, to come at most) of each run that went to Slurm, and of each job that is in the queue."""
    live: dict[tuple[str, int], tuple[Submission, list[Attempt], bool]] = {}
    for entry in entries:
        found = tracker.of(entry.folder.path.name)
        if found is None:
            continue
        (submission, task), attempts = found, entry.folder.attempts()
        yield used(submission, attempts), Hours()
        if entry.status.live or entry.status.label == "running":
            queued = entry.status.queued
            running = queued.state not in WAITING if queued is not None else entry.status.label == "running"
            live.setdefault((submission.token, task), (submission, [], running))[1].extend(attempts)
    for submission, attempts, running in live.values():
        yield Hours(), left(submission, attempts, running=running)


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


def rendered(view: Overview, *, every: bool = False) -> Group:
    """Counts, hours and trouble, then the runs, those that failed first: a terminal's end cuts off what matters least.

    Of more than `ALIKE` runs that are done, wait or have not begun, one row says how many; `every`: all are listed.
    """
    counts = Counter(entry.status.label for entry in view.entries)
    lines = [", ".join(f"{count} {label}" for label, count in sorted(counts.items()))]
    lines += [line for line in (view.hours, view.trouble) if line]
    many = {label for label in CALM if counts[label] > ALIKE and not every}
    entries = [entry for entry in view.entries if entry.status.label not in many]
    slurm = any(entry.status.job for entry in view.entries)
    apart = _apart(view.entries) if entries else {}
    columns = ("run", *(("varying",) if apart else ()), *(("job",) if slurm else ()), "attempt", "state", "reason")
    several = len({entry.folder.path.parent for entry in view.entries}) > 1
    rows = [
        (_name(entry, several=several), *((escape(apart[entry.folder]),) if apart else ()), *_row(entry, slurm=slurm))
        for entry in sorted(entries, key=lambda entry: _rank(entry.status.label))
    ]
    for label in sorted(many, key=_rank):
        reason = _most_common_reason(entry.status for entry in view.entries if entry.status.label == label)
        blank = ("–",) * (1 + bool(apart) + slurm)
        rows.append((f"{counts[label]} runs", *blank, styled(label), escape(reason)))
    if many:
        lines.append("--all lists every run")
    return Group(*(Text(line) for line in lines), listing(columns, rows))


def _rank(label: str) -> int:
    """Where in the table a state comes: what needs somebody first."""
    return _ORDER.index(label) if label in _ORDER else -1


def _apart(entries: Sequence[Entry]) -> dict[RunFolder, str]:
    """Run → what it differs in from the others, as far as its name doesn't say; empty where that says it all."""
    folders = [entry.folder for entry in entries]
    found = varying([overrides_of(folder) for folder in folders])
    return dict(zip(folders, found, strict=True)) if any(found) else {}


def _name(entry: Entry, *, several: bool) -> str:
    """The run's folder, below its sweep's where there are several sweeps: as `logs` wants to hear it."""
    path = entry.folder.path
    return escape(f"{path.parent.name}/{path.name}" if several else path.name)


def _row(entry: Entry, *, slurm: bool) -> tuple[str, ...]:
    status = entry.status
    job = (status.job or "–",) if slurm else ()
    number = str(status.state.attempt or "–")
    return (*job, number, styled(status.label), escape(status.reason or progress(entry) or _foreign(entry)))


def _foreign(entry: Entry) -> str:
    """Why nothing will come of a folder that has not begun: its configuration is somebody else's."""
    if entry.status.label != "missing":
        return ""
    try:
        ours = b"sweep_name:" in (entry.folder.path / "config.yaml").read_bytes()
    except OSError:
        return ""
    return "" if ours else "its config.yaml is no run's"


def _most_common_reason(statuses: Iterable[RunStatus]) -> str:
    """What is said of most of them; nothing of runs that are done."""
    found = Counter(status.reason for status in statuses if status.state.state != "done" and status.reason)
    ((reason, count),) = found.most_common(1) or [("", 0)]
    return f"{reason} ({count} of them)" if len(found) > 1 else reason


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
