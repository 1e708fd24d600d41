"""A comparison as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from analysis import text
from analysis.comparison.notes import Code, Note, Subject, write
from analysis.comparison.sides import OVERALL, TIME
from analysis.comparison.verdict import SpeedVerdict
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from analysis.comparison.ratio import Ratio
    from analysis.comparison.sides import Compared, Comparison

_STYLES = {SpeedVerdict.FASTER: "green", SpeedVerdict.SLOWER: "red"}
_BESIDES = {"gpu_energy_per_sample_j": "energy\nB ÷ A", "peak_memory_sum_bytes": "memory\nB ÷ A"}


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, in rich's markup.

    One row per configuration, and one for all; of several groups each has a row with its name.
    """
    besides = [name for name in _BESIDES if any(row.ratios[name] for row in comparison.rows)]
    time_is = "time per sample B ÷ A" if comparison.per_sample else "time B ÷ A"
    columns = ["configuration", "pairs", "A\ns per epoch", "B\ns per epoch", f"{time_is}\n(95 % interval)", "B is"]
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
    return columns + [_BESIDES[name] for name in besides], shown


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
    times = [row.time for row in comparison.rows]
    times += [comparison.overall] if len(times) > 1 else []
    verdicts = sum(time is not None and time.low is not None for time in times)
    sides = (("A", comparison.only_a), ("B", comparison.only_b))
    found = [Note(Code.ONE_SIDE, {"side": side}, tuple(map(Subject, names))) for side, names in sides if names]
    found += [Note(Code.LACKS, {"side": "B", "what": lost}) for lost in comparison.lost]
    found += [Note(Code.LACKS, {"side": "A", "what": gained}) for gained in comparison.gained]
    found += _would_decide(comparison)
    found += [Note(Code.TOGETHER, {"verdicts": verdicts})] if verdicts > 1 else []
    return [*comparison.notes, *write(found)]


def _would_decide(comparison: Comparison) -> list[Note]:
    """How many repeats would decide where no difference is shown."""
    several = len({row.group for row in comparison.rows}) > 1
    judged = [
        (Subject(row.configuration, row.group if several else ""), row.verdict, row.further_repeats)
        for row in comparison.rows
    ]
    if len(comparison.rows) > 1:
        judged.append((Subject(OVERALL), comparison.verdict, comparison.further_repeats))
    return [
        Note(Code.UNDECIDED_SIDES, {"further": count_of(further, "repeat")}, (whose,))
        if further
        else Note(Code.UNDECIDABLE_SIDES, {}, (whose,))
        for whose, verdict, further in judged
        if verdict is SpeedVerdict.NO_DIFFERENCE
    ]
