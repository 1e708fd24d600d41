"""Published results as polars frames, their files checked against the manifest; and a compacted copy of them.

Results with the same columns are read together: one scan of each table for hundreds of runs.

The copy is one file per sweep instead of several per run, so that thousands of runs load fast. It is a cache. A run is
read from it only while the files of its `result/` have the name, size, time and inode that they had when they were
copied; every other run is read from its own folder. So an old, damaged or missing copy costs time, never correctness.
It is written under a temporary name and renamed; in a read-only folder or on a full disk loading works without it.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import time
import uuid
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
import polars.selectors as cs

from parallelbench.config.build import MOVED
from parallelbench.redaction import MARKS, redacted
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
        msgspec.json.decode(read_record(manifest))["schema_version"]
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


class Found(NamedTuple):
    """A run that was read, from the copy or from its folder."""

    folder: RunFolder
    run_id: str
    state: str
    note: str
    """The other version of the tables that it has, and which columns are null or ignored for that; else empty."""


class Collection:
    """All runs of some folders, from copies where those are up to date.

    `read_unfinished` reads a run without a result: its tables, with its `state` in `run`.
    """

    def __init__(self, folders: Sequence[RunFolder], read_unfinished: Callable[[RunFolder], Frames]) -> None:
        self._folders = folders
        self._read_unfinished = read_unfinished
        self.errors: list[tuple[Path, Exception]] = []
        """The folders that could not be read."""
        homes: dict[Path, list[int]] = defaultdict(list)
        for place, folder in enumerate(folders):
            homes[folder.path.parent].append(place)
        self._parts = [part for home, places in homes.items() for part in self._sweep(home, places)]
        runs = _joined(self._parts, "run").select(PLACE, "run_id", "state", "note").collect()
        self._in_order = runs[PLACE].is_sorted()
        self.found = [Found(folders[place], *run) for place, *run in runs.sort(PLACE).iter_rows()]
        """Every run that was read, in the order of the folders."""

    def tables(self, kept: set[Path]) -> Tables:
        """The tables of the runs in these folders, run by run in the order of all; a run's rows keep theirs."""
        scans = {table: _joined(self._parts, table) for table in LOADED}
        if not self._in_order:
            scans = {table: rows.sort(PLACE, maintain_order=True) for table, rows in scans.items()}
        if len(kept) < len(self.found):
            places = [place for place, folder in enumerate(self._folders) if folder.path in kept]
            scans = {table: rows.filter(pl.col(PLACE).is_in(places)) for table, rows in scans.items()}
        paths = pl.lit(pl.Series([str(folder.path) for folder in self._folders], dtype=pl.String))
        scans["run"] = scans["run"].with_columns(of_today(), folder=paths.gather(PLACE))
        return Tables({table: rows.select(*table_schema(table)) for table, rows in scans.items()})

    def _sweep(self, home: Path, places: list[int]) -> list[Scans]:
        """The runs of a sweep that its copy has, and the others; where that pays, they become a new copy."""
        if len(places) < FEWEST_RUNS:
            return [self._read(places)]
        started = time.time()
        # Before they are read: if one changes in between, the copy has an old fingerprint and is never used.
        now = {place: fingerprint(f"{self._folders[place].path}/result") for place in places}
        found = {(self._folders[place].path.name, digest): place for place, (digest, _) in now.items()}
        copy = open_copy(home)
        old = copy["run"].select("name", "fingerprint", PLACE).collect().rows() if copy else []
        new = {was: found.get((name, digest)) for name, digest, was in old}
        parts: list[Scans] = [{table: _renumbered(copy[table], table, new) for table in LOADED}] if copy else []
        copied = {place for place in new.values() if place is not None}
        parts.append(self._read([place for place in places if place not in copied]))
        done = parts[-1]["run"].filter(pl.col("state") == "done").collect()[PLACE]
        settled = [place for place in done if now[place][1] < started - SETTLED_S]
        if len(settled) + len(new) - len(copied) >= max(WORTH_RUNS, WORTH_SHARE * len(new)):
            kept = {*copied, *settled}
            with suppress(OSError):
                _write(home, parts, [(*entry, place) for entry, place in found.items() if place in kept])
        return parts

    def _read(self, places: Sequence[int]) -> Scans:
        """Runs from their own folders."""
        read: list[Frames] = []
        for start in range(0, len(places), TOGETHER):
            alike: dict[Any, list[Result]] = defaultdict(list)
            for place in places[start : start + TOGETHER]:
                folder = self._folders[place]
                try:
                    # A result appears whole, by one rename; an invalid one was damaged later.
                    if _exists(folder.result):
                        result = verified(place, folder)
                        alike[result.kind].append(result)
                    else:
                        at = pl.lit(place, pl.Int64).alias(PLACE)
                        frames = self._read_unfinished(folder)
                        read.append({table: rows.with_columns(at) for table, rows in frames.items()})
                except Exception as error:  # a foreign or damaged folder may raise anything: report it and go on
                    self.errors.append((folder.path, error))
            read += [frames for results in alike.values() for frames in self._read_alike(results)]
        none = {table: pl.DataFrame(schema=placed_schema(table)) for table in LOADED}
        return {t: pl.concat(each[t] for each in (none, *read)).sort(PLACE, maintain_order=True).lazy() for t in LOADED}

    def _read_alike(self, results: list[Result]) -> list[Frames]:
        """Results of one kind; where they are not alike after all, or one can't be read, each half by itself."""
        try:
            return [read_together(results)]
        except Exception as error:
            if len(results) == 1:
                self.errors.append((results[0].folder.path, error))
                return []
        half = len(results) // 2
        return self._read_alike(results[:half]) + self._read_alike(results[half:])


def _exists(result: Path) -> bool:
    """Raises where a permission is missing."""
    with suppress(FileNotFoundError):
        os.stat(result)
        return True
    return False


def _joined(parts: Iterable[Scans], table: str) -> pl.LazyFrame:
    return pl.concat([pl.LazyFrame(schema=placed_schema(table)), *(part[table] for part in parts)])


def _renumbered(rows: pl.LazyFrame, table: str, new: Mapping[int, int | None]) -> pl.LazyFrame:
    """Rows of a copy with the places of today; without those of a place that has none."""
    place = pl.col(PLACE).replace_strict(new, default=None, return_dtype=pl.Int64)
    rows = rows.select(*placed_schema(table)).with_columns(place)
    return rows.drop_nulls(PLACE) if None in new.values() else rows


NAME = ".compacted.zip"
"""In the sweep's folder: a Parquet file per table, that of `run` with each folder's name and result's fingerprint."""
FEWEST_RUNS = 64
"""Smaller sweeps load in a fraction of a second without a copy."""
WORTH_RUNS, WORTH_SHARE = 32, 0.01
"""The copy is rewritten as a whole once this many of its runs are new or gone."""
SETTLED_S = 2.0
"""A younger result is not copied: some file systems store times in whole seconds, which could hide a change."""
ABANDONED_S = 3600.0
"""A temporary file of this age was left by a process that was killed."""


def layout(table: str) -> pl.Schema:
    """Columns and types of a table of the copy; one of another layout is of another version of this program."""
    entry = dict.fromkeys(("name", "fingerprint"), TYPES["string"]) if table == "run" else {}
    return pl.Schema(placed_schema(table) | entry)


def open_copy(home: Path) -> Scans:
    """The copy in a sweep's folder; empty where there is no readable one of this program's layout.

    It is read whole, so that it stays as it is when another one replaces it.
    """
    with suppress(Exception), zipfile.ZipFile(home / NAME) as archive:  # missing or damaged: it is written again
        copy = {table: pl.scan_parquet(archive.read(f"{table}.parquet")) for table in LOADED}
        if all(rows.collect_schema() == layout(table) for table, rows in copy.items()):
            return copy
    return {}


def fingerprint(result: str) -> tuple[str, float]:
    """A text that changes with any file of a result, and the youngest file's Unix time, s; no time without a result."""
    try:
        with os.scandir(result) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return "", math.inf
    # Not the time of the inode's last change: making an archive read-only must not make it slow.
    files = sorted([(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats])
    digest = hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest()
    return digest, max([file[2] for file in files], default=0) / 1e9


def _write(home: Path, parts: Iterable[Scans], entries: list[tuple[str, str, int]]) -> None:
    """Put a copy of these runs in the old one's place: each with its folder's name, fingerprint and place."""
    runs = pl.LazyFrame(entries, {"name": pl.String, "fingerprint": pl.String, PLACE: pl.Int64}, orient="row")
    _remove_abandoned(home)
    temporary = home / f".compacted.{uuid.uuid4().hex}.tmp"
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for table in LOADED:
                rows = _joined(parts, table).join(runs, on=PLACE, maintain_order="left").select(*layout(table))
                frame = rows.sort(PLACE, maintain_order=True).collect()
                with archive.open(f"{table}.parquet", "w", force_zip64=True) as file:
                    frame.write_parquet(file, compression="lz4", statistics=False)
        os.replace(temporary, home / NAME)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_abandoned(home: Path) -> None:
    for path in home.glob(".compacted.*.tmp"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - ABANDONED_S:
                path.unlink()
