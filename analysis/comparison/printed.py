"""A comparison as a table for the terminal, and as a gate: is any configuration slower than allowed?"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from analysis import text
from analysis.comparison.ratio import ERROR, FEWEST_REPEATS, MOST_FURTHER, POWER, SpeedVerdict, repeats_to_add
from analysis.comparison.sides import OVERALL, TIME
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.comparison.ratio import Ratio
    from analysis.comparison.sides import Compared, Comparison

PASSED, SLOWER, UNDECIDED = 0, 1, 2
"""Exit codes of the gate."""
_STYLES = {SpeedVerdict.FASTER: "green", SpeedVerdict.SLOWER: "red"}
_BESIDES = {"gpu_energy_per_sample_j": "energy\nB ÷ A", "peak_memory_sum_bytes": "memory\nB ÷ A"}


class Gate(NamedTuple):
    """The result of `--fail-if-slower`."""

    code: int
    message: str


class Listing(NamedTuple):
    """A table for the terminal, in rich's markup."""

    columns: list[str]
    rows: list[list[str]]


def table(comparison: Comparison) -> Listing:
    """One row per configuration, and one for all; of several groups each has a row with its name."""
    besides = [name for name in _BESIDES if any(row.ratios[name] for row in comparison.rows)]
    columns = ["configuration", "pairs", "A\ns per epoch", "B\ns per epoch", "time B ÷ A\n(95 % interval)", "B is"]
    several = len({row.group for row in comparison.rows}) > 1
    shown: list[list[str]] = []
    group = None
    for row in comparison.rows:
        if several and row.group != group:
            shown.append([f"[bold]{escape(row.group)}[/bold]", *[""] * (len(columns) + len(besides) - 1)])
            group = row.group
        shown.append([*_cells(row), *(_median(row.ratios[name]) for name in besides)])
    if len(comparison.rows) > 1:
        time, verdict = comparison.overall, _styled(comparison.verdict, comparison.shown_verdict)
        shown.append([OVERALL, _pairs(time), "", "", _time(time), verdict, *[""] * len(besides)])
    return Listing(columns + [_BESIDES[name] for name in besides], shown)


def _cells(row: Compared) -> list[str]:
    ends = (text.number(row.a[TIME]), text.number(row.b[TIME]))
    shown = _styled(row.verdict, row.shown_verdict)
    return [escape(row.configuration), _pairs(row.time), *ends, _time(row.time), shown]


def _pairs(time: Ratio | None) -> str:
    return str(time.n if time else 0)


def _time(time: Ratio | None) -> str:
    return text.interval(time.median, time.low, time.high, digits=3) if time else text.MISSING


def _median(ratio: Ratio | None) -> str:
    return text.interval(ratio.median, None, None, digits=3) if ratio else text.MISSING


def _styled(verdict: SpeedVerdict, shown: str) -> str:
    return f"[{_STYLES[verdict]}]{shown}[/]" if verdict in _STYLES else shown


def notes(comparison: Comparison) -> list[str]:
    """The lines below the table."""
    verdicts = sum(row.time is not None and row.time.low is not None for row in comparison.rows)
    lines = list(comparison.notes)
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            lines.append(f"Only {side} has counted runs of {text.listed(names, most=8)}.")
    lines += [f"Side B lacks {lost}." for lost in comparison.lost]
    lines += [f"Side A lacks {gained}." for gained in comparison.gained]
    lines += _would_decide(comparison)
    if verdicts > 1:
        lines.append(text.together(verdicts))
    return lines


def _would_decide(comparison: Comparison) -> list[str]:
    """How many repeats would decide where no difference is shown."""
    several = len({row.group for row in comparison.rows}) > 1
    judged = [
        (f"{row.configuration} ({row.group})" if several else row.configuration, row.verdict, row.further_repeats)
        for row in comparison.rows
    ]
    judged += [(OVERALL, comparison.verdict, comparison.further_repeats)] if len(comparison.rows) > 1 else []
    undecided: dict[int | None, list[str]] = defaultdict(list)
    for name, verdict, further in judged:
        if verdict is SpeedVerdict.NO_DIFFERENCE:
            undecided[further].append(name)
    return [f"{text.listed(names, most=8)}: {_further(further)}." for further, names in undecided.items()]


def _further(repeats: int | None) -> str:
    if repeats is None:
        return f"{SpeedVerdict.NO_DIFFERENCE}; more than {MOST_FURTHER} further repeats would be needed to decide"
    return f"{SpeedVerdict.NO_DIFFERENCE}; if it stays so, {text.repeats(repeats)} more per side, in turn, would decide"


def percentage(given: str) -> float:
    """ "3%" → 0.03; raises `ConfigError` for anything else."""
    number = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?)\s*%", given.strip(), re.ASCII)
    if number is None:
        raise ConfigError(f"--fail-if-slower {given}: expected a percentage of 0 or more, such as 3% or 0.5%")
    return float(number[1]) / 100


def gate(comparison: Comparison, *, margin: float) -> Gate:
    """Whether any configuration, or all together, is slower by more than `margin` (0.03: 3 %) with confidence.

    It fails where the lower end of an interval exceeds 1 + margin. The intervals are those for so many configurations
    (Bonferroni): of changes that are slower by exactly the margin, 2.5 % fail at most, however many configurations
    there are, and of harmless ones fewer. It passes where all intervals end at or below 1 + margin. Everything else is
    undecided: what was not seen for lack of repeats does not pass.
    """
    judged = [(row.configuration, row.time) for row in comparison.rows]
    undecided = {
        f"{row.configuration}: {row.shown_verdict}": _remedy(row.verdict, row.time)
        for row in comparison.rows
        if not _has_interval(row.time)
    }
    if len(judged) > 1 and not undecided:
        judged.append((OVERALL, comparison.overall))
        if not _has_interval(comparison.overall):
            remedy = _remedy(comparison.verdict, comparison.overall)
            undecided[f"{OVERALL}: {comparison.shown_verdict}"] = remedy
    known = [(name, time) for name, time in judged if time is not None and _has_interval(time)]
    together = [(name, time.at(ERROR / len(known))) for name, time in known]
    if slower := [(name, time) for name, time in together if (time.low or 0) > 1 + margin]:
        worst = [
            f"{name} by {_percent(time.median - 1)} (at least {_percent((time.low or 0) - 1)})" for name, time in slower
        ]
        return Gate(SLOWER, f"FAIL: slower by more than {_percent(margin)}: {', '.join(worst)}")
    undecided |= {f"{name}: no counted run on side B": _MISSING for name in comparison.only_a}
    undecided |= {f"side B lacks {lost}": _MISSING for lost in comparison.lost}
    if undecided:
        remedies = text.sentence(f"{text.listed(list(dict.fromkeys(undecided.values())), sep='; ')}, then compare")
        return Gate(UNDECIDED, f"UNDECIDED: {text.listed(list(undecided), sep='; ')}. {remedies.removesuffix('.')}")
    return _not_slower(known, together, margin)


_MISSING = "measure the missing runs"


def _remedy(verdict: SpeedVerdict, time: Ratio | None) -> str:
    """What gives a row an interval."""
    match verdict:
        case SpeedVerdict.TOO_FEW if time is not None:
            return text.to_add(FEWEST_REPEATS - time.n)
        case SpeedVerdict.NOT_INTERLEAVED:
            return "measure both sides in turn"
        case SpeedVerdict.NOT_COMPARABLE:
            return "remove what blocks the comparison, see the notes"
        case SpeedVerdict.NO_STEADY_EPOCH:
            return "train more epochs"
    return _MISSING


def _has_interval(time: Ratio | None) -> bool:
    return time is not None and time.low is not None


def _not_slower(known: Sequence[tuple[str, Ratio]], together: Sequence[tuple[str, Ratio]], margin: float) -> Gate:
    """Passed where no interval reaches beyond the margin. `together`: with intervals for so many configurations."""
    # All must pass, so each may be judged as if it were alone (intersection–union).
    name, worst = max(((name, time.at(ERROR)) for name, time in known), key=lambda each: each[1].high or 0)
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
    ends = [time.at(ERROR).after(more) for _, time in known]
    wider = [time.after(more) for _, time in together]
    return all(e and e[1] <= 1 + margin for e in ends) or any(e and e[0] > 1 + margin for e in wider)


def _power(judged: Sequence[tuple[str, Ratio]], margin: float) -> str:
    """The slow-down that these repeats would have shown."""
    seen, name = max((time.smallest_seen(1 + margin) or 0, name) for name, time in judged)
    return (
        f"with these repeats a slow-down of {_percent(seen - 1)} or more fails in {100 * POWER:.0f} % of cases ({name})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
