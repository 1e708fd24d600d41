"""From run folders to tables: any number of runs, whatever became of them, each read in full or named."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from parallelbench.attempt import Outcome, read_config
from parallelbench.config import SCHEMA_VERSION
from parallelbench.errors import ConfigError
from parallelbench.folder import RunFolder, find_runs
from parallelbench.journal import read_tables, read_telemetry
from parallelbench.publish import configured_columns, run_row
from parallelbench.records import TABLES

if TYPE_CHECKING:
    from collections.abc import Collection

    import pandas as pd

Frames = dict[str, pl.DataFrame]

_TYPES: dict[str, type[pl.DataType]] = {
    "string": pl.String,
    "int32": pl.Int32,
    "int64": pl.Int64,
    "float64": pl.Float64,
    "bool": pl.Boolean,
}
_LATER = "telemetry"
"""The table that is read only when somebody asks for it."""
_WITHOUT_RUNS = ("report", "submissions")
"""Folders that a sweep's folder may hold beside its runs."""


@dataclass(frozen=True)
class Skipped:
    """A folder that was not read, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class Runs:
    """Everything that was measured, as it was measured: one polars frame per table of
    `parallelbench.records`.

    All frames are keyed by `run_id`; types, units and meanings are those of the table's columns. Runs that
    did not train to their end are in here too, with the epochs that they finished and null for what they did
    not reach.
    """

    root: Path
    """The folder that was asked for."""
    tables: Frames
    """The tables of `parallelbench.records` by name, but for telemetry, which has millions of rows."""
    skipped: tuple[Skipped, ...]
    """Folders that hold no readable run."""

    @property
    def run(self) -> pl.DataFrame:
        """One row per run, plus `state` (done, failed, running or missing) and `folder`."""
        return self.tables["run"]

    @property
    def epochs(self) -> pl.DataFrame:
        """One row per run and finished epoch."""
        return self.tables["epochs"]

    @property
    def ranks(self) -> pl.DataFrame:
        """One row per run, finished epoch and rank."""
        return self.tables["ranks"]

    @property
    def steps(self) -> pl.DataFrame:
        """One row per run, rank and sampled step."""
        return self.tables["steps"]

    @property
    def parity(self) -> pl.DataFrame:
        """One row per run and step of the parity check."""
        return self.tables["parity"]

    @property
    def pushes(self) -> pl.DataFrame:
        """One row per run and update sent to a parameter server."""
        return self.tables["pushes"]

    @cached_property
    def telemetry(self) -> pl.DataFrame:
        """One row per run, node, device and sample: read only now, a run of hours has millions.

        Raises `ConfigError` where a table is damaged.
        """
        frames = [_telemetry(Path(folder)) for folder in self.run["folder"]]
        return pl.concat([pl.DataFrame(schema=table_schema("telemetry")), *frames])

    def only(self, run_ids: Collection[str]) -> Runs:
        """These runs alone."""
        kept = {table: frame.filter(pl.col("run_id").is_in(list(run_ids))) for table, frame in self.tables.items()}
        return replace(self, tables=kept)

    @property
    def phases(self) -> pl.DataFrame:
        """One row per run, rank and step of the pass that `measure.attribution_steps` asks for."""
        return self.tables["phases"]

    def to_pandas(self) -> dict[str, pd.DataFrame]:
        """`tables` as pandas has them; raises `ConfigError` where pandas is not installed."""
        try:
            return {table: frame.to_pandas() for table, frame in self.tables.items()}
        except ModuleNotFoundError:
            raise ConfigError("pandas is not installed: pip install pandas, or use the polars frames") from None


class Unreadable(Exception):  # noqa: N818
    """A folder that can't be trusted; the message says why, in one line."""


def table_schema(table: str) -> dict[str, type[pl.DataType]]:
    """Name and type of each column of a frame of `Runs`."""
    columns = {column.name: _TYPES[column.type] for column in TABLES[table]}
    return columns | ({"state": pl.String, "folder": pl.String} if table == "run" else {})


def load(path: Path | str, *, plugin: str | None = None) -> Runs:
    """Read all runs at or below `path`: one run's folder, a sweep's, or a folder of sweeps.

    Published results are read from Parquet once their sha256 matches the manifest; other runs from the
    journals of their last attempt. `plugin` is an importable package whose classes the unfinished ones may name. What
    can't be read is named in `skipped`; raises `ConfigError` where there is no such folder.
    """
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder: name a run's folder, a sweep's, or the one that holds the sweeps")
    folders = find_runs(root)
    skipped = _foreign(root, folders)
    read: dict[str, Frames] = {}
    for folder in folders:
        try:
            frames = _read(folder, plugin)
            _keep(read, frames)
        except Exception as error:  # what a foreign or damaged folder holds is anybody's guess: name it, go on
            skipped.append(Skipped(folder.path, _one_line(error)))
    tables = {
        table: pl.concat([pl.DataFrame(schema=table_schema(table)), *(frames[table] for frames in read.values())])
        for table in TABLES
        if table != _LATER
    }
    return Runs(root=root, tables=tables, skipped=tuple(sorted(skipped, key=lambda s: s.path)))


def _keep(read: dict[str, Frames], frames: Frames) -> None:
    """Add a run, unless another folder holds the same one: of two, the one that is done counts, else the
    first.
    """
    run_id, state = frames["run"].select("run_id", "state").row(0)
    first = read.get(run_id)
    if first is not None:
        other_state, other = first["run"].select("state", "folder").row(0)
        if state != "done" or other_state == "done":
            raise Unreadable(f"it is the same run as {other} (equal run id), which is read instead")
        # The unfinished twin gives way; it has nothing that the finished one lacks.
    read[run_id] = frames


def _foreign(root: Path, folders: list[RunFolder]) -> list[Skipped]:
    """Folders beside runs that are none: half-written ones (a crash before `config.yaml`) or somebody
    else's.
    """
    runs = {folder.path for folder in folders}
    if root in runs:
        return []
    homes = {path.parent for path in runs} | {root}
    beside = (path for home in homes for path in home.iterdir() if path.is_dir())
    return [
        Skipped(path, "no config.yaml: half-written, or not a run")
        for path in beside
        if path not in runs | homes and path.name not in _WITHOUT_RUNS and not path.name.startswith(".")
    ]


def _read(folder: RunFolder, plugin: str | None) -> Frames:
    # `result/` appears whole, by one rename: one that is there but not valid was damaged later.
    return _read_published(folder) if folder.result.exists() else _read_journals(folder, plugin)


def _read_published(folder: RunFolder) -> Frames:
    version = _schema_version(folder.result / "manifest.json")
    if version != SCHEMA_VERSION:
        raise Unreadable(f"its result has schema version {version}, this program reads version {SCHEMA_VERSION}")
    manifest = folder.manifest()
    if manifest is None:
        raise Unreadable("its result is damaged: a table is missing, or not as long as manifest.json says")
    frames = {
        table: _read_table(folder.result, table, manifest["tables"][table]["sha256"])
        for table in TABLES
        if table != _LATER
    }
    if frames["run"].height != 1 or frames["run"]["run_id"].item() != manifest["run_id"]:
        raise Unreadable("its result is damaged: run.parquet is not the run that manifest.json names")
    frames["run"] = frames["run"].with_columns(state=pl.lit("done"), folder=pl.lit(str(folder.path)))
    return frames


def _telemetry(folder: Path) -> pl.DataFrame:
    """One run's samples: published, or of the journals of the attempts that its epochs are from."""
    run = RunFolder(folder)
    manifest = run.manifest()
    if manifest is not None:
        try:
            return _read_table(run.result, _LATER, manifest["tables"][_LATER]["sha256"])
        except Unreadable as error:
            raise ConfigError(f"{folder}: {error}") from None
    attempts, typed = run.attempts(), table_schema(_LATER)
    batches = read_telemetry(attempts[-1].path).batches() if attempts else ()
    # One at a time: a batch in Arrow's own types, then in ours.
    return pl.concat([pl.DataFrame(schema=typed), *(pl.DataFrame(batch).cast(pl.Schema(typed)) for batch in batches)])


def _schema_version(manifest: Path) -> Any:
    try:
        return msgspec.json.decode(manifest.read_bytes())["schema_version"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        raise Unreadable("its result is damaged: manifest.json is missing or unreadable") from None


def _read_table(result: Path, table: str, sha256: str) -> pl.DataFrame:
    content = (result / f"{table}.parquet").read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Unreadable(f"its result is damaged: the sha256 of {table}.parquet is not the manifest's")
    frame = pl.read_parquet(io.BytesIO(content))
    expected = {column.name for column in TABLES[table]}
    if set(frame.columns) != expected:
        raise Unreadable(f"{table}.parquet has other columns: {sorted(set(frame.columns) ^ expected)}")
    return frame.select(pl.col(column.name).cast(_TYPES[column.type]) for column in TABLES[table])


def _read_journals(folder: RunFolder, plugin: str | None) -> Frames:
    """What an unpublished run left behind: its configuration, its outcome, and the epochs that it
    finished.
    """
    try:
        run = read_config(folder.path / "config.yaml", plugin)
    except ConfigError as error:
        raise Unreadable(f"it has no result, and what it was to do can't be read: {error}") from None
    state, attempts = folder.state(), folder.attempts()
    row: dict[str, Any] = configured_columns(run)
    rows: dict[str, list[dict[str, Any]]] = {}
    if attempts:
        rows, events = read_tables(attempts[-1].path)
        unfinished = Outcome(outcome="killed", reason="", finished_at=0.0)
        row = run_row(run, attempts[-1], state.outcome or unfinished, events)
    row |= {
        "outcome": state.outcome.outcome if state.outcome else None,
        "reason": state.outcome.reason if state.outcome else None,
        "state": state.state,
        "folder": str(folder.path),
    }
    rows["run"] = [row]
    return {
        table: pl.from_dicts(rows.get(table, []), schema=table_schema(table)) for table in TABLES if table != _LATER
    }


def _one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return message if isinstance(error, (Unreadable, ConfigError)) else f"{type(error).__name__}: {message}"
