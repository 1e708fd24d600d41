"""The verdict on one effect: does its interval lie in the claimed region, beyond it, or neither?"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

from analysis import text
from analysis.stats import ERROR, repeats_to_reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.claims.grammar import Expect

Verdict = Literal["reproduced", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "refuted", "inconclusive")

ENOUGH_REPEATS = 6
"""Fewest repeats for a verdict: with fewer, an interval depends on the shape of the noise."""

APART = "the sides were measured apart: measure both in one sweep"


def decide(
    values: Sequence[float], interval: tuple[float, float] | None, expect: Expect, *, error: float = ERROR
) -> tuple[Verdict, str]:
    """The verdict on an effect, and what would decide it where nothing does.

    Reproduced: the interval lies in the region. Refuted: it lies on the other side of the bound. Effects within the
    margin decide nothing. Fewer than `ENOUGH_REPEATS` repeats decide nothing, and no interval neither: the sides were
    not interleaved. `error`: that of the interval.
    """
    if len(values) < ENOUGH_REPEATS:
        return "inconclusive", f"{text.repeats(len(values))} of {ENOUGH_REPEATS}: sweep.repeats={ENOUGH_REPEATS}"
    if interval is None:
        return "inconclusive", APART
    if expect.region[0] < interval[0] and interval[1] < expect.region[1]:
        return "reproduced", ""
    if interval[1] <= expect.open[0] or interval[0] >= expect.open[1]:
        return "refuted", ""
    return "inconclusive", _undecided(values, interval, expect, error=error)


def _undecided(values: Sequence[float], interval: tuple[float, float], expect: Expect, *, error: float) -> str:
    bounds = sorted({*expect.region, *expect.open})
    held = [bound for bound in bounds if interval[0] <= bound <= interval[1]]
    if not held:  # it lies within the margin
        return f"the effect is within the margin ({expect.by:g})"
    shares = [_share(edge, median(values), interval) for edge in held]
    needed = repeats_to_reach(min(shares), len(values), error) if min(shares) > 0 else None
    holds = f"the interval holds {text.listed([f'{edge:g}' for edge in held])}"
    if needed is None:
        return f"{holds}, which is too near the median for any feasible number of repeats"
    return f"{holds}: about {needed} repeats are needed, if the median stays"


def _share(edge: float, middle: float, interval: tuple[float, float]) -> float:
    """How far from the median the edge is, as a share of the interval's reach to that side."""
    reach = interval[1] - middle if edge > middle else middle - interval[0]
    return abs(middle - edge) / reach if reach else 0.0
