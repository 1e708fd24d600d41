"""Tables for the terminal, of a few rows or of thousands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType

MANY = 200
"""Longer tables are printed without folding: rich takes 0.3 ms to lay out each row."""


def listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """A table whose cells are in rich's markup. Print it with `crop=False`: long ones have lines of any length."""
    if len(rows) > MANY:
        return _Lines([[f"[bold]{column}[/]" for column in columns], *rows])
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class _Lines:
    """The same without folding: every column is as wide as its widest cell."""

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> Iterator[Segment]:
        texts = {cell: Text.from_markup(cell) for cell in {cell for row in self._rows for cell in row}}
        lengths = {cell: text.cell_len for cell, text in texts.items()}
        segments = {cell: list(text.render(console)) for cell, text in texts.items()}
        widths = [max(lengths[cell] for cell in column) for column in zip(*self._rows, strict=True)]
        widths[-1] = 0
        for row in self._rows:
            for cell, width in zip(row, widths, strict=True):
                yield Segment(" ")
                yield from segments[cell]
                yield Segment(" " * (width - lengths[cell] + 1))
            yield Segment.line()
