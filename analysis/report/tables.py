"""The cells of the page's, the terminal's and LaTeX's tables: each number as its column's declaration says.

And the summary as a table for the terminal, and tables as CSV that a spreadsheet shows, but does not compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis import text
from analysis.comparison.exclusions import Exclusion, describe
from analysis.comparison.summary import facts, summary
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import PROGRAM
from analysis.metrics.columns import brief_columns
from analysis.report.latex import MOST_ROWS, floats
from analysis.runs.published import without_tokens
from analysis.text import DISTURBED_MARK
from parallelbench.results.declaration import Show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from rich.table import Table as RichTable

    from analysis.report.latex import Captioned
    from analysis.runs.reader import Runs
    from parallelbench.results.declaration import Column


@dataclass(frozen=True)
class Table:
    """A table of the report, for spreadsheets and for papers."""

    name: str
    """Of its files, and of its labels in LaTeX."""
    rows: pl.DataFrame = field(default_factory=pl.DataFrame)
    """What the CSV file has; without columns there is none."""
    captioned: Captioned = ()
    """What the LaTeX file has; without rows there is none."""
    most: int = MOST_ROWS
    """Rows of a tabular in LaTeX."""

    @property
    def latex(self) -> str:
        """The whole file."""
        return floats(self.captioned, name=self.name, most=self.most)

    def write(self, folder: Path) -> None:
        """Write its files."""
        if self.rows.columns:
            _write_csv(self.rows, folder / f"{self.name}.csv")
        if any(rows.body for _, tabulars in self.captioned for rows in tabulars):
            (folder / f"{self.name}.tex").write_text(self.latex, encoding="utf-8")


class Cell(NamedTuple):
    """A cell: the text in the table, and the number as the CSV file has it."""

    column: Column
    value: Any
    shown: str


class Shown(NamedTuple):
    """A row of a table."""

    configuration: str
    cells: list[Cell]


def cells(row: Mapping[str, Any], columns: Iterable[Column]) -> list[Cell]:
    """The cells of a row of `summary` or `facts`."""
    return [Cell(column, row[column.name], _shown(row, column)) for column in columns]


_OF_TIME = ("s", "h", "samples/s", "tokens/s", "J", "W")
_BY_TIME = ("mfu", "least_flop_per_s")
"""Units of what other programs change, and columns of other units that are made from such."""


def _shown(row: Mapping[str, Any], column: Column) -> str:
    words = _WRITERS[column.shown](*(row[name] for name in (column.name, *column.beside)))
    changed = column.unit in _OF_TIME or column.name in _BY_TIME
    rests = column.window is not None and bool(row.get(f"{column.window}_disturbed"))
    marked = changed and row[column.name] is not None and (rests or is_disturbed(row))
    return words + DISTURBED_MARK if marked else words


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Whether a row of `summary` or `facts` rests on what others have disturbed."""
    return bool(row.get("disturbed")) or row.get("exclusion") == Exclusion.DISTURBED.value


def _plain(value: Any) -> str:
    return text.MISSING if value is None else str(value)


def _known(*values: Any) -> str:
    return next((str(value) for value in values if value is not None), text.MISSING)


def _milliseconds(value_s: float | None) -> str:
    return text.MISSING if value_s is None else text.number(value_s * 1e3)


def _configuration(value: str) -> str:
    return value.replace("× ", "×\u00a0")  # no line breaks between the sign and the devices


def _interval(*ends: float | None) -> str:
    shown = text.interval(*ends)
    return shown.replace("–", "\u2060–\u2060") if "(" in shown else shown  # breaks before its interval only


def _verdict(value: str | None, pairs: int, framework: str = "torch") -> str:
    if value == SpeedVerdict.BASELINE:
        return value if framework == "torch" else f"{value} of {framework}"
    if value == SpeedVerdict.TOO_FEW:
        return f"too\u00a0few\u00a0(n={pairs})"  # in one line: the column is narrow
    return _plain(value)


def _fits(value: bool | None, out_of_memory: int, counted: int) -> str:
    if value is None:
        return text.MISSING
    return "yes" if value else f"no, in {out_of_memory} of {out_of_memory + counted}"


def _exclusion(value: str | None, detail: str | None) -> str:
    return text.MISSING if value is None else describe(value, detail)


def _counted(counted: int, runs: int, exclusions: str | None) -> str:
    return f"{counted} of {runs}" + ("" if counted else f": {exclusions}")


_WRITERS: dict[Show, Callable[..., str]] = {
    Show.PLAIN: _plain,
    Show.NUMBER: text.number,
    Show.PERCENT: text.percent,
    Show.MEBIBYTES: text.mebibytes,
    Show.SENT: text.sent,
    Show.MILLISECONDS: _milliseconds,
    Show.SCIENTIFIC: text.scientific,
    Show.CONFIGURATION: _configuration,
    Show.INTERVAL: _interval,
    Show.MEAN_AND_MAX: text.mean_and_max,
    Show.COUNTED: _counted,
    Show.KNOWN: _known,
    Show.PASSED: text.parity,
    Show.VERDICT: _verdict,
    Show.FITS: _fits,
    Show.EXCLUSION: _exclusion,
}


_BREAKS = str.maketrans({"\u00a0": " ", "\u2060": None, "\u00ad": None})
"""Marks for optional line breaks, which a terminal would show."""


def summary_table(runs: Runs) -> RichTable:
    """The summary for a terminal, 80 columns wide where names allow it: the same numbers, rounded."""
    from rich.table import Table as RichTable
    from rich.text import Text

    rows = summary(runs)
    groups = list(rows["group"].unique(maintain_order=True))
    name = runs.root.resolve().name
    title = " · ".join([name, *groups] if len(groups) == 1 else [name])
    shown = RichTable.grid()
    shown.title, shown.title_justify = Text(title, style="italic"), "left"
    shown.caption, shown.caption_justify = (
        "medians over runs; speed-up over the baseline, in brackets its 95 % interval; "
        "sent to other processes per step (by textbook), and peak memory: sums over all processes"
        + ("; nothing of runs with more devices than cores" if facts(runs)["oversubscribed"].any() else "")
        + (f"; {DISTURBED_MARK} others disturbed these runs" if rows["disturbed"].any() else ""),
        "left",
    )
    columns = brief_columns(of_programs=(rows["strategy"] == PROGRAM).all())
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


def _aligned(rows: list[list[str]], widths: dict[str, int], *, header: bool = False) -> RichTable:
    """A part of a table; parts with the same widths have the same columns."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    part = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=0, show_header=header)
    names, *numbers = widths.items()
    part.add_column(names[0].ljust(names[1]), overflow="fold", min_width=len(names[0]))
    for name, width in numbers:
        part.add_column(name, justify="right", no_wrap=True, min_width=width)
    for configuration, *others in rows:
        part.add_row(Text(configuration.ljust(names[1])), *others)
    return part


_FORMULA = r"^[=@\t\r]|^[+-].*[A-Za-z=@(|]"
"""Text that spreadsheets compute; a number with its sign is none."""


def _write_csv(frame: pl.DataFrame, path: Path) -> None:
    """Write a table; text that a spreadsheet would take for a formula begins with an apostrophe."""
    text = pl.col(pl.String)
    harmless = pl.when(text.str.contains(_FORMULA)).then("'" + text).otherwise(text).name.keep()
    without_tokens(frame, but=("run_id",)).with_columns(harmless).write_csv(path)
