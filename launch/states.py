"""The states of runs: what their folders say at a glance, and what a launcher adds to that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.errors import count_of
from parallelbench.results.folder import Manifest, RunFolder, State, find_runs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


@dataclass(frozen=True)
class RunStatus:
    """One run: the state of its folder, and what its launcher knows."""

    state: State
    label: str
    """An outcome, or running, queued, missing, unknown."""
    reason: str = ""
    """One line: why it waits, or how it ended."""
    job: str = ""
    """The job that works on it, or did; empty: none."""
    hidden: bool = False
    """It is unknown and stays so from here: another user's job, or on a machine without the scheduler."""

    @property
    def live(self) -> bool:
        """Whether it will go on without another submission, or may, and this is known sooner or later."""
        return self.label in ("running", "queued", "unknown") and not self.hidden

    @classmethod
    def of_folder(cls, state: State) -> RunStatus:
        """What the folder alone says."""
        reason = state.outcome.reason if state.outcome and state.label != "running" else ""
        return cls(state, state.label, reason)


@dataclass(frozen=True)
class SweepStatus:
    """Runs at one moment, as their folders and their launchers describe them."""

    runs: Mapping[RunFolder, RunStatus] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Lines about all of them: hours used, or why the scheduler gave no answer."""
    disturbed: Collection[RunFolder] | None = None
    """Those whose times count in no comparison; None: nobody has judged."""

    @property
    def live(self) -> bool:
        """Whether any run will go on without another submission."""
        return any(status.live for status in self.runs.values())


Look = Sequence[tuple["RunFolder", "State"]]
"""Runs of one sweep, whose folders have been read."""
_MANIFEST = msgspec.json.Decoder(Manifest)


def states_below(root: Path) -> list[tuple[RunFolder, State]]:
    """All runs below a folder and their states, at a glance; see `glance`."""
    return [(folder, glance(folder)) for folder in find_runs(root)]


def states_of(folders: Iterable[RunFolder]) -> list[State]:
    """The states of runs that may not have been begun, at a glance; looks once into every folder they belong in."""
    begun: dict[Path, set[str]] = {}
    states = []
    for folder in folders:
        sweep = folder.path.parent
        if sweep not in begun:
            begun[sweep] = _names(sweep)
        states.append(glance(folder) if folder.path.name in begun[sweep] else State("missing"))
    return states


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def resumption(folders: Iterable[RunFolder]) -> str:
    """How unfinished runs that have begun resume when they are submitted again, as the end of a sentence."""
    begun = [folder for folder in folders if folder.attempts()]
    kept = sum(map(saved, begun))
    parts = []
    if kept:
        parts.append(f"{count_of(kept, 'run')} {'resumes' if kept == 1 else 'resume'} after the last saved epoch")
    if lost := len(begun) - kept:
        parts.append(f"{count_of(lost, 'run')} {'starts' if lost == 1 else 'start'} over because nothing was saved")
    return f": {'; '.join(parts)}" if parts else ""


def saved(folder: RunFolder) -> bool:
    """Whether there is a checkpoint from which a later attempt can resume."""
    return any(folder.path.glob("checkpoints/*/manifest.json"))


def glance(folder: RunFolder) -> State:
    """`RunFolder.state`, but for published tables of the right sizes their content is not read.

    Enough for looking: tables are published whole, by one rename. Code that starts runs or reads results compares their
    sha256, and treats a changed table as damaged.
    """
    # Strings and plain calls: with paths, 10,000 runs would take three times as long.
    result = os.path.join(folder.path, "result")
    try:
        manifest = _MANIFEST.decode(Path(f"{result}/manifest.json").read_bytes())
        tables = manifest.tables
        whole = all(os.stat(f"{result}/{name}.parquet").st_size == table.bytes for name, table in tables.items())
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return folder.state()
    return State("done", manifest.outcome, manifest.attempt) if whole and "run" in tables else folder.state()
