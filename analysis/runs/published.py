"""Published results as polars frames, their files checked against the manifest.

Results with the same columns are read together: one scan of each table for hundreds of runs.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import polars as pl
import polars.selectors as cs

from parallelbench.redaction import MARKS, redacted
from parallelbench.results.files import is_there
from parallelbench.results.folder import Manifest
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
TOGETHER = 256
"""Most results that are read at once: their files are in memory meanwhile."""
_DAMAGED = "its result is damaged"


class Unreadable(Exception):  # noqa: N818
    """A result that can't be read; the message says why, in one line."""


class Result(NamedTuple):
    """A finished run, whose files are what its manifest says."""

    folder: RunFolder
    manifest: Manifest
    contents: dict[str, bytes]
    """The files of `LOADED`."""

    @property
    def kind(self) -> tuple[tuple[str, str], ...]:
        """What results share whose tables probably have the same columns.

        Columns of an empty table are not compared when it is scanned, so these are told apart by their content.
        """
        return tuple(sorted((t, "" if e.rows else e.sha256) for t, e in self.manifest.tables.items()))


def stored_schema(table: str) -> dict[str, type[pl.DataType]]:
    """Name and type of each column of a stored table; of `run`, with its `state`."""
    columns = {column.name: TYPES[column.type] for column in TABLES[table]}
    return columns | ({"state": pl.String} if table == "run" else {})


def table_schema(table: str) -> dict[str, type[pl.DataType]]:
    """The same of a frame of `analysis.runs.reader.Runs`, whose runs have a `folder`."""
    return stored_schema(table) | ({"folder": pl.String} if table == "run" else {})


def manifest_bytes(folder: RunFolder) -> bytes | None:
    """The content of a result's manifest, empty where that is missing; None where there is no result.

    Raises `OSError` where a permission is missing.
    """
    try:
        with open(f"{folder.path}/result/manifest.json", "rb", buffering=0) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        # A result appears whole, by one rename; an invalid one was damaged later.
        return b"" if is_there(folder.result) else None


def decoded_manifest(manifest: bytes) -> Manifest:
    """A result's manifest; raises `Unreadable` where it is damaged, or another version wrote it."""
    try:
        known = msgspec.json.decode(manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Unreadable(f"{_DAMAGED}: manifest.json is missing or unreadable") from None
    if known.schema_version != TABLES_VERSION:
        raise Unreadable(
            f"its result is of version {known.schema_version} of the tables, and this program reads version "
            f"{TABLES_VERSION}: read it with the release that wrote it, or forget the run and submit it again"
        )
    if known.tables.keys() != TABLES.keys():
        raise Unreadable(f"{_DAMAGED}: manifest.json names other tables than {', '.join(TABLES)}")
    return known


def verified(folder: RunFolder, manifest: bytes) -> Result:
    """A result, none of whose files is damaged; raises `Unreadable` where one is, or another version wrote it."""
    known = decoded_manifest(manifest)
    return Result(folder, known, {table: file_content(folder.result, table, known) for table in LOADED})


def require_sizes(folder: RunFolder, manifest: bytes) -> None:
    """Raise `Unreadable` where a file of a result has not the size that its manifest names: a glance, which reads none.

    The sizes of 10,000 results take 0.3 s of a core; the sha256 of their files 1.8 s from memory, and from a disk most
    of what a copy saves.
    """
    known, result = decoded_manifest(manifest), f"{folder.path}/result"
    for table in LOADED:
        try:
            size_bytes = os.stat(f"{result}/{table}.parquet").st_size  # with paths it takes twice as long
        except FileNotFoundError:
            raise Unreadable(f"{_DAMAGED}: {table}.parquet is missing") from None
        _require_size(table, size_bytes, known)


def _require_size(table: str, size_bytes: int, manifest: Manifest) -> None:
    if size_bytes != (named := manifest.tables[table].bytes):
        raise Unreadable(f"{_DAMAGED}: {table}.parquet has {size_bytes:,} bytes, and its manifest names {named:,}")


def file_content(result: Path, table: str, manifest: Manifest) -> bytes:
    """A table's file; raises `Unreadable` where it is missing, or its size or sha256 is not the manifest's."""
    try:
        read = (result / f"{table}.parquet").read_bytes()
    except FileNotFoundError:
        raise Unreadable(f"{_DAMAGED}: {table}.parquet is missing") from None
    _require_size(table, len(read), manifest)
    if hashlib.sha256(read).hexdigest() != manifest.tables[table].sha256:
        raise Unreadable(f"{_DAMAGED}: the sha256 of {table}.parquet is not the manifest's")
    return read


def read_table(result: Path, table: str, manifest: Manifest) -> pl.DataFrame:
    """One table of a result; raises `Unreadable` where it is damaged."""
    return _declared(pl.read_parquet(io.BytesIO(file_content(result, table, manifest))), table)


def read_together(results: Sequence[Result]) -> Frames:
    """The tables of results of one `kind`, each of another run.

    Raises `Unreadable` for what is not a result, and anything where several are not alike.
    """
    run_ids = [result.manifest.run_id for result in results]
    frames = {table: _table(table, results) for table in LOADED}
    if frames["run"]["run_id"].to_list() != run_ids or len(set(run_ids)) < len(run_ids):
        raise Unreadable(f"{_DAMAGED}: run.parquet has not one row")
    frames["run"] = frames["run"].with_columns(state=pl.lit("done"))
    return frames


def _table(table: str, results: Sequence[Result]) -> pl.DataFrame:
    contents = [result.contents[table] for result in results]
    # A later file with other columns raises.
    frame = pl.scan_parquet(contents, schema=pl.read_parquet_schema(io.BytesIO(contents[0]))).collect()
    frame = _declared(frame, table)
    rows = [result.manifest.tables[table].rows for result in results] if len(results) > 1 else [frame.height]
    expected = pl.Series([result.manifest.run_id for result in results])[np.repeat(np.arange(len(results)), rows)]
    if not frame["run_id"].equals(expected):
        raise Unreadable(f"{_DAMAGED}: {table}.parquet has rows of another run")
    return frame


def _declared(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    """The table's columns in their order; raises `Unreadable` where it has others, or of another type."""
    declared = {column.name: TYPES[column.type] for column in TABLES[table]}
    unlike = [f"{table}.{name} is missing" for name in declared if name not in frame.schema]
    unlike += [f"{table}.{name} is unknown" for name in frame.schema if name not in declared]
    unlike += [
        f"{table}.{name} is {kind} instead of {declared[name]}"
        for name, kind in frame.schema.items()
        if name in declared and kind != declared[name]
    ]
    if unlike:
        raise Unreadable(f"its result has other columns than this program's: {', '.join(unlike)}")
    return finite(frame.select(*declared))


def finite(frame: pl.DataFrame) -> pl.DataFrame:
    """The same without NaN and infinity: quotients of nothing, and what overflows, are null, as if not measured."""
    return frame.with_columns(pl.when(cs.float().is_finite()).then(cs.float()))


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
        return without_tokens(frame) if table in _WITH_TEXT else frame

    def __getitem__(self, table: str) -> pl.DataFrame:
        if table not in self._frames:
            self._frames[table] = self.select(table, list(self.scans[table].collect_schema()))
        return self._frames[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scans)

    def __len__(self) -> int:
        return len(self.scans)
