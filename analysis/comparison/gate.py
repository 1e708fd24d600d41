"""`compare --fail-if-slower`: is any configuration slower than allowed?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from analysis import text
from analysis.comparison.ratio import DECIDING_REPEATS, ERROR, POWER, repeats_to_add
from analysis.comparison.sides import OVERALL
from analysis.comparison.verdict import SpeedVerdict
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.comparison.ratio import Ratio
    from analysis.comparison.sides import Comparison

PASSED, SLOWER, UNDECIDED = 0, 1, 2
"""Exit codes of the gate."""


class Gate(NamedTuple):
    """The result of `--fail-if-slower`."""

    code: int
    message: str


def percentage(given: str) -> float:
    """ "3%" → 0.03; raises `ConfigError` for anything else."""
    number = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?)\s*%", given.strip(), re.ASCII)
    if number is None:
        raise ConfigError(f"--fail-if-slower {given}: expected a percentage of 0 or more, such as 3% or 0.5%")
    return float(number[1]) / 100


def gate(comparison: Comparison, *, margin: float) -> Gate:
    """Whether any configuration, or all together, is slower by more than `margin` (0.03: 3 %) with confidence.

    It fails where the lower end of a deciding interval exceeds 1 + margin. These allow for so many configurations
    (Bonferroni): of changes that are slower by exactly the margin, 2.5 % fail at most, however many configurations
    there are, and of harmless ones fewer. It passes where all 95 % intervals end at or below 1 + margin. Everything
    else is undecided: what was not seen for lack of repeats does not pass.
    """
    judged = [(row.configuration, row.time) for row in comparison.rows]
    undecided = {
        f"{row.configuration}: {row.shown_verdict}": _remedy(row.verdict, row.time)
        for row in comparison.rows
        if not _is_judged(row.time)
    }
    if len(judged) > 1 and not undecided:
        judged.append((OVERALL, comparison.overall))
        if not _is_judged(comparison.overall):
            remedy = _remedy(comparison.verdict, comparison.overall)
            undecided[f"{OVERALL}: {comparison.shown_verdict}"] = remedy
    known = [(name, time.at(ERROR)) for name, time in judged if time is not None and _is_judged(time)]
    together = [(name, time.at(ERROR / len(known))) for name, time in known]
    least = [(name, time.median, time.deciding[0]) for name, time in together if time.deciding]
    if slower := [each for each in least if each[2] > 1 + margin]:
        worst = [f"{name} by {_percent(median - 1)} (at least {_percent(low - 1)})" for name, median, low in slower]
        return Gate(SLOWER, f"FAIL: slower by more than {_percent(margin)}: {', '.join(worst)}")
    undecided |= {f"{name}: no counted run on side B": _MISSING for name in comparison.only_a}
    undecided |= {f"side B lacks {lost}": _MISSING for lost in comparison.lost}
    if undecided:
        remedies = text.sentence(f"{text.listed(list(dict.fromkeys(undecided.values())), sep='; ')}, then compare")
        return Gate(UNDECIDED, f"UNDECIDED: {text.listed(list(undecided), sep='; ')}. {remedies.removesuffix('.')}")
    return _not_slower(known, together, margin)


_MISSING = "measure the missing runs"


def _remedy(verdict: SpeedVerdict, time: Ratio | None) -> str:
    """What lets a row be judged."""
    match verdict:
        case SpeedVerdict.TOO_FEW if time is not None:
            return text.to_add(DECIDING_REPEATS - time.n)
        case SpeedVerdict.NOT_INTERLEAVED:
            return "measure both sides in turn"
        case SpeedVerdict.NOT_COMPARABLE:
            return "remove what blocks the comparison, see the notes"
        case SpeedVerdict.NO_STEADY_EPOCH:
            return "train more epochs"
    return _MISSING


def _is_judged(time: Ratio | None) -> bool:
    return time is not None and time.deciding is not None


def _not_slower(known: Sequence[tuple[str, Ratio]], together: Sequence[tuple[str, Ratio]], margin: float) -> Gate:
    """Passed where no interval reaches beyond the margin. `together`: judged for so many configurations."""
    # All must pass, so each may be judged as if it were alone (intersection–union).
    name, worst = max(known, key=lambda each: each[1].high or 0)
    high, allowed, power = worst.high or 0, _percent(margin), _power(together, margin)
    if high <= 1 + margin:
        ends = (
            f"all are faster, by {_percent(1 - high)} at least"
            if high < 1
            else f"at most {_percent(high - 1)} ({name})"
        )
        return Gate(PASSED, f"PASS: nothing is slower by more than {allowed} with confidence: {ends}; {power}")
    needed = repeats_to_add(lambda more: _is_decided_after(more, known, together, margin=margin))
    advice = (
        f"{text.to_add(needed)}, which decides if the ratios stay"
        if needed
        else "the ratio is too near the margin for any feasible number of repeats"
    )
    return Gate(
        UNDECIDED,
        f"UNDECIDED: {name} may be slower by up to {_percent(high - 1)}, and {allowed} are allowed; {power}; {advice}",
    )


def _is_decided_after(
    more: int, known: Sequence[tuple[str, Ratio]], together: Sequence[tuple[str, Ratio]], *, margin: float
) -> bool:
    """Whether so many more repeats pass all, or fail any, if the ratios stay."""
    ends = [time.after(more) for _, time in known]
    wider = [time.after(more) for _, time in together]
    return all(e and e[1] <= 1 + margin for e in ends) or any(e and e[0] > 1 + margin for e in wider)


def _power(judged: Sequence[tuple[str, Ratio]], margin: float) -> str:
    """The slow-down that these repeats would have shown."""
    each = [(time.smallest_seen(1 + margin), name) for name, time in judged]
    if blind := [name for seen, name in each if seen is None]:
        return f"too few repeats to fail any of so many configurations, however slow ({text.listed(blind)})"
    seen, name = max((seen or 0, name) for seen, name in each)
    return (
        f"with these repeats a slow-down of {_percent(seen - 1)} or more fails in {100 * POWER:.0f} % of cases ({name})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
