"""How fast the second side of a pairing trains beside the first: the ratio, its verdict, or why there is none.

The one place where a verdict on a pairing is made: the summary, all pairs, the headline and `compare` ask for it here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from analysis.comparison.ratio import PER_EPOCH, of_several
from analysis.comparison.verdict import SpeedVerdict, of_speed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.comparison.pairing import Pairing
    from analysis.comparison.ratio import Ratio


@dataclass(frozen=True)
class Speed:
    """How many times as fast the second side trains."""

    ratio: Ratio | None
    """With the error of its verdict; None: not comparable, or no repeat in which both sides have a time."""
    lacks: SpeedVerdict | None = None
    """Why the ratio decides nothing; None: it says so itself."""
    untimed: tuple[int, ...] = ()
    """The sides (0, 1) that have pairs of repeats, but a time in none of them."""
    single_epoch: bool = False
    """Whether all runs of these sides trained one epoch only."""
    highest_repeat: int = -1
    """Of both sides, also of runs that don't count."""

    @property
    def verdict(self) -> SpeedVerdict:
        """How the second side compares with the first."""
        return self.lacks or of_speed(self.ratio)

    @property
    def pairs(self) -> int:
        """Repeats that were paired."""
        return self.ratio.n if self.ratio else 0

    @property
    def further_repeats(self) -> int | None:
        """How many more repeats of each side would decide where no difference is shown; None as in `Ratio`."""
        return self.ratio.further_repeats if self.ratio and self.lacks is None else None

    @property
    def repeats_to_decide(self) -> int | None:
        """The same as `sweep.repeats`: in all, counting those of runs that don't count."""
        further = self.further_repeats
        return further and self.highest_repeat + 1 + further

    def columns(self, name: str) -> dict[str, float | None]:
        """The ratio as columns: the median, and the ends of its 95 % interval."""
        return columns_of(name, self.ratio, of_itself=self.lacks is SpeedVerdict.BASELINE)


def columns_of(name: str, ratio: Ratio | None, *, of_itself: bool = False) -> dict[str, float | None]:
    """A ratio as `name`, `name_low` and `name_high`."""
    # Against itself every ratio is 1 by construction: an interval would say nothing.
    low, high = (ratio.low, ratio.high) if ratio and not of_itself else (None, None)
    return {name: ratio.median if ratio else None, f"{name}_low": low, f"{name}_high": high}


def speed_of(pairing: Pairing, *, disturbed: bool = False) -> Speed:
    """How fast the second side of a pairing is. `disturbed`: others disturbed all runs of a side, so that none counts.

    Its verdict is alone; several that are given together are `judged` together.
    """
    pairs, ratio = pairing.pairs, pairing.speed_up()
    timed = [any(pair.runs[side].value(PER_EPOCH.metric) for pair in pairs) for side in (0, 1)]
    untimed = tuple(side for side in (0, 1) if pairs and not timed[side])
    lacks = None
    if pairs and all(pair.runs[0] is pair.runs[1] for pair in pairs):
        lacks = SpeedVerdict.BASELINE
    elif pairing.blockers():
        lacks = SpeedVerdict.NOT_COMPARABLE
    elif disturbed and ratio is None:
        lacks = SpeedVerdict.DISTURBED
    elif untimed:
        lacks = SpeedVerdict.NO_STEADY_EPOCH
    epochs: set[Any] = {pair.runs[side].definition.get("epochs") for pair in pairs for side in untimed}
    return Speed(ratio, lacks, untimed, epochs == {1}, pairing.highest_repeat)


def judged(speeds: Sequence[Speed], *, fastest_of: int = 0) -> list[Speed]:
    """The same with verdicts that allow for each other; `fastest_of` as in `of_several`."""
    error = of_several((speed.ratio for speed in speeds if speed.lacks is None), fastest_of=fastest_of)
    return [replace(speed, ratio=speed.ratio and speed.ratio.at(error)) for speed in speeds]
