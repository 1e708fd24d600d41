"""The summary as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.cells import DISTURBED_MARK, cells
from analysis.configurations import facts, summary
from analysis.metrics.schema import brief_columns

if TYPE_CHECKING:
    from rich.table import Table

    from analysis.reader import Runs
    from parallelbench.results.tables import Column

_BREAKS = str.maketrans({"\u00a0": " ", "\u2060": None, "\u00ad": None})
"""Marks for optional line breaks, which a terminal would show."""


def summary_table(runs: Runs) -> Table:
    """The summary for a terminal, 80 columns wide where names allow it: the same numbers, rounded."""
    from rich.table import Table
    from rich.text import Text

    rows = summary(runs)
    groups = list(rows["group"].unique(maintain_order=True))
    name = " + ".join(folder.resolve().name for folder in runs.folders or (runs.root,))
    title = " · ".join([name, *groups] if len(groups) == 1 else [name])
    shown = Table.grid()
    shown.title, shown.title_justify = Text(title, style="italic"), "left"
    shown.caption, shown.caption_justify = (
        "medians over runs; speed-up over one device, in brackets its 95 % interval; "
        "sent to other processes per step (by textbook), and peak memory: sums over all processes"
        + ("; nothing of runs with more devices than cores" if facts(runs)["oversubscribed"].any() else "")
        + (f"; {DISTURBED_MARK} others disturbed these runs" if rows["disturbed"].any() else ""),
        "left",
    )
    columns = brief_columns()
    texts = {
        group: [_texts(row, columns) for row in rows.filter(pl.col("group") == group).iter_rows(named=True)]
        for group in groups
    }
    widths = {}
    for place, column in enumerate(columns):
        body = [len(row[place]) for of_group in texts.values() for row in of_group]
        widths[column.brief] = max([len(line) for line in column.brief.split("\n")] + body)
    shown.add_row(_aligned([], widths, header=True))
    for group, of_group in texts.items():
        if len(groups) > 1:  # across all columns: some names are longer than any configuration's
            shown.add_row(Text(f"\n{group}", style="bold"))
        shown.add_row(_aligned(of_group, widths))
    return shown


def _texts(row: dict[str, Any], columns: tuple[Column, ...]) -> list[str]:
    return [cell.shown.translate(_BREAKS) for cell in cells(row, columns)]


def _aligned(rows: list[list[str]], widths: dict[str, int], *, header: bool = False) -> Table:
    """A part of a table; parts with the same widths have the same columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    part = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, show_header=header)
    names, *numbers = widths.items()
    part.add_column(names[0].ljust(names[1]), overflow="fold", min_width=len(names[0]))
    for name, width in numbers:
        part.add_column(name, justify="right", no_wrap=True, min_width=width)
    for configuration, *others in rows:
        part.add_row(Text(configuration.ljust(names[1])), *others)
    return part
