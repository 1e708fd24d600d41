"""What goes on until runs have ended: their output as it is printed, and their states as they change."""

from __future__ import annotations

import codecs
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.live import Live

from launch.launcher import RunStatus
from launch.states import glance
from launch.verbs.console import console, say
from launch.verbs.overview import CALM, overview, rendered
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from launch.launcher import Launcher
    from launch.verbs.overview import Overview
    from parallelbench.results.folder import RunFolder

PAUSE_S, MOST_PAUSE_S = 5.0, 60.0
"""Between two updates of states, at first and at most: each one queries the scheduler."""
POLL_S = 0.5
"""Between two looks at the files that runs and jobs print to."""
_CHUNK = 1 << 16
_NOT_FAILED = {*CALM, "running"}


def pauses() -> Iterator[float]:
    """Growing pauses, s."""
    pause_s = PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, MOST_PAUSE_S)


def watch(look: Callable[[], Overview], *, every: bool) -> int:
    """Show states until all runs have ended: a table on a terminal, else a line for each change, and the table last.

    Returns 1 if runs have failed, or can't be known from here: those are not waited for.
    """
    view, shown = look(), console()
    if not shown.is_terminal:
        view = _stream(view, look)
        shown.print(rendered(view, every=every), crop=False)
        return _ended(view)
    with Live(rendered(view, every=every), console=shown, auto_refresh=False) as live:
        for pause_s in pauses():
            if not view.live:
                break
            time.sleep(pause_s)
            view = look()
            live.update(rendered(view, every=every), refresh=True)
    return _ended(view)


def _stream(view: Overview, look: Callable[[], Overview]) -> Overview:
    before: dict[RunFolder, str] = {}
    for pause_s in pauses():
        for line in _changes(before, view):
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
        before = {folder: status.label for folder, status in view.runs.items()}
        if not view.live:
            break
        time.sleep(pause_s)
        view = look()
    return view


def _changes(before: dict[RunFolder, str], view: Overview) -> Iterator[str]:
    """A line for each run whose state is another than before, then the counts; at first the counts alone."""
    changed = [(folder, status) for folder, status in view.runs.items() if before.get(folder) != status.label]
    for folder, status in changed if before else ():
        reason = f": {status.reason}" if status.reason and status.label not in CALM else ""
        yield f"{folder.path.name} {before.get(folder, 'new')} → {status.label}{reason}"
    if changed:
        counts = Counter(status.label for status in view.runs.values())
        yield ", ".join(f"{count} {label}" for label, count in sorted(counts.items()))


def _ended(view: Overview) -> int:
    """Say what was not waited for; returns the exit code."""
    if hidden := sum(status.hidden for status in view.runs.values()):
        say(f"not waited for: {count_of(hidden, 'run')} that can't be known from here")
    return int(any(map(_failed, view.runs.values())))


def _failed(status: RunStatus) -> bool:
    """Also where its job ended before the run began."""
    return status.label not in _NOT_FAILED or (status.label == "missing" and bool(status.job))


@dataclass
class _Printed:
    """Files that grow, and how much of each was printed."""

    offsets: dict[Path, int] = field(default_factory=dict)
    decoders: dict[Path, codecs.IncrementalDecoder] = field(default_factory=dict)
    last: Path | None = None

    def print_new(self, files: Sequence[Path]) -> None:
        """Print what was added; a line names the file wherever it is another one than before."""
        for file in files:
            for text in self._added(file):
                if file != self.last:
                    print(f"==> {file} <==")
                    self.last = file
                print(text, end="", flush=True)

    def _added(self, file: Path) -> Iterator[str]:
        decoder = self.decoders.setdefault(file, codecs.getincrementaldecoder("utf-8")("replace"))
        try:
            with file.open("rb") as opened:
                opened.seek(self.offsets.get(file, 0))
                while chunk := opened.read(_CHUNK):
                    self.offsets[file] = opened.tell()
                    yield decoder.decode(chunk)
        except FileNotFoundError:
            return


def follow(run: RunFolder, files: Callable[[], Sequence[Path]], launchers: Sequence[Launcher]) -> int:
    """Print a run's output as it comes, until the run has ended; returns 1 if it has failed.

    The files are looked at twice a second, the scheduler after growing pauses, and only while no attempt is going on.
    """
    printed, asking, ask_at, said = _Printed(), pauses(), 0.0, ""
    while True:
        files_before, state = files(), glance(run)
        status = RunStatus.of_folder(state)
        if state.state not in ("running", "done") and time.monotonic() >= ask_at:
            status = overview([(run, state)], launchers).runs[run]
            ask_at = time.monotonic() + next(asking)
            if status.label in ("queued", "unknown") and status.reason != said:
                said = status.reason
                say(f"{status.label}: {status.reason}")
            live = status.live
        else:
            live = state.state != "done"
        # What was printed before its end was seen is in these files.
        printed.print_new(list(dict.fromkeys([*files_before, *files()])))
        if not live:
            break
        time.sleep(POLL_S)
    say(f"{run.path.name}: {status.label}{f': {status.reason}' if status.reason else ''}")
    return int(_failed(status))
