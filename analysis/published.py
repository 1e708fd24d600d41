"""Reads a published result into polars frames, after its files were checked against the manifest."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
import polars.selectors as cs

from parallelbench.results.files import read_record
from parallelbench.results.tables import TABLES, TABLES_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from parallelbench.results.folder import RunFolder

Frames = dict[str, pl.DataFrame]

TYPES: dict[str, type[pl.DataType]] = {
    "string": pl.String,
    "int32": pl.Int32,
    "int64": pl.Int64,
    "float64": pl.Float64,
    "bool": pl.Boolean,
}
LATER = "telemetry"
"""The table that is read when first used."""
LOADED = tuple(table for table in TABLES if table != LATER)
INDISPENSABLE = {
    "run": ("run_id", "sweep", "config_json", "strategy", "devices", "nodes", "repeat", "train_samples"),
    "epochs": ("run_id", "steps"),
    "pushes": ("run_id", "staleness"),
    "phases": ("run_id", "rank", "step_time_s", "data_wait_s", "other_s"),
}
"""A result without these columns can't be read; other tables need `run_id` alone."""


class Unreadable(Exception):  # noqa: N818
    """A result that can't be read; the message says why, in one line."""


@dataclass(frozen=True)
class Published:
    """A finished run."""

    frames: Frames
    """By table, those of `LOADED`; exactly the columns of `table_schema`."""
    note: str = ""
    """The other version of the tables that it has, and which columns are null or ignored for that; else empty."""


def table_schema(table: str) -> dict[str, type[pl.DataType]]:
    """Name and type of each column of a frame of `analysis.reader.Runs`."""
    columns = {column.name: TYPES[column.type] for column in TABLES[table]}
    return columns | ({"state": pl.String, "folder": pl.String} if table == "run" else {})


def read_published(folder: RunFolder) -> Published:
    """The tables of a run's result.

    A result of another version of the tables loads, too: a column that it lacks is null, a column that this program
    doesn't know is ignored, and `note` names both. That is safe because a column never changes its meaning or unit: it
    would get another name. Raises `Unreadable` for what is damaged or not a result.
    """
    version = _schema_version(folder.result / "manifest.json")
    manifest = folder.manifest()
    if manifest is None:
        raise Unreadable("its result is damaged: a table is missing, or not as long as manifest.json says")
    written = manifest["tables"]
    differences: list[str] = sorted(f"{table} is unknown" for table in written.keys() - TABLES.keys())
    differences += [f"{table} is missing" for table in TABLES if table not in written]
    frames = {table: read_table(folder.result, table, written, differences) for table in LOADED}
    if differences and version == TABLES_VERSION:
        raise Unreadable(f"its result has other columns than tables version {version}: {', '.join(differences)}")
    if frames["run"].height != 1 or frames["run"]["run_id"].item() != manifest["run_id"]:
        raise Unreadable("its result is damaged: run.parquet is not the run that manifest.json names")
    frames["run"] = frames["run"].with_columns(state=pl.lit("done"), folder=pl.lit(str(folder.path)))
    note = f"tables version {version} (this program: {TABLES_VERSION}): {', '.join(differences) or 'the same columns'}"
    return Published(frames, note if version != TABLES_VERSION else "")


def _schema_version(manifest: Path) -> Any:
    try:
        return msgspec.json.decode(read_record(manifest))["schema_version"]
    except PermissionError:
        raise
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise Unreadable("its result is damaged: manifest.json is missing or unreadable") from None


def read_table(
    result: Path, table: str, written: dict[str, dict[str, Any]], differences: list[str] | None = None
) -> pl.DataFrame:
    """One table of a result, of which the manifest says `written`; empty where that has none.

    Which columns are missing or unknown is added to `differences`. Raises `Unreadable` where it is damaged.
    """
    if table not in written:
        return pl.DataFrame(schema=table_schema(table))
    content = (result / f"{table}.parquet").read_bytes()
    if hashlib.sha256(content).hexdigest() != written[table]["sha256"]:
        raise Unreadable(f"its result is damaged: the sha256 of {table}.parquet is not the manifest's")
    return _known_columns(pl.read_parquet(io.BytesIO(content)), table, [] if differences is None else differences)


def _known_columns(frame: pl.DataFrame, table: str, differences: list[str]) -> pl.DataFrame:
    """The table's columns in their order and type; adds what is missing or unknown to `differences`."""
    known = {column.name: TYPES[column.type] for column in TABLES[table]}
    missing = known.keys() - set(frame.columns)
    if lacking := sorted(missing & {*INDISPENSABLE.get(table, ("run_id",))}):
        raise Unreadable(f"{table}.parquet lacks {', '.join(lacking)}: the run or its measurements can't be identified")
    differences += [f"{table}.{name} is missing" for name in known if name in missing]
    differences += [f"{table}.{name} is unknown" for name in frame.columns if name not in known]
    columns = (pl.lit(None, kind).alias(n) if n in missing else pl.col(n).cast(kind) for n, kind in known.items())
    return finite(frame.select(columns))


def finite(frame: pl.DataFrame) -> pl.DataFrame:
    """The same without NaN and infinity: quotients of nothing, and what overflows, are null, as if not measured."""
    return frame.with_columns(pl.when(cs.float().is_finite()).then(cs.float()))
