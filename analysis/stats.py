"""Ratios that come with their uncertainty."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIDENCE = 0.95
RESAMPLES = 9999
ENOUGH_REPEATS = 6
"""From so many pairs on, the interval of a median can reach 95 % at all: see `best_coverage`."""

Verdict = Literal["above 1", "below 1", "indistinguishable", "one repeat"]


@dataclass(frozen=True)
class Ratio:
    """The ratios of paired repeats, their median, and its bootstrap interval (None with a single pair)."""

    pairs: tuple[tuple[int, float], ...]
    """(repeat, ratio) of every repeat that both sides have, in order."""
    median: float
    low: float | None
    high: float | None

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.pairs)

    @property
    def verdict(self) -> Verdict:
        """indistinguishable where the interval holds 1; without an interval there is nothing to say."""
        if self.low is None or self.high is None:
            return "one repeat"
        if self.low <= 1 <= self.high:
            return "indistinguishable"
        return "above 1" if self.low > 1 else "below 1"


def paired_ratio(numerator: Mapping[int, float | None], denominator: Mapping[int, float | None]) -> Ratio | None:
    """Median of numerator ÷ denominator over the repeats that both have measured; None where there is none.

    Both map repeat → value. A repeat shares its seed and its round of the sweep on both sides, so that what
    a round has in common (a warm machine, a busy neighbour) cancels out.
    """
    pairs = []
    for repeat in sorted(numerator.keys() & denominator.keys()):
        above, below = numerator[repeat], denominator[repeat]
        if above is not None and below:
            pairs.append((repeat, above / below))
    if not pairs:
        return None
    values = tuple(value for _, value in pairs)
    low, high = median_interval(values) or (None, None)
    return Ratio(tuple(pairs), float(np.median(values)), low, high)


@lru_cache(maxsize=4096)
def median_interval(values: tuple[float, ...]) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median (95 %, 9,999 resamples, seeded); None for a single value.

    The percentile method, since the bias-corrected one is undefined where all resampled medians agree.
    """
    if len(values) < 2:
        return None
    from scipy.stats import bootstrap  # half a second to import

    result = bootstrap(
        (np.asarray(values),),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def best_coverage(n: int) -> float:
    """The most often that any interval within the span of n values can hold the true median: 1 − 2^(1−n).

    A percentile bootstrap never leaves that span; so 2 repeats give at best 50 %, and only 6 exceed 95 %.
    """
    return 1 - 2.0 ** (1 - n)
