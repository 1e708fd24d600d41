"""The cells of the page's, the terminal's and LaTeX's tables: each number as its column's declaration says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from analysis import text
from analysis.comparison.exclusions import Exclusion, describe
from analysis.comparison.speed import SpeedVerdict
from parallelbench.results.tables import Show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from parallelbench.results.tables import Column


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


DISTURBED_MARK = "*"
"""After the times of runs that others disturbed."""
_OF_TIME = ("s", "h", "samples/s", "tokens/s", "J", "W")
_BY_TIME = ("mfu", "least_flop_per_s")
"""Units of what other programs change, and columns of other units that are made from such."""


def _shown(row: Mapping[str, Any], column: Column) -> str:
    words = _WRITERS[column.shown](*(row[name] for name in (column.name, *column.beside)))
    changed = column.unit in _OF_TIME or column.name in _BY_TIME
    marked = changed and row[column.name] is not None and is_disturbed(row)
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


def _verdict(value: str | None, pairs: int) -> str:
    if value == SpeedVerdict.TOO_FEW:
        return f"{value}: n={pairs}"
    return _plain(value).replace("indistinguishable", "indistin\u00adguishable")  # where it may break


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
    Show.EXCLUSION: _exclusion,
}
