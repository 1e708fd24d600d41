"""What is said of a column of a table: what it is, what follows from it, how it is shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator


Type = Literal["", "string", "int32", "int64", "float64", "bool"]
"""As Arrow names it; empty: what the end of the name says."""
Unit = Literal["s", "h", "bytes", "samples/s", "tokens/s", "bytes/s", "flop/s", "J", "W", "Hz", "°C", "g", "share"]
"""A share is from 0 to 1."""
Place = Literal["configurations", "energy", "runs", "pairs"]
"""A table of the report's page."""
Window = Literal["first", "second", "steady", "whole"]
"""Epochs of a run that are judged together: its first one, its second, all but each attempt's first, or all of them."""
_BY_END: dict[str, tuple[Type, Unit | None]] = {
    "samples_per_s": ("float64", "samples/s"),
    "tokens_per_s": ("float64", "tokens/s"),
    "bytes_per_s": ("float64", "bytes/s"),
    "flop_per_s": ("float64", "flop/s"),
    "_s": ("float64", "s"),
    "_at": ("float64", "s"),
    "_bytes": ("int64", "bytes"),
    "_bytes_sent": ("int64", "bytes"),
    "_j": ("float64", "J"),
    "_w": ("float64", "W"),
    "_hz": ("float64", "Hz"),
    "_c": ("float64", "°C"),
    "_g": ("float64", "g"),
    "_samples": ("int64", None),
    "_correct": ("int64", None),
    "_rows": ("int64", None),
    "": ("float64", None),
}
"""What the end of a name says; the first that fits counts."""


class Over(StrEnum):
    """How several values become one.

    A sum or mean is null where one value is; all others are of the values that are known.
    """

    SUM = "sum"
    MEAN = "mean"
    MEDIAN = "median"
    MAX = "largest"
    MIN = "smallest"
    LAST = "last"
    ANY = "any"
    BITS = "all bits"
    FLAGS = "all flags"
    """The words that occur in any of them."""
    FIRST = "first known"
    SAME = "the same in all"

    def type_of(self, values: Type) -> Type:
        """The type of what becomes of values of a type."""
        return "float64" if self in (Over.MEDIAN, Over.MEAN) else values


class Show(StrEnum):
    """How a value is written in a table; `analysis.report.tables` has the function of each."""

    PLAIN = "plain"
    NUMBER = "number"
    """Three significant digits."""
    PERCENT = "percent"
    MEBIBYTES = "mebibytes"
    SENT = "sent"
    """Bytes in MiB, three digits however few they are."""
    MILLISECONDS = "milliseconds"
    """Of seconds, three significant digits."""
    SCIENTIFIC = "scientific"
    CONFIGURATION = "configuration"
    INTERVAL = "interval"
    """A ratio; beside it, its lower and its upper end."""
    MEAN_AND_MAX = "mean-and-max"
    COUNTED = "counted"
    """So many runs; beside them, of how many, and their outcomes."""
    KNOWN = "known"
    """The value; where it is null, the one beside it."""
    PASSED = "passed"
    """Passed, failed or not checked."""
    VERDICT = "verdict"
    """Beside it, the pairs that it rests on."""
    FITS = "fits"
    """Whether it fits in memory; beside it, how many runs were out of memory, and how many count."""
    EXCLUSION = "exclusion"
    """Why a run doesn't count; beside it, the run's own detail."""


@dataclass(frozen=True)
class Column:
    """One number: what it is, what follows from it, and how it is shown."""

    name: str
    meaning: str
    type: Type = ""
    unit: Unit | None = None
    """Like `type`, the end of the name says it, where that has one."""
    null: str | None = None
    """What null means; None: it is never null."""
    over: Over | None = None
    """How the values of the column `of` become this one; None: it is measured, or a formula."""
    of: str = ""
    """The column that it follows from, of the same table. It has that one's type, unit and, unless told, null."""
    steady: bool = False
    """Each attempt's first epoch, which warms up, doesn't count."""
    window: Window | None = None
    """The epochs that it is measured in: where others disturbed these, it is shown, and compared with nothing. Of a
    column of each epoch, "steady" stands for the window that the epoch lies in. None: others don't change it.
    """
    into: tuple[Column, ...] = ()
    """What follows from this column: over the ranks of an epoch, the epochs of a run, or a run's rows."""
    repeats: Over | None = None
    """How the runs of a configuration become a row of `summary`; None: it has no such column."""
    excluded_too: bool = False
    """Excluded runs count in this aggregate, too."""
    heading: str = ""
    """In the tables of the page, without the unit; empty: in none."""
    tables: tuple[Place, ...] = ("configurations", "runs")
    """Those that show it, where there is a heading."""
    where_known: bool = False
    """Those show it only where one of their rows has a value."""
    show: Show | None = None
    """None: by unit and type."""
    beside: tuple[str, ...] = ()
    """Further columns that its text is made of."""
    brief: str = ""
    """Heading on the terminal; empty: not there."""

    def __post_init__(self) -> None:
        if not self.type:
            arrow, unit = next(said for end, said in _BY_END.items() if self.name.endswith(end))
            object.__setattr__(self, "type", arrow)
            object.__setattr__(self, "unit", self.unit or unit)

    @property
    def nullable(self) -> bool:
        """Whether it may be null."""
        return self.null is not None

    @property
    def doc(self) -> str:
        """The meaning, and what null means."""
        return self.meaning if self.null is None else f"{self.meaning}; null: {self.null}"

    @property
    def shown(self) -> Show:
        """How it is written in tables."""
        by_unit = {"share": Show.PERCENT, "bytes": Show.MEBIBYTES}
        return self.show or by_unit.get(self.unit or "", Show.NUMBER if self.type == "float64" else Show.PLAIN)

    @property
    def title(self) -> str:
        """The heading with the unit that is shown."""
        unit = {"share": None, "bytes": "MiB"}.get(self.unit or "", self.unit)
        unit = "ms" if self.shown is Show.MILLISECONDS else unit
        return f"{self.heading} ({unit})" if unit else self.heading

    @property
    def numeric(self) -> bool:
        """Whether it is written flush right, as numbers are."""
        return self.type not in ("string", "bool")

    def derived(self, depth: int = 1) -> Iterator[tuple[Column, Column]]:
        """The columns derived from this one in `depth` steps, each with its source column."""
        for column in self.into:
            if depth == 1:
                yield self, column
            else:
                yield from column.derived(depth - 1)


text = partial(Column, type="string")
count = partial(Column, type="int32")
flag = partial(Column, type="bool")
share = partial(Column, type="float64", unit="share")
"""Columns whose names don't end in what they are."""


def table_of(*columns: Column) -> tuple[Column, ...]:
    """The columns of a table, each with those that follow from it."""

    def whole(column: Column) -> Column:
        into = [whole(inherited(column, each)) for each in columns if each.of == column.name]
        return replace(column, into=(*column.into, *into)) if into else column

    def inherited(source: Column, column: Column) -> Column:
        assert column.over, column
        return replace(column, type=column.over.type_of(source.type), unit=source.unit, null=column.null or source.null)

    unknown = {column.of for column in columns} - {"", *(column.name for column in columns)}
    assert not unknown, f"{unknown} are declared nowhere"
    return tuple(whole(column) for column in columns if not column.of)
