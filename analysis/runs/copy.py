"""All runs of some folders: published results, unfinished runs, and a copy of the tables beside each large sweep.

The copy is one file per sweep instead of several per run, so that thousands of runs load fast. It is a cache. A run is
read from it only while the files of its `result/` have the name, size, time and inode that they had when they were
copied; every other run is read from its own folder. So an old, damaged or missing copy costs time, never correctness.
It is written under a temporary name and renamed; in a read-only folder or on a full disk loading works without it.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import uuid
import zipfile
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis.runs.published import (
    LOADED,
    PLACE,
    TOGETHER,
    TYPES,
    Frames,
    Result,
    Scans,
    Tables,
    of_today,
    placed_schema,
    read_together,
    table_schema,
    verified,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from parallelbench.results.folder import RunFolder


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
