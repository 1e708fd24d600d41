"""Published results as polars frames, their files checked against the manifest.

Results with the same columns are read together: one scan of each table for hundreds of runs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
import polars.selectors as cs

from parallelbench.config.build import MOVED
from parallelbench.redaction import MARKS, redacted
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
TOGETHER = 256
"""Most results that are read at once: their files are in memory meanwhile."""
PLACE = "place"
"""Column of the frames below: the place of a row's run among all folders that are read."""


class Unreadable(Exception):  # noqa: N818
    """A result that can't be read; the message says why, in one line."""


class Result(NamedTuple):
    """A finished run, whose files are what its manifest says."""

    place: int
    folder: RunFolder
    manifest: dict[str, Any]
    contents: dict[str, bytes]
    """The files of `LOADED` that the manifest names."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What results share whose tables probably have the same columns.

        Columns of an empty table are not compared when it is scanned, so these are told apart by their content.
        """
        tables = self.manifest["tables"].items()
        return self.manifest["schema_version"], *sorted((t, "" if e["rows"] else e["sha256"]) for t, e in tables)


def table_schema(table: str) -> dict[str, type[pl.DataType]]:
    """Name and type of each column of a frame of `analysis.runs.reader.Runs`."""
    columns = {column.name: TYPES[column.type] for column in TABLES[table]}
    return columns | ({"state": pl.String, "folder": pl.String} if table == "run" else {})


def placed_schema(table: str) -> dict[str, type[pl.DataType]]:
    """The same of a frame of this module: with `PLACE`, and in `run` the `note` of `read_together`.

    Without the folder: a copy may be moved, and its runs are where they are found.
    """
    columns = table_schema(table) | {PLACE: pl.Int64} | ({"note": pl.String} if table == "run" else {})
    columns.pop("folder", None)
    return columns


def verified(place: int, folder: RunFolder) -> Result:
    """A result, none of whose files is damaged; raises `Unreadable` where one is."""
    manifest = folder.manifest()
    if manifest is None:
        raise Unreadable(f"its result is damaged: {_why_no_manifest(folder.result / 'manifest.json')}")
    contents = {t: file_content(folder.result, t, manifest["tables"]) for t in LOADED if t in manifest["tables"]}
    return Result(place, folder, manifest, contents)


def _why_no_manifest(manifest: Path) -> str:
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        msgspec.json.decode(manifest.read_bytes())["schema_version"]
        return "a table is missing, or not as long as manifest.json says"
    return "manifest.json is missing or unreadable"


def file_content(result: Path, table: str, written: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A table's file, of which the manifest says `written`; raises `Unreadable` where its sha256 is another."""
    read = (result / f"{table}.parquet").read_bytes()
    if hashlib.sha256(read).hexdigest() != written[table]["sha256"]:
        raise Unreadable(f"its result is damaged: the sha256 of {table}.parquet is not the manifest's")
    return read


def read_table(result: Path, table: str, written: Mapping[str, Mapping[str, Any]]) -> pl.DataFrame:
    """One table of a result, of which the manifest says `written`; empty where that has none."""
    if table not in written:
        return pl.DataFrame(schema=table_schema(table))
    return known_columns(pl.read_parquet(io.BytesIO(file_content(result, table, written))), table, [])


def read_together(results: Sequence[Result]) -> Frames:
    """The tables of results of one `kind`.

    A result of another version of the tables loads, too: a column that it lacks is null, a column that this program
    doesn't know is ignored, and `note` names both. That is safe because a column never changes its meaning or unit: it
    would get another name. Raises `Unreadable` for what is not a result, and anything where several are not alike.
    """
    version, written = results[0].manifest["schema_version"], results[0].manifest["tables"]
    differences: list[str] = sorted(f"{table} is unknown" for table in written.keys() - TABLES.keys())
    differences += [f"{table} is missing" for table in TABLES if table not in written]
    frames = {table: _table(table, results, differences) for table in LOADED}
    if differences and version == TABLES_VERSION:
        raise Unreadable(f"its result has other columns than tables version {version}: {', '.join(differences)}")
    if frames["run"]["run_id"].to_list() != [result.manifest["run_id"] for result in results]:
        raise Unreadable("its result is damaged: run.parquet is not the run that manifest.json names")
    note = f"tables version {version} (this program: {TABLES_VERSION}): {', '.join(differences) or 'the same columns'}"
    note = note if version != TABLES_VERSION else ""
    frames["run"] = frames["run"].with_columns(state=pl.lit("done"), note=pl.lit(note)).select(*placed_schema("run"))
    return frames


def _table(table: str, results: Sequence[Result], differences: list[str]) -> pl.DataFrame:
    if table not in results[0].contents:
        return pl.DataFrame(schema=placed_schema(table))
    contents = [result.contents[table] for result in results]
    # A later file with other columns raises.
    frame = pl.scan_parquet(contents, schema=pl.read_parquet_schema(io.BytesIO(contents[0]))).collect()
    frame = known_columns(frame, table, differences)
    rows = [result.manifest["tables"][table]["rows"] for result in results] if len(results) > 1 else [frame.height]
    if sum(rows) != frame.height:
        raise Unreadable(f"{table}.parquet has other rows than manifest.json says")
    number = np.repeat(np.arange(len(results)), rows)
    if len(results) > 1 and not frame["run_id"].equals(pl.Series([r.manifest["run_id"] for r in results])[number]):
        raise Unreadable(f"{table}.parquet has rows of another run")
    return frame.with_columns(pl.Series(PLACE, np.array([result.place for result in results])[number]))


def known_columns(frame: pl.DataFrame, table: str, differences: list[str]) -> pl.DataFrame:
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


def of_today() -> pl.Expr:
    """Configurations whose classes are named by where they stand today."""
    old, new = ([f'"_target_":"{name}"' for name in names] for names in (MOVED, MOVED.values()))
    return pl.col("config_json").str.replace_many(old, new)


def without_tokens(frame: pl.DataFrame, *, but: tuple[str, ...] = ("run_id", "folder")) -> pl.DataFrame:
    """The same table, redacted, `but` for these columns: run ids and folders are what runs are found by."""
    texts = [name for name, kind in frame.schema.items() if kind == pl.String and name not in but]
    marked = frame.select(pl.col(texts).str.contains_any(list(MARKS)).any()).row(0) if texts else ()
    found = [name for name, is_marked in zip(texts, marked, strict=True) if is_marked]
    return frame.with_columns(pl.col(name).map_elements(redacted, pl.String) for name in found) if found else frame


_WITH_TEXT = ("run", "checks")
"""Tables with more than numbers and names of devices."""

Scans = Mapping[str, pl.LazyFrame]
"""By table, those of `LOADED`."""


class Tables(Mapping[str, pl.DataFrame]):
    """The tables of `LOADED` by name, each read at its first use."""

    def __init__(self, scans: Scans) -> None:
        self.scans = scans
        self._frames: Frames = {}

    def select(self, table: str, columns: Sequence[str]) -> pl.DataFrame:
        """Some columns of a table; unless the whole was read before, no others are read."""
        if table in self._frames:
            return self._frames[table].select(columns)
        frame = self.scans[table].select(columns).collect()
        return without_tokens(frame) if table in _WITH_TEXT else frame  # older releases recorded what they found

    def __getitem__(self, table: str) -> pl.DataFrame:
        if table not in self._frames:
            self._frames[table] = self.select(table, list(self.scans[table].collect_schema()))
        return self._frames[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scans)

    def __len__(self) -> int:
        return len(self.scans)
