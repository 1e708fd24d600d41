"""One run as experiment trackers see it: parameters, tags, and numbers by epoch and of the whole run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.configurations import facts
from analysis.metrics import per_epoch
from analysis.metrics.schema import facts_columns, tables_columns
from parallelbench.config.build import completed
from parallelbench.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from analysis.reader import Runs
    from parallelbench.results.tables import Column

_NUMBERS = ("int32", "int64", "float64")
_NO_TAGS = ("displayed",)
"""Texts that say nothing of the run by itself."""


@dataclass(frozen=True)
class ExportedEpoch:
    """One epoch's row of the report's `tables/epochs.csv`."""

    epoch: int
    """Counts from 1; the step."""
    finished_at: float
    """Unix time."""
    numbers: Mapping[str, float]
    """Column → value; null ones are left out."""


@dataclass(frozen=True)
class ExportedRun:
    """A finished run. Its numbers are those of the report's tables, by the same names, which have the units."""

    run_id: str
    sweep: str
    name: str
    """The run's folder, and why it does not count, if it does not."""
    started_at: float
    """Unix time."""
    parameters: Mapping[str, Any]
    """Key of the configuration → value."""
    tags: Mapping[str, str]
    """Outcome, parity check and other words of the table of runs; `counts` is "true" or "false"."""
    numbers: Mapping[str, float]
    """Column of the table of runs → value; null ones are left out."""
    epochs: tuple[ExportedEpoch, ...]


def exported_runs(runs: Runs) -> list[ExportedRun]:
    """The runs that trained to their end, in the report's order; others have no final numbers."""
    epochs = {run_id: rows for (run_id,), rows in per_epoch(runs).sort("epoch").group_by("run_id", maintain_order=True)}
    finished = facts(runs).filter(pl.col("state") == "done")
    return [_exported(row, epochs.get(row["run_id"])) for row in finished.iter_rows(named=True)]


def _exported(row: Mapping[str, Any], rows: pl.DataFrame | None) -> ExportedRun:
    columns = tables_columns()["epochs"]
    epochs = tuple(
        ExportedEpoch(each["epoch"], each["finished_at"], _numbers(each, columns))
        for each in (rows.iter_rows(named=True) if rows is not None else ())
    )
    first = epochs[0].finished_at if epochs else 0.0
    marked = f" ({row['exclusion']})" if row["exclusion"] else ""
    return ExportedRun(
        run_id=row["run_id"],
        sweep=row["sweep"],
        name=f"{row['slug']}{marked}",
        started_at=first if row["launched_at"] is None else row["launched_at"],
        parameters=dict(_flat(completed(json.loads(row["config_json"])))),
        tags=_tags(row),
        numbers=_numbers(row, facts_columns()),
        epochs=epochs,
    )


def _numbers(row: Mapping[str, Any], columns: Iterable[Column]) -> dict[str, float]:
    return {c.name: row[c.name] for c in columns if c.type in _NUMBERS and row[c.name] is not None}


def _tags(row: Mapping[str, Any]) -> dict[str, str]:
    """Words and yes-or-no columns. Long JSON (environment, layers) stays in the run's folder, which is named."""
    kept = [
        column.name
        for column in facts_columns()
        if column.type not in _NUMBERS and not column.name.endswith("_json") and column.name not in _NO_TAGS
    ]
    tags = {name: _word(row[name]) for name in kept if row[name] is not None}
    return tags | {"counts": _word(row["exclusion"] is None), "folder": redacted(row["folder"])}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else redacted(str(value))


def _flat(node: Any, above: str = "") -> Iterable[tuple[str, Any]]:
    """Keys as on the command line; a list is one value, as JSON."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value) if isinstance(value, (dict, list)) else value
