"""Verdicts on speed: faster, slower, or why neither can be said."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from analysis.stats import Verdict

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


_OF_SPEED = {
    Verdict.ABOVE: SpeedVerdict.FASTER,
    Verdict.BELOW: SpeedVerdict.SLOWER,
    Verdict.INDISTINGUISHABLE: SpeedVerdict.INDISTINGUISHABLE,
    Verdict.TOO_FEW: SpeedVerdict.TOO_FEW,
}
_OF_TIME = _OF_SPEED | {Verdict.ABOVE: SpeedVerdict.SLOWER, Verdict.BELOW: SpeedVerdict.FASTER}


def of_speed(ratio: Ratio) -> SpeedVerdict:
    """The verdict on a ratio of speeds: above 1 is faster."""
    return _OF_SPEED[ratio.verdict]


def of_time(ratio: Ratio | None) -> SpeedVerdict:
    """The verdict on a ratio of times: below 1 is faster. None: no repeat was paired."""
    return _OF_TIME[ratio.verdict] if ratio else SpeedVerdict.TOO_FEW
