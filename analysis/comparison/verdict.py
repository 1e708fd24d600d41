"""The words for how two speeds compare (faster, slower, equal, no difference shown), and when each is said."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.comparison.ratio import Ends, Ratio

EQUAL_WITHIN = 0.05
"""By how much one of two speeds that are called equal may exceed the other."""


class SpeedVerdict(StrEnum):
    """How the speed of one side compares with that of the other."""

    BASELINE = "baseline"
    FASTER = "faster"
    SLOWER = "slower"
    EQUAL = f"equal within {100 * EQUAL_WITHIN:.0f} %"
    NO_DIFFERENCE = "no difference shown"
    TOO_FEW = "too few repeats"
    NO_PAIR = "no repeat in common"
    NOT_INTERLEAVED = "not interleaved"
    NOT_COMPARABLE = "not comparable"
    DISTURBED = "disturbed"
    NO_STEADY_EPOCH = "no steady epoch"
    INCOMPLETE = "not all have a time"


def of_speed(ratio: Ratio | None) -> SpeedVerdict:
    """The verdict on a ratio of speeds. None: no repeat was paired."""
    if ratio is None:
        return SpeedVerdict.NO_PAIR
    if ratio.deciding is None:
        return SpeedVerdict.NOT_INTERLEAVED if ratio.is_apart else SpeedVerdict.TOO_FEW
    return of_ends(ratio.deciding)


def of_ends(ends: Ends) -> SpeedVerdict:
    """A difference where the interval leaves out 1, however small; else equal where it lies within the margin, which
    is the same for a ratio and its inverse.
    """
    low, high = ends
    if low > 1 or high < 1:
        return SpeedVerdict.FASTER if low > 1 else SpeedVerdict.SLOWER
    equal = low >= 1 / (1 + EQUAL_WITHIN) and high <= 1 + EQUAL_WITHIN
    return SpeedVerdict.EQUAL if equal else SpeedVerdict.NO_DIFFERENCE
