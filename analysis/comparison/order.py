"""Whether the sides of a comparison were measured in turn, or one after the other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ONE_SIDED = 0.75
"""Share of pairs of runs, one of each side, in which the same side comes first, from which sides are apart.

Of sides in turn, in rounds with an order of their own, it is at most 0.5 + 0.5 ÷ repeats: 0.75 for two repeats. Of two
sides in turn only by one early run, it is 1 − 1 ÷ repeats.
"""


def one_after_the_other(sides: Sequence[Sequence[float]]) -> bool:
    """Whether the runs of any side mostly began before those of another: what changes with time is in their ratio.

    `sides`: of each the Unix times at which its runs began, at least two. The measure is that of Mann and Whitney
    (1947), the probability that a run of one side comes before one of the other. Runs of unknown times don't count.
    """
    known = [[time for time in side if abs(time) != float("inf")] for side in sides]
    return any(_is_one_sided(one, other) for one, other in combinations(known, 2) if min(len(one), len(other)) > 1)


def _is_one_sided(one: Sequence[float], other: Sequence[float]) -> bool:
    later = sorted(other)
    earlier = sum(len(later) - (bisect_left(later, first) + bisect_right(later, first)) / 2 for first in one)
    share = earlier / (len(one) * len(other))
    return max(share, 1 - share) > ONE_SIDED
