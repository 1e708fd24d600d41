"""The verbs' output: a console, tables of a few rows or of thousands, and what `--json` prints (docs/json.md)."""

from __future__ import annotations

import json
import os
import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from parallelbench.results.folder import require_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType

    from analysis.claims.verdict import Case, Judgement
    from analysis.comparison.gate import Gate
    from analysis.comparison.history import History, Outcome
    from analysis.comparison.ratio import Ratio
    from analysis.comparison.sides import Compared, Comparison
    from launch.states import SweepStatus
    from parallelbench.config.run import RunConfig


WIDTH = 160
"""Columns of output that goes to no terminal, and where COLUMNS says nothing: rich would cut it to 80."""


class _Console(Console):
    """One that leaves it to the caller what follows where the reader of a pipe has closed it."""

    def on_broken_pipe(self) -> None:
        """Called where `BrokenPipeError` is handled; rich would end the program as if it had failed."""
        raise


def console() -> Console:
    """Standard output."""
    columns = os.environ.get("COLUMNS", "")
    asked = columns.isascii() and columns.isdigit() and int(columns) > 0
    return _Console() if sys.stdout.isatty() else _Console(width=int(columns) if asked else WIDTH)


def say(text: str) -> None:
    """Print a line as it is."""
    console().print(text, highlight=False, markup=False, soft_wrap=True)


def existing(folder: str) -> Path:
    """The folder that was named; raises `ConfigError` where there is none, or it may not be read."""
    path = Path(folder).expanduser()
    require_folder(path)
    return path


MANY = 200
"""Longer tables are printed without folding: rich takes 0.3 ms to lay out each row."""


def listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """A table whose cells are in rich's markup; where it is wider than the terminal, a few lines for each row.

    Print it with `crop=False`: long ones have lines of any length, and the first cell of a row is never cut.
    """
    if len(rows) > MANY:
        return _Lines([[f"[bold]{column}[/]" for column in columns], *rows])
    return _Listing(columns, rows)


class _Listing:
    """A table, or below each row's first cell the others with their headings."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._columns, self._rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = Table(box=None, header_style="bold")
        for column in self._columns:
            table.add_column(column, overflow="fold")
        for row in self._rows:
            table.add_row(*row)
        if Measurement.get(console, options.update(max_width=_ENDLESS), table).maximum <= options.max_width:
            yield table
            return
        for first, *others in self._rows:
            yield _uncut(first)
            known = zip(self._columns[1:], others, strict=True)
            words = [f"[dim]{name.replace(chr(10), ' ')}[/] {cell}" for name, cell in known if cell not in ("", "–")]
            yield Padding(Text.from_markup(" · ".join(words)), (0, 0, 0, 4))


def _uncut(words: str) -> Text:
    text = Text.from_markup(words, overflow="ignore")
    text.no_wrap = True
    return text


_ENDLESS = 10_000


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


VERSION = 3
"""Rises when a field is renamed or removed, or changes its meaning; new fields don't raise it."""


def print_json(kind: str, **fields: Any) -> None:
    """Print one object; infinity and NaN, which JSON can't hold, are null."""
    print(json.dumps({"kind": kind, "version": VERSION, **{name: _finite(value) for name, value in fields.items()}}))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def plan_row(run: RunConfig, name: str, *, state: str, reason: str, processes: int | None) -> dict[str, Any]:
    """One run of a plan; `state` is refused, missing, running, or an outcome."""
    return {
        "run": name,
        "folder": str(run.sweep_folder / name),
        "data": run.data.name,
        "model": run.model.name,
        "strategy": run.strategy.name,
        "devices": run.devices,
        "device": run.device,
        "nodes": run.nodes,
        "epochs": run.epochs,
        "repeat": run.repeat,
        "processes": processes,
        "state": state,
        "reason": reason or None,
    }


def print_status(view: SweepStatus) -> None:
    """`parallelbench status DIR --json`."""
    runs = [
        {
            "folder": str(folder.path),
            "state": status.label,
            "reason": status.reason or None,
            "attempt": status.state.attempt or None,
            "job": status.job or None,
            "disturbed": None if view.disturbed is None else folder in view.disturbed,
        }
        for folder, status in view.runs.items()
    ]
    print_json("status", live=view.live, runs=runs, notes=list(view.notes))


def print_comparison(comparison: Comparison, notes: Sequence[str], gate: Gate | None) -> None:
    """`parallelbench compare … --json`; `gate`: the result of `--fail-if-slower`."""
    print_json(
        "comparison",
        configurations=[_compared(row) for row in comparison.rows],
        all=_judged(comparison.overall, comparison),
        only_a=list(comparison.only_a),
        only_b=list(comparison.only_b),
        gate=None if gate is None else {"exit_code": gate.code, "message": gate.message},
        notes=list(notes),
    )


def _compared(row: Compared) -> dict[str, Any]:
    from analysis.comparison.sides import RATE, TIME

    medians = {"a_epoch_time_s": row.a[TIME], "b_epoch_time_s": row.b[TIME]}
    medians |= {"a_samples_per_s": row.a[RATE], "b_samples_per_s": row.b[RATE]}
    named = {"group": row.group, "configuration": row.configuration}
    return named | medians | _judged(row.time, row)


def _judged(ratio: Ratio | None, found: Compared | Comparison) -> dict[str, Any]:
    """B ÷ A of the time, or of the time per sample, with its 95 % interval, and the verdict."""
    names = ("ratio", "low", "high", "pairs")
    known = (ratio.median, ratio.low, ratio.high, ratio.n) if ratio else (None, None, None, 0)
    verdict: dict[str, Any] = {"verdict": found.verdict.value, "further_repeats": found.further_repeats}
    return dict(zip(names, known, strict=True)) | {"per_sample": found.per_sample} | verdict


def print_history(found: History, outcome: Outcome) -> None:
    """`parallelbench history … --json`."""
    from analysis.comparison.history import rows

    print_json(
        "history",
        metric=found.metric.column.name,
        configuration=found.configuration,
        more_is_worse=found.metric.more_is_worse,
        points=list(rows(found)),
        exit_code=outcome.code,
        message=outcome.message,
        notes=list(found.notes),
    )


def print_claims(judgements: Iterable[Judgement], notes: Sequence[str]) -> None:
    """`parallelbench claims DIR --json`."""
    print_json("claims", claims=[_judgement(each) for each in judgements], notes=list(notes))


def _judgement(judgement: Judgement) -> dict[str, Any]:
    claim = judgement.claim
    return {
        "publication": judgement.seed,
        "claim": claim.name,
        "quote": claim.quote,
        "metric": claim.metric,
        "compare": claim.compare,
        "verdict": judgement.verdict,
        "why": judgement.why or None,
        "cases": [_case(case) for case in judgement.cases],
    }


def _case(case: Case) -> dict[str, Any]:
    return {
        "where": case.where,
        "step": case.step,
        "device": case.device,
        "effect": case.median,
        "low": case.low,
        "high": case.high,
        "repeats": len(case.effects),
        "verdict": case.verdict,
        "lacks": case.lacks or None,
        "runs": list(case.runs),
        "warnings": list(case.warnings),
    }
