"""One sensor's samples over time, and their sums, integrals and gaps in a window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Sample = tuple[float, float]
"""Unix time in s, and a value."""


@dataclass(frozen=True)
class Window:
    """A stretch of time, Unix times in s."""

    start: float
    end: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end - self.start


def inside(samples: Sequence[Sample], window: Window) -> Sequence[Sample]:
    """The samples that were taken in the window."""
    return samples[bisect_left(samples, window.start, key=_time) : bisect_right(samples, window.end, key=_time)]


def enclosing(samples: Sequence[Sample], window: Window) -> Sequence[Sample]:
    """The samples in the window and the nearest one on each side; empty where one of those two is missing."""
    first = bisect_right(samples, window.start, key=_time) - 1
    last = bisect_left(samples, window.end, key=_time)
    return samples[first : last + 1] if first >= 0 and last < len(samples) else ()


def has_reset(samples: Sequence[Sample]) -> bool:
    """Whether a growing counter began anew, as the driver's does when it is reloaded."""
    return any(later[1] < earlier[1] for earlier, later in pairwise(samples))


def counted(samples: Sequence[Sample], window: Window) -> float | None:
    """How much a counter has grown in a window: E(end) − E(start).

    E is the counter on the straight line between the two samples around each edge. NVML's counts "since the driver was
    last reloaded" (nvmlDeviceGetTotalEnergyConsumption). Null where no sample lies on both sides of the window, or the
    counter was reset between them.
    """
    around = enclosing(samples, window)
    if not around or has_reset(around):
        return None
    return _at(around, window.end) - _at(around, window.start)


def integrated(samples: Sequence[Sample], window: Window) -> float | None:
    """The integral of a rate over a window, by the trapezoid rule ∑ (tᵢ₊₁ − tᵢ)(pᵢ + pᵢ₊₁)/2.

    The rate at the edges is interpolated. Null where no sample lies on both sides of the window.
    """
    around = enclosing(samples, window)
    if not around:
        return None
    edges = [(window.start, _at(around, window.start)), (window.end, _at(around, window.end))]
    within = [sample for sample in around if window.start < sample[0] < window.end]
    points = [edges[0], *within, edges[1]]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))


def longest_gap_s(samples: Sequence[Sample], window: Window) -> float:
    """The longest time between two samples in or around a window."""
    return max((b[0] - a[0] for a, b in pairwise(enclosing(samples, window))), default=0.0)


def _at(samples: Sequence[Sample], moment: float) -> float:
    """The value at a moment that the samples enclose, on the straight line between its neighbours."""
    right = bisect_left(samples, moment, key=_time)
    after = samples[right]
    if after[0] == moment or right == 0:
        return after[1]
    before = samples[right - 1]
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])


def _time(sample: Sample) -> float:
    return sample[0]
