"""Reads run folders into tables: finished and unfinished runs alike; a folder that can't be read is named.

Of runs that lie in several folders one is read, and what is said of the others stands here, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import polars as pl

from analysis.runs.copy import Collection
from analysis.runs.published import (
    LATER,
    LOADED,
    Frames,
    Tables,
    Unreadable,
    decoded_manifest,
    manifest_bytes,
    read_table,
    stored_schema,
    table_schema,
)
from analysis.text import listed
from parallelbench.errors import ConfigError, no_permission
from parallelbench.results.attempt import Outcome, read_config
from parallelbench.results.folder import NO_CONFIGURATION, RunFolder, find_runs, other_folders, require_folder
from parallelbench.results.journal import read_tables
from parallelbench.results.publish import configured_columns, run_row
from parallelbench.results.sensor_columns import add_telemetry, read_telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Collection as Container

    import pandas as pd

    from analysis.runs.copy import Found

P = ParamSpec("P")
T = TypeVar("T")
_UNKNOWN: Any = object()


def once(derive: Callable[Concatenate[Runs, P], T]) -> Callable[Concatenate[Runs, P], T]:
    """Derives a thing from runs once: it is kept on them, and dies with them."""

    @wraps(derive)
    def kept(runs: Runs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (derive, args, *kwargs.items())
        known: dict[Any, Any] = runs.derived
        found: T = known.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = known[key] = derive(runs, *args, **kwargs)
        return found

    return kept


@dataclass(frozen=True, eq=False)
class Runs:
    """The raw tables: one polars frame per table of `parallelbench.results.tables`.

    All frames are keyed by `run_id`; types, units and meanings are those of the declared columns. Unfinished runs are
    included, with the epochs that they finished and null for what they did not reach.
    """

    root: Path
    """The folder that was loaded."""
    tables: Mapping[str, pl.DataFrame]
    """The tables by name, without telemetry, which may have millions of rows."""
    skipped: tuple[Skipped, ...]
    """Folders that hold no readable run."""
    taken_from: Runs | None = None
    """None where these are all."""
    target: float | None = None
    """The test accuracy that times and energies to an accuracy are told for; None: each group's own
    (`analysis.metrics.accuracy_target`)."""
    baseline: str | None = None
    """The configuration that others are compared with, e.g. "fsdp × 4"; None: the sweep's own, or the default."""
    plugin: str | None = None
    """The package, besides the suite's own, whose classes the runs may name."""
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What was derived from exactly these (see `once`)."""

    @property
    def whole(self) -> Runs:
        """All runs that were loaded together. A run is held against others among them."""
        return self.taken_from or self

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
    def checks(self) -> pl.DataFrame:
        """One row per run and thing that was checked during or after training, or was not."""
        return self.tables["checks"]

    @property
    def losses(self) -> pl.DataFrame:
        """One row per run and step, or block of steps, with the mean loss before it."""
        return self.tables["losses"]

    @property
    def preprocess(self) -> pl.DataFrame:
        """One row per run and execution of a preprocessing engine."""
        return self.tables["preprocess"]

    @property
    def pushes(self) -> pl.DataFrame:
        """One row per run and update sent to a parameter server."""
        return self.tables["pushes"]

    @cached_property
    def telemetry(self) -> pl.DataFrame:
        """One row per run, node, device and sample; read when first used, since a run of hours has millions.

        Raises `ConfigError` where a table is damaged.
        """
        rows = self.run.select("run_id", "folder").rows()
        frames = [read_samples(Path(folder)).with_columns(run_id=pl.lit(run_id)) for run_id, folder in rows]
        return pl.concat([pl.DataFrame(schema=table_schema("telemetry")), *frames])

    def select(self, table: str, *columns: str) -> pl.DataFrame:
        """Some columns of a table; from a compacted copy, only these are read."""
        if isinstance(self.tables, Tables):
            return self.tables.select(table, columns)
        return self.tables[table].select(columns)

    def scan(self, table: str) -> pl.LazyFrame:
        """A table that is read once it is collected."""
        return self.tables.scans[table] if isinstance(self.tables, Tables) else self.tables[table].lazy()

    def only(self, run_ids: Container[str]) -> Runs:
        """These runs alone."""
        kept = {table: frame.filter(pl.col("run_id").is_in(list(run_ids))) for table, frame in self.tables.items()}
        return replace(self, tables=kept, taken_from=self.whole)

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


def load(path: Path | str, *, plugin: str | None = None) -> Runs:
    """Read all runs at or below `path`: one run's folder, a sweep's, or a folder of sweeps.

    Published results are read from Parquet once their sha256 matches the manifest, those of a large sweep from its
    compacted copy (`analysis.runs.copy`) while their manifest is the copied one; other runs from the journals of their
    last attempt. `plugin` is an importable package whose classes the unfinished ones may name. Of a run that lies in
    several folders one measurement is read. What is not read is named in `skipped`. Raises `ConfigError` where there
    is no such folder, or none that may be read.
    """
    root = Path(path).expanduser()
    require_folder(root)
    folders = find_runs(root)
    collection = Collection(folders, lambda folder: _read_journals(folder, plugin))
    unread = [Skipped(folder, _one_line(error)) for folder, error in collection.errors]
    foreign = [Skipped(path, NO_CONFIGURATION, is_run=False) for path in other_folders(root, folders)]
    kept, twins = without_twins(collection.found)
    return Runs(
        root=root,
        tables=collection.tables(kept),
        skipped=tuple(sorted([*foreign, *unread, *twins], key=lambda s: s.path)),
        plugin=plugin,
    )


def read_samples(folder: Path) -> pl.DataFrame:
    """One run's rows of `telemetry`: published, or what the samplers of its attempts have recorded.

    Raises `ConfigError` where the table is damaged.
    """
    run = RunFolder(folder)
    manifest = manifest_bytes(run)
    if manifest is not None:
        try:
            return read_table(run.result, LATER, decoded_manifest(manifest))
        except Unreadable as error:
            raise ConfigError(f"{folder}: {error}") from None
    typed, frames = table_schema(LATER), []
    for attempt in run.attempts()[-1:]:
        tables, _ = read_tables(attempt.path)
        batches = read_telemetry(attempt.path, tables["ranks"]).batches()
        # One at a time: a batch in Arrow's own types, then in ours.
        frames += [pl.DataFrame(batch).cast(pl.Schema(typed)) for batch in batches]
    return pl.concat([pl.DataFrame(schema=typed), *frames])


def _read_journals(folder: RunFolder, plugin: str | None) -> Frames:
    """The tables of an unpublished run: its configuration, its outcome, and the epochs that it finished."""
    try:
        run = read_config(folder.path / "config.yaml", plugin)
    except ConfigError as error:
        raise Unreadable(f"it has no result, and its configuration can't be read: {error}") from None
    state, attempts = folder.state(), folder.attempts()
    row: dict[str, Any] = configured_columns(run)
    rows: dict[str, list[dict[str, Any]]] = {}
    if attempts:
        rows, events = read_tables(attempts[-1].path)
        add_telemetry(rows, events, read_telemetry(attempts[-1].path, rows["ranks"]))
        unfinished = Outcome(outcome="killed", reason="", finished_at=0.0)
        row = run_row(run, attempts[-1], state.outcome or unfinished, events)
    row |= {
        "outcome": state.outcome.outcome if state.outcome else None,
        "reason": state.outcome.reason if state.outcome else None,
        "state": state.state,
    }
    rows["run"] = [row]
    own = pl.lit(row["run_id"]).alias("run_id")  # a journal that was copied here may have another run's
    return {
        table: pl.from_dicts(rows.get(table, []), schema=stored_schema(table)).with_columns(own) for table in LOADED
    }


def _one_line(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return no_permission(error)
    message = " ".join(str(error).split())
    return message if isinstance(error, (Unreadable, ConfigError)) else f"{type(error).__name__}: {message}"


@dataclass(frozen=True)
class Skipped:
    """A folder that was not read, and why."""

    path: Path
    reason: str
    is_run: bool = True
    """Whether it was made for a run, as far as its files tell."""
    is_twin: bool = False
    """Whether its run is read from another folder."""


def without_twins(found: list[Found]) -> tuple[set[Path], list[Skipped]]:
    """The folders to read, and those to skip, whose run lies in another folder, too.

    The finished run is read; of several, the one in the largest sweep, which was measured in turn with most others.
    """
    sizes = Counter(run.folder.path.parent for run in found)
    read: dict[str, Found] = {}
    skipped = []
    for run in sorted(found, key=lambda run: (run.state != "done", -sizes[run.folder.path.parent])):
        first = read.setdefault(run.run_id, run)
        # A finished run has all that its unfinished twin has.
        if first is not run and (run.state == "done" or first.state != "done"):
            twin = first.folder.path
            of = f"in {twin.parent}" if twin.name == run.folder.path.name else f"from {twin}"
            why = (
                f"the same run, or another measurement of it, is read {of} (equal run id); name one folder for this one"
            )
            skipped.append(Skipped(run.folder.path, why, is_twin=True))
    return {run.folder.path for run in read.values()}, skipped


def format_skipped(skipped: Iterable[Skipped], *, root: Path | None = None) -> list[str]:
    """The folders that were not read, each with the reason; those of one sweep and one reason together.

    `root`: what paths are relative to; None for none.
    """
    folders: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for each in skipped:
        folders[each.path.parent, each.reason].append(each.path)
    lines = []
    for (sweep, reason), paths in folders.items():
        whole = str(paths[0] if len(paths) == 1 else sweep)
        shown = whole.removeprefix(f"{root}/") if root else whole
        runs = f" ({len(paths)} folders: {listed([path.name for path in paths])})" if len(paths) > 1 else ""
        lines.append(f"Skipped: {shown}{runs}: {reason}.")
    return lines
