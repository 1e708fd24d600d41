"""The verdict on one effect: does its interval lie in the claimed region, beyond it, or neither?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from analysis import text
from analysis.stats import ENOUGH_REPEATS, repeats_to_add

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.claims.grammar import Expect

Verdict = Literal["reproduced", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "refuted", "inconclusive")

APART = "the sides were measured apart: measure both in one sweep"


After = Callable[[int], tuple[float, float] | None]
"""The interval after so many more repeats of each side, if the effects vary alike."""


def verdict_on(values: Sequence[float], interval: tuple[float, float] | None, expect: Expect) -> Verdict:
    """The verdict on an effect.

    Reproduced: the interval lies in the region. Refuted: it lies on the other side of the bound. Effects within the
    margin decide nothing. Fewer than `ENOUGH_REPEATS` repeats decide nothing, and no interval neither: the sides were
    not interleaved.
    """
    if len(values) < ENOUGH_REPEATS or interval is None:
        return "inconclusive"
    if expect.region[0] < interval[0] and interval[1] < expect.region[1]:
        return "reproduced"
    return "refuted" if interval[1] <= expect.open[0] or interval[0] >= expect.open[1] else "inconclusive"


def decide(
    values: Sequence[float], interval: tuple[float, float] | None, expect: Expect, *, after: After | None = None
) -> tuple[Verdict, str]:
    """The verdict on an effect, and what would decide it where nothing does. `after`: None where that is not known."""
    verdict = verdict_on(values, interval, expect)
    if verdict != "inconclusive":
        return verdict, ""
    if missing := max(ENOUGH_REPEATS - len(values), 0):
        enough = f"{text.repeats(len(values))} of {ENOUGH_REPEATS}"
        return verdict, f"{enough}: {text.to_add(missing)} (sweep.repeats={ENOUGH_REPEATS})"
    return verdict, APART if interval is None else _undecided(values, interval, expect, after)


def _undecided(values: Sequence[float], interval: tuple[float, float], expect: Expect, after: After | None) -> str:
    bounds = sorted({*expect.region, *expect.open})
    held = [bound for bound in bounds if interval[0] <= bound <= interval[1]]
    if not held:  # it lies within the margin
        return f"the effect is within the margin ({expect.by:g})"
    holds = f"the interval holds {text.listed([f'{edge:g}' for edge in held])}"
    if after is None:
        return holds
    needed = repeats_to_add(lambda more: verdict_on(values, after(more), expect) != "inconclusive")
    if needed is None:
        return f"{holds}, which is too near the effect for any feasible number of repeats"
    return f"{holds}: {text.to_add(needed)}, which decides if the effect stays"
