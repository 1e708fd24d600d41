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

NOISE = 0.1
"""The spread of an effect over its repeats, in parts of the largest, from which a quiet machine would help."""

APART = "the sides were measured apart: measure both in one sweep"


After = Callable[[int], tuple[float, float] | None]
"""The interval after so many more repeats of each side, if the effects vary alike."""


def verdict_on(independent: int, interval: tuple[float, float] | None, expect: Expect) -> Verdict:
    """The verdict on an effect.

    Reproduced: the interval lies in the region. Refuted: no part of it does, and it reaches the bound: the effect is
    the opposite, or nil (equivalent to none by the claim's own margin). An effect in the claimed direction that is
    measured to lie within the margin decides nothing. Fewer than `ENOUGH_REPEATS` independent values decide nothing,
    and no interval neither: the sides were not interleaved.
    """
    if independent < ENOUGH_REPEATS or interval is None:
        return "inconclusive"
    (low, high), region, bound = interval, expect.region, expect.open
    if region[0] < low and high < region[1]:
        return "reproduced"
    beyond = (high <= region[0] and low <= bound[0]) or (low >= region[1] and high >= bound[1])
    return "refuted" if beyond else "inconclusive"


def decide(
    values: Sequence[float],
    interval: tuple[float, float] | None,
    expect: Expect,
    *,
    independent: int | None = None,
    after: After | None = None,
    highest_repeat: int | None = None,
    timed: bool = False,
) -> tuple[Verdict, str]:
    """The verdict on an effect, and what would decide it where nothing does.

    `independent`: how many of the values are, None for all. `after`: None where that is not known. `timed`: a quieter
    machine would narrow the interval.
    """
    known = len(values) if independent is None else independent
    verdict = verdict_on(known, interval, expect)
    if verdict != "inconclusive":
        return verdict, ""
    if missing := max(ENOUGH_REPEATS - len(values), 0):
        enough = f"{text.repeats(len(values))} of {ENOUGH_REPEATS}"
        return verdict, f"{enough}: {text.to_add(missing, after=highest_repeat)}"
    if interval is None:
        return verdict, APART
    if missing := max(ENOUGH_REPEATS - known, 0):
        enough = f"{text.repeats(len(values))} that count as {known} of {ENOUGH_REPEATS}, as submits share them"
        return verdict, f"{enough}: {text.to_add(missing, after=highest_repeat)}"
    spread = (min(values), max(values)) if timed else None
    return verdict, _undecided(known, interval, expect, after, spread=spread)


def _undecided(
    known: int,
    interval: tuple[float, float],
    expect: Expect,
    after: After | None,
    *,
    spread: tuple[float, float] | None,
) -> str:
    bounds = sorted({*expect.region, *expect.open})
    held = [bound for bound in bounds if interval[0] <= bound <= interval[1]]
    if not held:  # it lies within the margin
        return f"the effect is within the margin ({expect.by:g})"
    holds = f"the interval holds {text.listed([f'{edge:g}' for edge in held])}"
    if after is None:
        return holds
    needed = repeats_to_add(lambda more: verdict_on(known + more, after(more), expect) != "inconclusive")
    first = _quiet(spread) if spread is not None and (needed is None or needed > known) else ""
    if needed is None:
        return f"{holds}, which is too near the effect for any feasible number of repeats{first and f': {first}'}"
    return f"{holds}: {first}{first and '; then '}{text.to_add(needed)}, which decides if the effect stays"


def _quiet(spread: tuple[float, float]) -> str:
    """What to do about noise before repeats are added to outweigh it; empty where repeats are alike."""
    low, high = spread
    if high - low <= NOISE * max(abs(low), abs(high)):
        return ""
    return f"measure on a quiet machine first, as repeats lie between {low:.3g} and {high:.3g}"
