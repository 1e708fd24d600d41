"""All runs of some folders: published results, unfinished runs, and a copy of the tables beside each large sweep.

The copy is one file per sweep instead of several per run, so that thousands of runs load fast. It is a cache, keyed by
the sha256 of manifests: a run is read from it while its result has the very manifest whose files, each of the sha256
that the manifest names, were copied, and its files still have the sizes that it names. A run whose files have not is
named as damaged, as without a copy. Every other run is read from its own folder. So an old, damaged or missing copy
costs time, never correctness. It is written under a temporary name and renamed; in a read-only folder or on a full disk
loading works without it.
"""

from __future__ import annotations

import hashlib
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
    TOGETHER,
    Frames,
    Result,
    Scans,
    Tables,
    Unreadable,
    manifest_bytes,
    read_together,
    require_sizes,
    stored_schema,
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


class Part(NamedTuple):
    """Tables of some runs, no two of which have the same id."""

    tables: Scans
    found: list[Found]
    """In the order of their rows."""
    runs: int
    """How many runs the tables hold: a copy may hold results that are gone."""

    def of(self, runs: Sequence[Found]) -> Scans:
        """The rows of some of the runs that were found."""
        if len(runs) == self.runs:
            return self.tables
        run_ids = [run.run_id for run in runs]
        return {table: rows.filter(pl.col("run_id").is_in(run_ids)) for table, rows in self.tables.items()}


class Collection:
    """All runs of some folders, from copies where those are up to date.

    `read_unfinished` reads a run without a result: its tables, with its `state` in `run`.
    """

    def __init__(self, folders: Sequence[RunFolder], read_unfinished: Callable[[RunFolder], Frames]) -> None:
        self._read_unfinished = read_unfinished
        self._place = {folder.path: place for place, folder in enumerate(folders)}
        self.errors: list[tuple[Path, Exception]] = []
        """The folders that could not be read."""
        homes: dict[Path, list[RunFolder]] = defaultdict(list)
        for folder in folders:
            homes[folder.path.parent].append(folder)
        self._parts = [part for home, own in homes.items() for part in self._sweep(home, own)]
        self.found = self._in_order(run for part in self._parts for run in part.found)
        """Every run that was read, in the order of the folders."""

    def tables(self, kept: set[Path]) -> Tables:
        """The tables of the runs in these folders, which have different ids: `run` in the order of the folders, others
        with a run's rows in their own order.
        """
        runs = [run for run in self.found if run.folder.path in kept]
        places = {run.run_id: place for place, run in enumerate(runs)}
        paths = {run.run_id: str(run.folder.path) for run in runs}
        scans = _joined(self._parts, runs)
        scans["run"] = (
            scans["run"]
            .sort(pl.col("run_id").replace_strict(places, return_dtype=pl.Int64))
            .with_columns(folder=pl.col("run_id").replace_strict(paths, return_dtype=pl.String))
            .select(*table_schema("run"))
        )
        return Tables(scans)

    def _in_order(self, runs: Iterable[Found]) -> list[Found]:
        return sorted(runs, key=lambda run: self._place[run.folder.path])

    def _sweep(self, home: Path, folders: Sequence[RunFolder]) -> list[Part]:
        """The runs of a sweep that its copy has, and the others; where that pays, they become a new copy."""
        unread: dict[RunFolder, bytes | None] = {}
        for folder in folders:
            try:
                unread[folder] = manifest_bytes(folder)
            except OSError as error:
                self.errors.append((folder.path, error))
        if len(folders) < FEWEST_RUNS:
            return self._read(unread)
        digests = {folder: hashlib.sha256(content).hexdigest() for folder, content in unread.items() if content}
        of_digest = {digest: folder for folder, digest in digests.items()}
        copy = open_copy(home)
        old = copy["run"].select("run_id", "manifest").collect().rows() if copy else []
        copied = []
        for run_id, folder in [(run_id, of_digest[digest]) for run_id, digest in old if digest in of_digest]:
            try:
                require_sizes(folder, unread.pop(folder) or b"")
            except (Unreadable, OSError) as error:
                self.errors.append((folder.path, error))
            else:
                copied.append(Found(folder, run_id, "done"))
        parts = [Part(copy, copied, len(old))] if copied else []
        parts += self._read(unread)
        read = [run for part in parts for run in part.found if run.folder in digests]
        every = self._in_order({run.run_id: run for run in (*read, *copied)}.values())
        if len(every) - len(copied) + len(old) - len(copied) >= max(WORTH_RUNS, WORTH_SHARE * len(old)):
            with suppress(OSError):
                _write(home, parts, every, {run.run_id: digests[run.folder] for run in every})
        return parts

    def _read(self, unread: Mapping[RunFolder, bytes | None]) -> list[Part]:
        """Runs from their own folders, each with its manifest, or None where it has no result."""
        read: list[tuple[Frames, list[Found]]] = []
        every = list(unread.items())
        for start in range(0, len(every), TOGETHER):
            alike: dict[Any, list[Result]] = defaultdict(list)
            for folder, manifest in every[start : start + TOGETHER]:
                try:
                    if manifest is None:
                        frames = self._read_unfinished(folder)
                        read.append((frames, [Found(folder, *frames["run"].select("run_id", "state").row(0))]))
                    else:
                        result = verified(folder, manifest)
                        alike[result.kind].append(result)
                except Exception as error:  # a foreign or damaged folder may raise anything: report it and go on
                    self.errors.append((folder.path, error))
            read += [one for results in alike.values() for one in self._read_alike(results)]
        return _parts(read)

    def _read_alike(self, results: list[Result]) -> list[tuple[Frames, list[Found]]]:
        """Results of one kind; where they are not alike after all, or one can't be read, each half by itself."""
        try:
            return [(read_together(results), [Found(each.folder, each.manifest.run_id, "done") for each in results])]
        except Exception as error:
            if len(results) == 1:
                self.errors.append((results[0].folder.path, error))
                return []
        half = len(results) // 2
        return self._read_alike(results[:half]) + self._read_alike(results[half:])


def _parts(read: Iterable[tuple[Frames, list[Found]]]) -> list[Part]:
    """All that was read, in as few parts as have no run twice: two folders may hold measurements of one run."""
    parts: list[tuple[list[Frames], dict[str, Found]]] = []
    for frames, found in read:
        runs = {run.run_id: run for run in found}
        free = (part for part in parts if part[1].keys().isdisjoint(runs))
        several, known = next(free, None) or ([], {})
        if not several:
            parts.append((several, known))
        several.append(frames)
        known.update(runs)
    return [
        Part(
            {table: pl.concat(each[table] for each in several).lazy() for table in LOADED},
            [*known.values()],
            len(known),
        )
        for several, known in parts
    ]


def _joined(parts: Iterable[Part], runs: Sequence[Found]) -> dict[str, pl.LazyFrame]:
    """The tables of these runs."""
    kept = {run.folder.path for run in runs}
    own = [(part, [run for run in part.found if run.folder.path in kept]) for part in parts]
    scans = [part.of(of_part) for part, of_part in own if of_part]
    joined = {}
    for table in LOADED:
        columns = stored_schema(table)
        joined[table] = pl.concat([pl.LazyFrame(schema=columns), *(each[table].select(*columns) for each in scans)])
    return joined


NAME = ".compacted.zip"
"""In the sweep's folder: a Parquet file per table, that of `run` with the sha256 of each result's `manifest`."""
FEWEST_RUNS = 64
"""Smaller sweeps load in a fraction of a second without a copy."""
WORTH_RUNS, WORTH_SHARE = 32, 0.01
"""The copy is rewritten as a whole once this many of its runs are new or gone."""
ABANDONED_S = 3600.0
"""A temporary file of this age was left by a process that was killed."""


def layout(table: str) -> pl.Schema:
    """Columns and types of a table of the copy; one of another layout is of another version of this program."""
    return pl.Schema(stored_schema(table) | ({"manifest": pl.String} if table == "run" else {}))


def open_copy(home: Path) -> Scans:
    """The copy in a sweep's folder; empty where there is no readable one of this program's layout.

    It is read whole, so that it stays as it is when another one replaces it.
    """
    with suppress(Exception), zipfile.ZipFile(home / NAME) as archive:  # missing or damaged: it is written again
        copy = {table: pl.scan_parquet(archive.read(f"{table}.parquet")) for table in LOADED}
        if all(rows.collect_schema() == layout(table) for table, rows in copy.items()):
            return copy
    return {}


def _write(home: Path, parts: Iterable[Part], runs: Sequence[Found], manifests: Mapping[str, str]) -> None:
    """Put a copy of these runs in the old one's place, in their order. `manifests`: run id → sha256 of its manifest."""
    scans = _joined(parts, runs)
    place = pl.col("run_id").cast(pl.Enum([run.run_id for run in runs]))
    digest = pl.col("run_id").replace_strict(manifests, return_dtype=pl.String)
    scans["run"] = scans["run"].with_columns(manifest=digest)
    _remove_abandoned(home)
    temporary = home / f".compacted.{uuid.uuid4().hex}.tmp"
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for table in LOADED:
                # What is in order need not be sorted by each report.
                frame = scans[table].select(*layout(table)).sort(place, maintain_order=True).collect()
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
