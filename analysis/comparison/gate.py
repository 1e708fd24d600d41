"""A comparison for a terminal, and as a gate: is anything slower than it may be?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from analysis import text
from analysis.comparison.speed import SpeedVerdict
from analysis.comparison.two_sides import OVERALL, TIME, shown_verdict
from analysis.stats import CONFIDENCE
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from analysis.comparison.two_sides import Compared, Comparison
    from analysis.stats import Ratio

PASSED, SLOWER, UNDECIDED = 0, 1, 2
"""Exit codes of the gate."""
_STYLES = {SpeedVerdict.FASTER: "green", SpeedVerdict.SLOWER: "red"}
_BESIDES = {"gpu_energy_per_sample_j": "energy\nB ÷ A", "peak_memory_sum_bytes": "memory\nB ÷ A"}


class Gate(NamedTuple):
    """The result of `--fail-if-slower`."""

    code: int
    message: str


def table(comparison: Comparison) -> Table:
    """One row per configuration, and one for all."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("configuration", overflow="fold")
    for name in ("pairs", "A\ns per epoch", "B\ns per epoch", "time B ÷ A\n(95 % interval)"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("B is", min_width=len("too few repeats: n=0"))
    besides = [name for name in _BESIDES if any(row.ratios[name] for row in comparison.rows)]
    for name in besides:
        shown.add_column(_BESIDES[name], justify="right", no_wrap=True)
    several = len({row.group for row in comparison.rows}) > 1
    group = None
    for row in comparison.rows:
        if several and row.group != group:
            shown.add_section()
            shown.add_row(f"[bold]{row.group}[/bold]")
            group = row.group
        shown.add_row(*_cells(row), *(_median(row.ratios[name]) for name in besides))
    if len(comparison.rows) > 1:
        shown.add_section()
        time = comparison.overall
        shown.add_row(OVERALL, _pairs(time), "", "", _time(time), _styled(comparison.verdict, _overall(comparison)))
    return shown


def _cells(row: Compared) -> list[str]:
    ends = (text.number(row.a[TIME]), text.number(row.b[TIME]))
    return [row.configuration, _pairs(row.time), *ends, _time(row.time), _styled(row.verdict, row.shown_verdict)]


def _pairs(time: Ratio | None) -> str:
    return str(time.n if time else 0)


def _time(time: Ratio | None) -> str:
    return text.interval(time.median, time.low, time.high, digits=3) if time else text.MISSING


def _median(ratio: Ratio | None) -> str:
    return text.interval(ratio.median, None, None, digits=3) if ratio else text.MISSING


def _overall(comparison: Comparison) -> str:
    return shown_verdict(comparison.verdict, comparison.overall)


def _styled(verdict: SpeedVerdict, shown: str) -> str:
    return f"[{_STYLES[verdict]}]{shown}[/]" if verdict in _STYLES else shown


def notes(comparison: Comparison) -> list[str]:
    """The lines below the table."""
    verdicts = sum(row.time is not None and row.time.low is not None for row in comparison.rows)
    lines = list(comparison.notes)
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            lines.append(f"Only {side} has counted runs of {text.listed(names, most=8)}.")
    if verdicts > 1:
        lines.append(
            f"Of {verdicts} verdicts, {(1 - CONFIDENCE) * verdicts:.2g} are expected to say faster or slower by chance "
            "alone where nothing differs."
        )
    return lines


def percentage(given: str) -> float:
    """ "3%" → 0.03; raises `ConfigError` for anything else."""
    number = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?)\s*%", given.strip(), re.ASCII)
    if number is None:
        raise ConfigError(f"--fail-if-slower {given}: expected a percentage of 0 or more, such as 3% or 0.5%")
    return float(number[1]) / 100


def gate(comparison: Comparison, *, margin: float) -> Gate:
    """Whether any configuration, or all together, is slower by more than `margin` (0.03: 3 %) with confidence.

    It is where the lower end of the 95 % interval of the ratio of times exceeds 1 + margin. Of changes that are slower
    by exactly the margin 2.5 % fail, of harmless ones fewer. What can't be judged does not pass.
    """
    judged = [(row.configuration, row.time) for row in comparison.rows]
    undecided = [f"{row.configuration}: {row.shown_verdict}" for row in comparison.rows if not _has_interval(row.time)]
    if len(judged) > 1 and not undecided:
        judged.append((OVERALL, comparison.overall))
        undecided += [] if _has_interval(comparison.overall) else [f"{OVERALL}: {_overall(comparison)}"]
    allowed = _percent(margin)
    slower = [(name, time) for name, time in judged if time and time.low is not None and time.low > 1 + margin]
    if slower:
        worst = [
            f"{name} by {_percent(time.median - 1)} (at least {_percent((time.low or 0) - 1)})" for name, time in slower
        ]
        return Gate(SLOWER, f"FAIL: slower by more than {allowed}: {', '.join(worst)}")
    undecided += [f"{name}: no counted run on side B" for name in comparison.only_a]
    undecided += [f"{lost} are missing on side B" for lost in comparison.lost]
    if undecided:
        return Gate(UNDECIDED, f"UNDECIDED: {text.listed(undecided, sep='; ')}. Measure what is missing, then compare")
    return Gate(PASSED, f"PASS: nothing is slower by more than {allowed} with confidence; {_left_open(judged, margin)}")


def _has_interval(time: Ratio | None) -> bool:
    return time is not None and time.low is not None


def _left_open(judged: Sequence[tuple[str, Ratio | None]], margin: float) -> str:
    """How much slower it may still be: a gate whose intervals are wide could hardly have failed."""
    name, high = max(((name, time.high) for name, time in judged if time and time.high), key=lambda end: end[1])
    if high <= 1:
        return "all are faster"
    if high <= 1 + margin:
        return f"the intervals end at {_percent(high - 1)} ({name})"
    return f"but up to {_percent(high - 1)} is not excluded ({name}): more repeats narrow that"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
