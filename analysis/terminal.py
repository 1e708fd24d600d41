"""The summary as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.configurations import facts, summary

if TYPE_CHECKING:
    from rich.table import Table

    from analysis.load import Runs

_HEADERS = (
    "configuration",
    "runs",
    "s per\nepoch",
    "speed-up",
    "effi-\nciency",
    "sent\nMiB",
    "mem.\nMiB",
    "test\nacc.",
)


def summary_table(runs: Runs) -> Table:
    """The summary for a terminal, 80 columns wide where names allow it: the same numbers, rounded."""
    from rich.table import Table
    from rich.text import Text

    rows = summary(runs)
    groups = list(rows["group"].unique(maintain_order=True))
    title = " · ".join([runs.root.resolve().name, *groups] if len(groups) == 1 else [runs.root.resolve().name])
    shown = Table.grid()
    shown.title, shown.title_justify = Text(title, style="italic"), "left"
    shown.caption, shown.caption_justify = (
        "medians over runs; speed-up over one device, in brackets its 95 % interval; "
        "sent to other processes per step, and peak memory: sums over all processes"
        + ("; nothing of runs with more devices than cores" if facts(runs)["oversubscribed"].any() else ""),
        "left",
    )
    cells = {
        group: [_terminal_cells(row) for row in rows.filter(pl.col("group") == group).iter_rows(named=True)]
        for group in groups
    }
    lines = [[len(part) for part in header.split("\n")] for header in _HEADERS]
    widths = [
        max([*header, *(len(row[column]) for of_group in cells.values() for row in of_group)])
        for column, header in enumerate(lines)
    ]
    shown.add_row(_aligned([], widths, header=True))
    for group, of_group in cells.items():
        if len(groups) > 1:  # across all columns: some names are longer than any configuration's
            shown.add_row(Text(f"\n{group}", style="bold"))
        shown.add_row(_aligned(of_group, widths))
    return shown


def _aligned(rows: list[list[str]], widths: list[int], *, header: bool = False) -> Table:
    """A part of a table; parts with the same widths have the same columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    part = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, show_header=header)
    names, *numbers = zip(_HEADERS, widths, strict=True)
    part.add_column(names[0].ljust(names[1]), overflow="fold", min_width=len(names[0]))
    for name, width in numbers:
        part.add_column(name, justify="right", no_wrap=True, min_width=width)
    for configuration, *cells in rows:
        part.add_row(Text(configuration.ljust(names[1])), *cells)
    return part


def _terminal_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["configuration"],
        str(row["repeats"]) if row["repeats"] else row["outcomes"],
        text.number(row["steady_epoch_time_s"]),
        text.speed_up(row),
        text.percent(row["efficiency"]),
        text.sent(row["bytes_sent_per_step_sum"]),
        text.mebibytes(row["peak_memory_sum_bytes"]),
        text.percent(row["final_test_accuracy"]),
    ]
