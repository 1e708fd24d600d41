"""Turn an attempt's journals into the published result: Parquet tables, then the manifest, then one rename."""

from __future__ import annotations

import os
import shutil
import uuid
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json, run_id, slug
from parallelbench.errors import SupersededError
from parallelbench.results.files import is_there, storage_errors, sync, write_file
from parallelbench.results.folder import Manifest, RunFolder, TableEntry, file_sha256
from parallelbench.results.tables import CLOSING, TABLES, TABLES_VERSION, WARNING, check_row, schema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from parallelbench.config.run import RunConfig
    from parallelbench.results.attempt import Attempt, Outcome
    from parallelbench.results.journal import Row, Tables
    from parallelbench.results.sensor_columns import Recordings


_SEE_LOG = "failed after the last epoch, see the attempt's log"
NO_PHASES = f"what steps are spent on was not measured on every rank: its pass {_SEE_LOG}"
NO_CLOSING = (
    "what was trained was not checked: the closing check, which holds it against plain code on one device, did "
    "not end; see the attempt's log, delete the run's folder, and submit again"
)
NO_TRACE = f"there is no trace of every rank: writing it {_SEE_LOG}"


def configured_columns(run: RunConfig) -> Row:
    """The columns of the `run` table that follow from the configuration alone."""
    return {
        "run_id": run_id(run),
        "sweep": run.sweep_name,
        "slug": slug(run),
        **{key: getattr(run, key).name for key in ("model", "data", "strategy", "optimizer", "loader", "launcher")},
        **{key: getattr(run, key) for key in ("devices", "nodes", "epochs", "batch_size", "scaling", "precision")},
        **{key: getattr(run, key) for key in ("global_batch_size", "channels_last", "compile", "repeat")},
        **{key: getattr(run.measure, key) for key in ("deterministic", "detect_anomaly")},
        "framework": run.strategy.framework,
        "seed": run.effective_seed,
        "train_samples": run.data.train_samples,
        "test_samples": run.data.test_samples,
        "steps_per_epoch": run.steps_per_epoch,
        "dropped_samples": run.data.train_samples - run.steps_per_epoch * run.global_batch_size,
        "tokens_per_sample": run.data.tokens_per_sample,
        "learning_rate": run.optimizer.scaled_lr(run),
        "packed": run.launcher.packed,
        "preprocess_engine": run.preprocess.engine,
        "preprocess_recipe": run.preprocess.recipe,
        "preprocess_threads": run.preprocess.threads if run.preprocess.engine != "none" else None,
        "config_json": canonical_json(to_mapping(run)),
        **run.strategy.own_columns(run),
    }


def run_row(run: RunConfig, attempt: Attempt, outcome: Outcome, events: list[Row]) -> Row:
    """The row of the `run` table; columns of a part that the run did not reach are null."""
    info = attempt.info()
    row: Row = dict.fromkeys((column.name for column in TABLES["run"]), None)
    row |= configured_columns(run)
    row |= {"attempt": attempt.number, "outcome": outcome.outcome, "reason": outcome.reason}
    if info is not None:
        row |= {
            "processes": info.processes,
            "device_type": info.device_type,
            "oversubscribed": info.oversubscribed,
            "submit": info.submit or None,
            "launched_at": info.launched_at,
            "waited_s": info.waited_s,
        }
        row["cores_per_device"] = run.cores_per_device if info.device_type == "cpu" else None
    for event in events:
        if event["event"] == "facts":
            row |= {name: value for name, value in event.items() if name in row}
    if saved := [event for event in events if event["event"] == "checkpoint"]:
        row["checkpoint_save_s"] = median(event["save_s"] for event in saved)
        row["checkpoint_bytes"] = saved[-1]["bytes"]
    row["warnings"] = "; ".join(filter(None, [row["warnings"], telemetry_warning(events)])) or None
    return row


def telemetry_warning(events: list[Row]) -> str | None:
    """One warning that says why telemetry is null, for all devices and nodes together."""
    devices: dict[str, set[str]] = {}
    for event in events:
        if event["event"] == WARNING:
            devices.setdefault(event["reason"], set()).add(event["device"])
    reasons = [f"{reason} ({', '.join(sorted(about))})" for reason, about in sorted(devices.items())]
    return f"telemetry is incomplete: {', '.join(reasons)}" if reasons else None


def publish(
    folder: RunFolder, run: RunConfig, attempt: Attempt, outcome: Outcome, measured: tuple[Tables, list[Row]]
) -> None:
    """Write `result/`, once, from `measured`, which `read_tables` has returned. A result that is already there stays.

    Raises `StorageError` where it can't be written, `SupersededError` where a newer attempt has begun.
    """
    from parallelbench.results.sensor_columns import add_telemetry, read_telemetry  # loads numpy

    tables, events = measured
    with storage_errors(attempt.path):
        recordings = read_telemetry(attempt.path, tables["ranks"])
    add_telemetry(tables, events, recordings)
    row = run_row(run, attempt, outcome, events)
    row["oversubscribed"] = _oversubscribed(folder, attempt, tables["ranks"])
    if not was_closed(run, events):
        tables["checks"].append(_not_closed(run, attempt))
    tables["run"] = [row]
    row["warnings"] = "; ".join(filter(None, [row["warnings"], *_lacking(run, attempt, tables)])) or None
    _check_complete(tables, run)
    temporary = folder.path / f".result.{uuid.uuid4().hex}.tmp"
    with storage_errors(folder.result):
        _fence(folder, attempt)
        _set_aside_damaged(folder)
        try:
            temporary.mkdir()
            written = {table: _write_table(temporary, table, rows) for table, rows in tables.items()}
            written["telemetry"] = _write_telemetry(temporary, recordings)
            manifest = Manifest(
                schema_version=TABLES_VERSION,
                run_id=run_id(run),
                attempt=attempt.number,
                outcome=outcome,
                tables=written,
            )
            write_file(temporary / "manifest.json", msgspec.json.encode(manifest))
            _fence(folder, attempt)
            _rename_once(temporary, folder.result)
            shutil.rmtree(attempt.checkpoints, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _oversubscribed(folder: RunFolder, attempt: Attempt, ranks: list[Row]) -> bool:
    """Whether the attempt, or any that trained these epochs before it, was oversubscribed."""
    measured = {attempt.number, *(row["attempt"] for row in ranks)}
    infos = [each.info() for each in folder.attempts() if each.number in measured]
    return any(info is not None and info.oversubscribed for info in infos)


def was_closed(run: RunConfig, events: list[Row]) -> bool:
    """Whether the closing check ended, where it was asked for: rank 0 records how long it took as its last act."""
    asked = run.epochs and run.measure.parity
    return not asked or any(event.get("closing_check_s") is not None for event in events)


def _not_closed(run: RunConfig, attempt: Attempt) -> Row:
    """The row of `checks` of a run whose closing check did not end: it was killed, it crashed, or it hung."""
    unknown: Row = dict.fromkeys((column.name for column in TABLES["checks"]), None)
    keys = {"run_id": run_id(run), "attempt": attempt.number, "epoch": run.epochs}
    return unknown | keys | {"check": CLOSING, "detail": "it did not end"}


def _lacking(run: RunConfig, attempt: Attempt, tables: Tables) -> Iterator[str]:
    """Warnings about requested results of the pass after the last epoch that are missing."""
    if not run.epochs:
        return
    processes = tables["run"][0]["processes"]
    if run.measure.attribution_steps and len({row["rank"] for row in tables["phases"]}) < processes:
        yield NO_PHASES
    if run.measure.trace and not all(attempt.trace_file(rank).exists() for rank in range(processes)):
        yield NO_TRACE
    if any(row["check"] == CLOSING for row in tables["checks"]):
        yield NO_CLOSING


def _check_complete(tables: Tables, run: RunConfig) -> None:
    assert len(tables["epochs"]) == run.epochs, f"{len(tables['epochs'])} epochs of {run.epochs}"
    ranks = {row["rank"] for row in tables["ranks"]}
    assert len(tables["ranks"]) == run.epochs * len(ranks), f"{len(tables['ranks'])} rows of {len(ranks)} ranks"
    processes = tables["run"][0]["processes"]
    assert processes in (None, len(ranks)) or not run.epochs, f"{len(ranks)} ranks of {processes}"
    for table, rows in tables.items():
        for row in rows:
            check_row(table, row)


def _write_table(folder: Path, table: str, rows: list[Row]) -> TableEntry:
    """Write one Parquet file in one row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"{table}.parquet"
    content = pa.Table.from_pylist(rows, schema=schema(table))
    pq.write_table(content, path, row_group_size=max(1, len(rows)))
    return _entry(path, rows=len(rows))


def _write_telemetry(folder: Path, recordings: Recordings) -> TableEntry:
    """Write telemetry batch by batch, each a row group: the samples of a run of hours would fill the memory."""
    import pyarrow.parquet as pq

    path, rows = folder / "telemetry.parquet", 0
    with pq.ParquetWriter(path, schema("telemetry")) as writer:
        for batch in recordings.batches():
            writer.write_batch(batch)
            rows += len(batch)
    return _entry(path, rows=rows)


def _entry(path: Path, *, rows: int) -> TableEntry:
    """The manifest's entry for a file, once it is on disk."""
    sync(path)
    return TableEntry(rows=rows, bytes=path.stat().st_size, sha256=file_sha256(path))


def _fence(folder: RunFolder, attempt: Attempt) -> None:
    """Refuse to publish for a supervisor that was taken for dead and has been replaced."""
    if folder.superseded(attempt):
        raise SupersededError


def _set_aside_damaged(folder: RunFolder) -> None:
    """Rename an incomplete result, which would keep the new one from its place."""
    if is_there(folder.result) and folder.published() is None:
        os.rename(folder.result, folder.path / f"result.damaged-{uuid.uuid4().hex[:8]}")


def _rename_once(temporary: Path, final: Path) -> None:
    sync(temporary)
    try:
        os.rename(temporary, final)
    except OSError:
        if not final.exists():
            raise
        return  # another attempt was faster: its result stands
    sync(final.parent)
