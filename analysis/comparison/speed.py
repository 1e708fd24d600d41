"""Verdicts on speed: faster, slower, or why neither can be said."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.stats import Ratio


class SpeedVerdict(StrEnum):
    """How the speed of one side compares with that of the other."""

    BASELINE = "baseline"
    FASTER = "faster"
    SLOWER = "slower"
    INDISTINGUISHABLE = "indistinguishable"
    TOO_FEW = "too few repeats"
    NOT_COMPARABLE = "not comparable"
    NO_STEADY_EPOCH = "no steady epoch"
    INCOMPLETE = "not all have a time"


def of_speed(ratio: Ratio | None) -> SpeedVerdict:
    """The verdict on a ratio of speeds: indistinguishable where its interval holds 1. None: no repeat was paired."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return SpeedVerdict.TOO_FEW
    if ratio.low <= 1 <= ratio.high:
        return SpeedVerdict.INDISTINGUISHABLE
    return SpeedVerdict.FASTER if ratio.low > 1 else SpeedVerdict.SLOWER


def of_time(ratio: Ratio | None) -> SpeedVerdict:
    """The verdict on a ratio of times, which is above 1 where a side is slower."""
    opposite = {SpeedVerdict.FASTER: SpeedVerdict.SLOWER, SpeedVerdict.SLOWER: SpeedVerdict.FASTER}
    verdict = of_speed(ratio)
    return opposite.get(verdict, verdict)
