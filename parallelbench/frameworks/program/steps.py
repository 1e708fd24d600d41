"""The steps of a program's ranks, whatever tells them: times, and the windows that they are divided into."""

from __future__ import annotations

import bisect
import os
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from parallelbench.frameworks.program.child import Load
    from parallelbench.frameworks.program.journals import DeviceMemory


@dataclass
class RankSteps:
    """One rank: the ends of its steps, in order."""

    rank: int = 0
    local_rank: int = 0
    ends_at: list[float] = field(default_factory=list)
    """Unix times, s."""
    waits_s: list[float] = field(default_factory=list)
    """Time inside a DataLoader's `next` since the step before, of each step; empty: not known."""
    before_s: list[float] = field(default_factory=list)
    """Time from the step before to the first backward, of each step: waiting for data, and the forward pass."""
    device_s: Mapping[int, float] = field(default_factory=dict)
    """Step → the GPU's time from the end of the step before to its end, as far as that is known."""
    pid: int | None = None
    memory: list[DeviceMemory] = field(default_factory=list)
    """Peaks on its GPUs."""
    cores: list[int] = field(default_factory=list)
    """Those that it may use."""


class Window(NamedTuple):
    """The steps after `first` up to `last`: from the end of the one to the end of the other. Steps count from 1."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first


def windows(steps: int, *, warmup: int, parts: int) -> list[Window]:
    """The warm-up, and `parts` windows of equally many steps after it; a rest at the end is left out.

    The first step has no start that anybody could see, so the warm-up begins at its end.
    """
    each = (steps - warmup) // parts
    edges = [warmup + part * each for part in range(parts + 1)]
    return [Window(1, warmup), *(Window(first, last) for first, last in pairwise(edges))]


def durations(rank: RankSteps, window: Window) -> list[float]:
    """Of each step of a window, s: on the GPU where that is known of all, else from host's end to host's end.

    A host that never waits launches steps long before the GPU takes them.
    """
    steps = range(window.first + 1, window.last + 1)
    if rank.device_s and all(step in rank.device_s for step in steps):
        return [rank.device_s[step] for step in steps]
    return [after - before for before, after in pairwise(rank.ends_at[window.first - 1 : window.last])]


def between(loads: Sequence[Load], start: float, end: float) -> tuple[float | None, float | None, dict[int, float]]:
    """Busy and own processor time, and that of each process, between two moments: s.

    Looks lie up to half a second apart: on the straight line between the two around each edge.
    """
    if len(loads) < 2 or loads[0].at > start or loads[-1].at < end:
        return None, None, {}
    times = [each.at for each in loads]

    def at(moment: float, values: Sequence[float]) -> float:
        after = min(max(1, bisect.bisect_left(times, moment)), len(times) - 1)
        share = (moment - times[after - 1]) / max(1e-9, times[after] - times[after - 1])
        return values[after - 1] + share * (values[after] - values[after - 1])

    busy = [each.busy_s for each in loads]
    known = [value for value in busy if value is not None]
    own = [each.own_s for each in loads]
    of_each = {}
    for pid in loads[min(bisect.bisect_left(times, end), len(loads) - 1)].processes:
        spent = [seen.processes[pid].time_s if pid in seen.processes else 0.0 for seen in loads]
        of_each[pid] = at(end, spent) - at(start, spent)
    busy_s = at(end, known) - at(start, known) if len(known) == len(busy) else None
    return busy_s, at(end, own) - at(start, own), of_each


class Output:
    """What the program prints: steps, losses and rates by the user's patterns, each with the time of its arrival."""

    def __init__(self, *, step: str | None, loss: str | None, rate: str | None) -> None:
        self._step, self._loss, self._rate = (re.compile(each) if each else None for each in (step, loss, rate))
        self.steps_at: list[float] = []
        self.losses: list[tuple[float, float]] = []
        """Unix time and value."""
        self.rates: list[tuple[float, float]] = []
        """Likewise."""
        self._last: deque[str] = deque(maxlen=200)

    def line(self, at: float, text: str) -> None:
        """Take a line that came at this time."""
        self._last.append(text)
        if self._step is not None and self._step.search(text):
            self.steps_at.append(at)
        for pattern, found in ((self._loss, self.losses), (self._rate, self.rates)):
            if pattern is not None and (match := pattern.search(text)):
                with suppress(ValueError, TypeError):
                    found.append((at, float(match[1].replace(",", ""))))

    @property
    def last_words(self) -> str:
        """The last exception that was printed, or the last line: launchers print more after what their ranks raise."""
        lines = [line.strip() for line in self._last if line.strip()]
        raised = [line for line in lines if _RAISED.search(line) and not _OF_LAUNCHERS.search(line)]
        words = raised or lines
        return words[-1][:_MOST_WORDS] if words else ""


_RAISED = re.compile(r"^(\[[^]]*\]:?\s*)?[\w.]*(Error|Exception)\b.*:|: error: |out of memory", re.IGNORECASE)
"""torchrun writes `[rank1]:` before what a rank prints; argparse ends a program with `train.py: error: …`."""
_OF_LAUNCHERS = re.compile(r"torch\.distributed\.elastic|ChildFailedError|CalledProcessError")
"""That a rank has failed, not why."""
_MOST_WORDS = 300


class Marks:
    """A file that takes marks: each line that any process of the program writes to it is the end of a step.

    The line may begin with the rank; rank 0 where it doesn't.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path
        # Open for writing, too: else a writer that closes it ends the reading, and one that comes first waits.
        self._reading = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._held = b""

    def fileno(self) -> int:
        """What can be read once there is a mark."""
        return self._reading

    def take(self) -> list[int]:
        """The ranks of the marks since the last call, in order."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._reading, 65_536):
                self._held += chunk
        *lines, self._held = self._held.split(b"\n")
        return [int(line.split()[0]) if line.split()[:1] and line.split()[0].isdigit() else 0 for line in lines]

    def close(self) -> None:
        """Close and remove it: whoever read the folder later would wait for a writer."""
        os.close(self._reading)
        self._path.unlink()


def curve(losses: Sequence[tuple[float, float]], rank: RankSteps, window: Window) -> list[dict[str, Any]]:
    """Rows of `losses`, but for the epoch: printed losses of a window, each at the step that ended last before it."""
    rows: dict[int, dict[str, Any]] = {}
    for at, loss in losses:
        step = bisect.bisect_right(rank.ends_at, at)
        if window.first < step <= window.last:
            within = step - window.first
            rows[within] = {"step": within, "steps": 1, "train_loss": loss}
    return list(rows.values())
