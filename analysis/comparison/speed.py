"""Verdicts on speed: faster, slower, indistinguishable, or the reason for none."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from analysis.stats import error_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from analysis.stats import Ratio


class SpeedVerdict(StrEnum):
    """How the speed of one side compares with that of the other."""

    BASELINE = "baseline"
    FASTER = "faster"
    SLOWER = "slower"
    INDISTINGUISHABLE = "indistinguishable"
    TOO_FEW = "too few repeats"
    NO_PAIR = "no repeat in common"
    NOT_INTERLEAVED = "not interleaved"
    NOT_COMPARABLE = "not comparable"
    DISTURBED = "disturbed"
    NO_STEADY_EPOCH = "no steady epoch"
    INCOMPLETE = "not all have a time"


def of_speed(ratio: Ratio | None) -> SpeedVerdict:
    """The verdict on a ratio of speeds: indistinguishable where its interval holds 1. None: no repeat was paired."""
    if ratio is None:
        return SpeedVerdict.NO_PAIR
    if ratio.low is None or ratio.high is None:
        return SpeedVerdict.NOT_INTERLEAVED if ratio.is_apart else SpeedVerdict.TOO_FEW
    if ratio.low <= 1 <= ratio.high:
        return SpeedVerdict.INDISTINGUISHABLE
    return SpeedVerdict.FASTER if ratio.low > 1 else SpeedVerdict.SLOWER


def of_several(ratios: Iterable[Ratio | None]) -> float:
    """The error of each interval where several are looked at together (`analysis.stats.error_of_each`)."""
    known = [ratio for ratio in ratios if ratio is not None and ratio.low is not None]
    return error_of_each([ratio.differs_from_1 for ratio in known])


def of_time(ratio: Ratio | None) -> SpeedVerdict:
    """The verdict on a ratio of times, which is above 1 where a side is slower."""
    opposite = {SpeedVerdict.FASTER: SpeedVerdict.SLOWER, SpeedVerdict.SLOWER: SpeedVerdict.FASTER}
    verdict = of_speed(ratio)
    return opposite.get(verdict, verdict)
