"""The table in docs/benchmarks.md: read, changed by the rows of some parts, and written again."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from parallelbench.errors import count_of
from parallelbench.world.machine import cpu_name
from tests.bench.measure import Figure

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEADERS = ("part", "what", "median", "range", "goal", "", "note", "measured")
Row = list[str]


def merged(old: Sequence[Row], new: Mapping[str, Sequence[Row]], order: Sequence[str]) -> list[Row]:
    """All rows in the order of their parts; a part that was measured anew keeps none of its old rows.

    A part that found nothing (what it needs is not installed here) keeps them.
    """
    replaced = {part for part, rows in new.items() if rows}
    kept = [row for row in old if row[0] in order and row[0] not in replaced]
    return sorted([*kept, *(row for rows in new.values() for row in rows)], key=lambda row: order.index(row[0]))


def rows_of(page: str) -> list[Row]:
    """The table of the page, without its head."""
    lines = [line for line in page.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines[2:]]


def with_rows(page: str, rows: Sequence[Row]) -> str:
    """The page with another table."""
    table = [f"| {' | '.join(cells)} |" for cells in (HEADERS, ("---",) * len(HEADERS), *rows)]
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return "\n".join([f"{before}{BEGIN}", *table, f"{END}{after}"])


def cells(part: str, figure: Figure, *, others: int = 0) -> Row:
    """A row: the part that measured it first; last when, where, and beside how many other busy processes."""
    today = datetime.datetime.now(datetime.UTC).date()
    machine = f"{cpu_name()}, {os.cpu_count()} cores, torch {metadata.version('torch')}"
    busy = f"; busy with {count_of(others, 'other process', 'other processes')}" if others else ""
    row = [part, *figure.cells(), f"{today}, {machine}{busy}"]
    assert not any("|" in cell for cell in row), f"a cell that would split: {row}"
    return row


def update(new: Mapping[str, Sequence[Row]], order: Sequence[str]) -> None:
    """Put what was measured into the page."""
    page = PAGE.read_text()
    PAGE.write_text(with_rows(page, merged(rows_of(page), new, order)))
