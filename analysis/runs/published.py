"""Published results as polars frames, their files checked against the manifest; and a compacted copy of them.

The copy is one file per sweep instead of several per run, so that thousands of runs load fast. It is a cache. A run is
read from it only while the files of its `result/` have the name, size, time and inode that they had when they were
copied; every other run is read from its own folder. So an old, damaged or missing copy costs time, never correctness.
It is written under a temporary name and renamed; in a read-only folder or on a full disk loading works without it.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
import uuid
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
import polars.selectors as cs

from parallelbench.config.build import MOVED
from parallelbench.redaction import MARKS, redacted
from parallelbench.results.files import read_record
from parallelbench.results.folder import RunFolder
from parallelbench.results.tables import TABLES, TABLES_VERSION

if TYPE_CHECKING:
    from pathlib import Path


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
    """Name and type of each column of a frame of `analysis.runs.reader.Runs`."""
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


def of_today(frame: pl.DataFrame) -> pl.DataFrame:
    """The same runs, whose classes are named by where they stand today."""
    old, new = ([f'"_target_":"{name}"' for name in names] for names in (MOVED, MOVED.values()))
    return frame.with_columns(pl.col("config_json").str.replace_many(old, new))


def without_tokens(frame: pl.DataFrame, *, but: tuple[str, ...] = ("run_id", "folder")) -> pl.DataFrame:
    """The same table, redacted, `but` for these columns: run ids and folders are what runs are found by."""
    texts = [name for name, kind in frame.schema.items() if kind == pl.String and name not in but]
    marked = frame.select(pl.col(texts).str.contains_any(list(MARKS)).any()).row(0) if texts else ()
    found = [name for name, is_marked in zip(texts, marked, strict=True) if is_marked]
    return frame.with_columns(pl.col(name).map_elements(redacted, pl.String) for name in found) if found else frame


NAME = ".compacted.zip"
"""In the sweep's folder: an index, and a Parquet file per table."""
FEWEST_RUNS = 64
"""Smaller sweeps load in a fraction of a second without a copy."""
WORTH_RUNS, WORTH_SHARE = 32, 0.01
"""The copy is rewritten as a whole once this many of its runs are new or gone."""
SETTLED_S = 2.0
"""A younger result is not copied: some file systems store times in whole seconds, which could hide a change."""
ABANDONED_S = 3600.0
"""A temporary file of this age was left by a process that was killed."""

_WITH_TEXT = ("run", "checks")
"""Tables with more than numbers and names of devices."""

Read = Callable[[RunFolder], Published]


class CopiedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run in the copy."""

    name: str
    """Name of its folder."""
    fingerprint: str
    """Fingerprint of its result's files."""
    run_id: str
    note: str
    rows: tuple[int, ...]
    """Rows in each table, in the order of `LOADED`."""


class Index(msgspec.Struct, frozen=True):
    """The runs of the copy; its tables have their rows in the same order."""

    layout: dict[str, dict[str, str]]
    """Columns and types by table; a copy of another layout is of another version of this program."""
    runs: tuple[CopiedRun, ...]


class Found(NamedTuple):
    """A run that was read, from the copy or from its folder."""

    folder: RunFolder
    run_id: str
    state: str
    note: str


@dataclass
class SweepFolder:
    """The runs of one sweep: those in the copy, and the frames of the others."""

    places: dict[str, tuple[int, RunFolder]]
    """Name → place among all folders that are read, and the folder."""
    copy: Copy | None
    cached: dict[str, CopiedRun] = field(default_factory=dict)
    fresh: dict[str, Published] = field(default_factory=dict)
    errors: list[tuple[Path, Exception]] = field(default_factory=list)

    def found(self) -> Iterator[tuple[int, Found]]:
        """All runs that were read, with their places."""
        for name, (place, folder) in self.places.items():
            if entry := self.cached.get(name):
                yield place, Found(folder, entry.run_id, "done", entry.note)
            elif published := self.fresh.get(name):
                run_id, state = published.frames["run"].select("run_id", "state").row(0)
                yield place, Found(folder, run_id, state, published.note)

    def rows(self, table: str, names: set[str], read: Read, columns: Sequence[str]) -> tuple[pl.DataFrame, np.ndarray]:
        """The rows of these runs, in no particular order, and the place of the run that each belongs to."""
        frames = {name: published.frames[table] for name, published in self.fresh.items() if name in names}
        fresh = pl.concat([pl.DataFrame(schema=table_schema(table)), *frames.values()]).select(columns)
        of_fresh = [np.full(frame.height, self.places[name][0]) for name, frame in frames.items()]
        places = np.concatenate([np.empty(0, np.int64), *of_fresh])
        if used := self.cached.keys() & names:
            copied, of_copied = self._copied(table, used, read, columns)
            return pl.concat([copied, fresh]), np.concatenate([of_copied, places])
        return fresh, places

    def _copied(
        self, table: str, names: set[str], read: Read, columns: Sequence[str]
    ) -> tuple[pl.DataFrame, np.ndarray]:
        assert self.copy is not None
        runs, column = self.copy.index.runs, LOADED.index(table)
        try:
            frame = self.copy.table(table, columns)
        except Exception:  # the copy is damaged: read the runs themselves
            frames = {name: read(self.places[name][1]).frames[table] for name in names}
            counts = [frame.height for frame in frames.values()]
            places = np.repeat([self.places[name][0] for name in frames], counts)
            return pl.concat(list(frames.values())).select(columns), places
        place = np.array([self.places[entry.name][0] if entry.name in names else -1 for entry in runs], np.int64)
        places = np.repeat(place, [entry.rows[column] for entry in runs])
        if (place < 0).any():
            frame, places = frame.filter(pl.Series(places >= 0)), places[places >= 0]
        if "folder" in frame.columns:
            paths = {at: str(folder.path) for at, folder in self.places.values()}
            frame = frame.with_columns(folder=pl.Series([paths[at] for at in places.tolist()], dtype=pl.String))
        return frame, places


class Collection:
    """All runs of some folders, from copies where those are up to date."""

    def __init__(self, folders: list[RunFolder], read: Read) -> None:
        self._read = read
        by_home: dict[Path, list[tuple[int, RunFolder]]] = defaultdict(list)
        for place, folder in enumerate(folders):
            by_home[folder.path.parent].append((place, folder))
        self._sweeps = [_sweep(home, members, read) for home, members in by_home.items()]
        found = sorted(pair for sweep in self._sweeps for pair in sweep.found())
        self.found = [run for _, run in found]
        """Every run that was read, in the order of the folders."""
        self.errors = [error for sweep in self._sweeps for error in sweep.errors]
        """The folders that could not be read."""

    def tables(self, kept: set[Path]) -> Tables:
        """The tables of the runs in these folders."""
        names = [{n for n, (_, folder) in sweep.places.items() if folder.path in kept} for sweep in self._sweeps]
        return Tables(lambda table, columns: self._rows(table, names, columns))

    def _rows(self, table: str, names: list[set[str]], columns: Sequence[str]) -> pl.DataFrame:
        parts = [sweep.rows(table, kept, self._read, columns) for sweep, kept in zip(self._sweeps, names, strict=True)]
        frame = _in_order(parts) if parts else pl.DataFrame(schema=table_schema(table)).select(columns)
        frame = of_today(frame) if "config_json" in frame.columns else frame
        return without_tokens(frame) if table in _WITH_TEXT else frame  # older releases recorded what they found


class Tables(Mapping[str, pl.DataFrame]):
    """The tables of `LOADED` by name, each read at its first use."""

    def __init__(self, rows: Callable[[str, Sequence[str]], pl.DataFrame]) -> None:
        self._rows = rows
        self._frames: Frames = {}

    def select(self, table: str, columns: Sequence[str]) -> pl.DataFrame:
        """Some columns of a table; unless the whole was read before, no others are read."""
        known = self._frames.get(table)
        return self._rows(table, columns) if known is None else known.select(columns)

    def __getitem__(self, table: str) -> pl.DataFrame:
        if table not in LOADED:
            raise KeyError(table)
        if table not in self._frames:
            self._frames[table] = self._rows(table, list(table_schema(table)))
        return self._frames[table]

    def __iter__(self) -> Iterator[str]:
        return iter(LOADED)

    def __len__(self) -> int:
        return len(LOADED)


def _in_order(parts: list[tuple[pl.DataFrame, np.ndarray]]) -> pl.DataFrame:
    """The rows of all parts, run by run in the order of the places; a run's rows keep theirs."""
    frame = pl.concat([frame for frame, _ in parts])
    places = np.concatenate([places for _, places in parts])
    if (np.diff(places) >= 0).all():
        return frame
    return frame[np.argsort(places, kind="stable")]


class Copy:
    """An open compacted copy; it stays readable when another one replaces it."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self.index = msgspec.json.decode(self._archive.read("index.json"), type=Index)

    def table(self, table: str, columns: Sequence[str]) -> pl.DataFrame:
        """All its rows of a table."""
        frame = pl.read_parquet(io.BytesIO(self._archive.read(f"{table}.parquet")), columns=list(columns))
        column = LOADED.index(table)
        assert frame.height == sum(entry.rows[column] for entry in self.index.runs)
        return frame


def layout() -> dict[str, dict[str, str]]:
    """Columns and types of all tables of this program."""
    return {table: {name: str(kind) for name, kind in table_schema(table).items()} for table in LOADED}


def open_copy(home: Path) -> Copy | None:
    """The copy in a sweep's folder; None where there is no readable one of this program's layout."""
    try:
        copy = Copy(home / NAME)
    except Exception:  # missing or damaged: it is written again
        return None
    return copy if copy.index.layout == layout() else None


def fingerprint(result: str) -> tuple[str, float] | None:
    """A text that changes with any file of a result, and the youngest file's Unix time, s; None without a result."""
    try:
        with os.scandir(result) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except FileNotFoundError:
        return None
    # Not the time of the inode's last change: making an archive read-only must not make it slow.
    files = sorted([(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats])
    digest = hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest()
    return digest, max([file[2] for file in files], default=0) / 1e9


def _sweep(home: Path, members: list[tuple[int, RunFolder]], read: Read) -> SweepFolder:
    places = {folder.path.name: (place, folder) for place, folder in members}
    many = len(places) >= FEWEST_RUNS
    sweep = SweepFolder(places, open_copy(home) if many else None)
    known = {entry.name: entry for entry in sweep.copy.index.runs} if sweep.copy else {}
    settled: dict[str, str] = {}
    started = time.time()
    for name, (_, folder) in places.items():
        try:
            # Before it is read: if it changes in between, the copy has an old fingerprint and is never used.
            if many and (found := fingerprint(f"{folder.path}/result")):
                now, youngest = found
                if name in known and known[name].fingerprint == now:
                    sweep.cached[name] = known[name]
                    continue
                if youngest < started - SETTLED_S:
                    settled[name] = now
            sweep.fresh[name] = read(folder)
        except Exception as error:  # a foreign or damaged folder may raise anything: report it and go on
            sweep.errors.append((folder.path, error))
    settled = {name: now for name, now in settled.items() if name in sweep.fresh}
    changes = len(settled) + len(known) - len(sweep.cached)
    if many and changes >= max(WORTH_RUNS, WORTH_SHARE * len(known)):
        with suppress(OSError):
            _write(home, sweep, settled, read)
    return sweep


def _write(home: Path, sweep: SweepFolder, settled: dict[str, str], read: Read) -> None:
    """Put a copy of all settled runs in the old one's place."""
    names = [name for name in sweep.places if name in sweep.cached or name in settled]
    tables = {table: _in_order([sweep.rows(table, set(names), read, list(table_schema(table)))]) for table in LOADED}
    entries = tuple(sweep.cached.get(name) or _entry(name, settled[name], sweep.fresh[name]) for name in names)
    _remove_abandoned(home)
    temporary = home / f".compacted.{uuid.uuid4().hex}.tmp"
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("index.json", msgspec.json.encode(Index(layout=layout(), runs=entries)))
            for table, frame in tables.items():
                with archive.open(f"{table}.parquet", "w", force_zip64=True) as file:
                    frame.write_parquet(file, compression="lz4", statistics=False)
        os.replace(temporary, home / NAME)
    finally:
        temporary.unlink(missing_ok=True)


def _entry(name: str, now: str, published: Published) -> CopiedRun:
    rows = tuple(published.frames[table].height for table in LOADED)
    return CopiedRun(name, now, published.frames["run"]["run_id"].item(), published.note, rows)


def _remove_abandoned(home: Path) -> None:
    for path in home.glob(".compacted.*.tmp"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - ABANDONED_S:
                path.unlink()
