"""How a number is declared: one `Column` says its name, type, unit and meaning, how it aggregates, and how it is shown.

All else follows from these declarations: the Arrow schemas, docs/results.md, the columns of `per_epoch`, `per_run` and
`summary`, the tables and tooltips of the report, of the terminal and of LaTeX.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Type = Literal["string", "int32", "int64", "float64", "bool"]
"""As Arrow names it."""
Unit = Literal["s", "h", "bytes", "samples/s", "tokens/s", "bytes/s", "flop/s", "J", "W", "Hz", "°C", "share"]
"""The name says it, too (`_s`, `_bytes`, …). A share is from 0 to 1."""
Place = Literal["configurations", "energy", "runs"]
"""A table of the report's page."""


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
    BITS = "all bits"
    FLAGS = "all flags"
    """The words that occur in any of them."""
    FIRST = "first known"
    SAME = "the same in all"


class Show(StrEnum):
    """How a value is written in a table; `analysis.cells` has the function of each."""

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
    EXCLUSION = "exclusion"
    """Why a run doesn't count; beside it, the run's own detail."""


@dataclass(frozen=True)
class Column:
    """One number: what it is, what follows from it, and how it is shown."""

    name: str
    type: Type
    meaning: str
    unit: Unit | None = None
    null: str | None = None
    """What null means; None: it is never null."""
    over: Over | None = None
    """How the values of the column that this one follows from become one; None: it is measured, or a formula."""
    steady: bool = False
    """Each attempt's first epoch, which warms up, doesn't count."""
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
        """The columns derived from this one in `steps` steps, each with its source column."""
        for column in self.into:
            if depth == 1:
                yield self, column
            else:
                yield from column.derived(depth - 1)


KEYS = (
    Column("run_id", "string", "sha256 of what defines the experiment"),
    Column(
        "attempt",
        "int32",
        "the attempt that measured this, in `run` the one that published it; counts from 1",
        heading="Attempt",
        tables=("runs",),
    ),
)
"""The first columns of every table."""
EPOCH = Column("epoch", "int32", "counts from 1")
