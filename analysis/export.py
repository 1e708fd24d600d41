"""Finished runs in the formats of experiment trackers: folders of MLflow and of Weights & Biases.

Reads what is stored; nothing of this runs beside a training, and nothing leaves the machine. MLflow has one experiment
per sweep, Weights & Biases one project, in offline folders.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.comparison.summary import facts
from analysis.metrics.columns import facts_columns, tables_columns
from analysis.metrics.epochs import per_epoch
from parallelbench.config.build import completed
from parallelbench.errors import ConfigError
from parallelbench.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from analysis.runs.reader import Runs
    from parallelbench.results.declaration import Column


_NUMBERS = ("int32", "int64", "float64")
_NO_TAGS = ("displayed",)
"""Texts that say nothing of the run by itself."""


@dataclass(frozen=True)
class ExportedEpoch:
    """One epoch's row of the report's `tables/epochs.csv`."""

    epoch: int
    """Counts from 1; the step."""
    finished_at: float
    """Unix time."""
    numbers: Mapping[str, float]
    """Column → value; null ones are left out."""


@dataclass(frozen=True)
class ExportedRun:
    """A finished run. Its numbers are those of the report's tables, by the same names, which have the units."""

    run_id: str
    sweep: str
    """The name of its sweep."""
    name: str
    """The run's folder, and why it does not count, if it does not."""
    started_at: float
    """Unix time."""
    parameters: Mapping[str, Any]
    """Key of the configuration → value."""
    tags: Mapping[str, str]
    """Outcome, parity check and other words of the table of runs; `counts` is "true" or "false"."""
    numbers: Mapping[str, float]
    """Column of the table of runs → value; null ones are left out."""
    epochs: tuple[ExportedEpoch, ...]


def exported_runs(runs: Runs) -> list[ExportedRun]:
    """The runs that trained to their end, in the report's order; others have no final numbers.

    Raises `ConfigError` for a run whose names would lead out of the folder that trackers write to.
    """
    epochs = {run_id: rows for (run_id,), rows in per_epoch(runs).sort("epoch").group_by("run_id", maintain_order=True)}
    finished = facts(runs).filter(pl.col("state") == "done")
    return [_exported(row, epochs.get(row["run_id"])) for row in finished.iter_rows(named=True)]


def _exported(row: Mapping[str, Any], rows: pl.DataFrame | None) -> ExportedRun:
    columns = tables_columns()["epochs"]
    epochs = tuple(
        ExportedEpoch(each["epoch"], each["finished_at"], _numbers(each, columns))
        for each in (rows.iter_rows(named=True) if rows is not None else ())
    )
    # A resumed run has epochs from before its last attempt was launched.
    known = [time for time in (row["launched_at"], epochs[0].finished_at if epochs else None) if time is not None]
    marked = f" ({row['exclusion']})" if row["exclusion"] else ""
    for column in ("run_id", "sweep", "slug"):
        _require_file_name(row, column)
    return ExportedRun(
        run_id=row["run_id"],
        sweep=row["sweep"],
        name=f"{row['slug']}{marked}",
        started_at=min(known, default=0.0),
        parameters=dict(_flat(completed(json.loads(row["config_json"])))),
        tags=_tags(row),
        numbers=_numbers(row, facts_columns()),
        epochs=epochs,
    )


_FILE_NAME = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")


def _require_file_name(row: Mapping[str, Any], column: str) -> None:
    """Raise `ConfigError` unless a column names a file: trackers name files by it, and a result may be anybody's."""
    if not _FILE_NAME.fullmatch(row[column]):
        raise ConfigError(
            f"{row['folder']}: {column} {row[column]!r} is no file's name, and would lead out of the export's folder: "
            "move this run out of the results, or export another folder"
        )


def _numbers(row: Mapping[str, Any], columns: Iterable[Column]) -> dict[str, float]:
    return {c.name: row[c.name] for c in columns if c.type in _NUMBERS and row[c.name] is not None}


def _tags(row: Mapping[str, Any]) -> dict[str, str]:
    """Words and yes-or-no columns. Long JSON (environment, layers) stays in the run's folder, which is named."""
    kept = [
        column.name
        for column in facts_columns()
        if column.type not in _NUMBERS and not column.name.endswith("_json") and column.name not in _NO_TAGS
    ]
    tags = {name: _word(row[name]) for name in kept if row[name] is not None}
    return tags | {"counts": _word(row["exclusion"] is None), "folder": redacted(row["folder"])}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else redacted(str(value))


def _flat(node: Any, above: str = "") -> Iterable[tuple[str, Any]]:
    """Keys as on the command line; a list is one value, as JSON."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value) if isinstance(value, (dict, list)) else value


_MOST_METRICS, _MOST_OTHERS = 1000, 100
"""Most metrics of one call, and most parameters or tags."""
_LONGEST_OF_MLFLOW = 5000
"""Characters of a parameter or a tag."""


def write_mlflow(runs: Sequence[ExportedRun], folder: Path) -> None:
    """Write a store of files, which needs no server and no database."""
    # Newer versions of MLflow want to be told that files are meant.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=folder.absolute().as_uri())
    experiments = {sweep: client.create_experiment(sweep) for sweep in dict.fromkeys(run.sweep for run in runs)}
    for run in runs:
        created = client.create_run(experiments[run.sweep], start_time=_ms(run.started_at), run_name=run.name)
        _log_to_mlflow(client, created.info.run_id, run)
        client.set_terminated(created.info.run_id, "FINISHED", end_time=_ms(_ended_at(run)))


def _log_to_mlflow(client: Any, own_id: str, run: ExportedRun) -> None:
    from mlflow.entities import Metric, Param, RunTag

    ended = _ms(_ended_at(run))
    metrics = [Metric(f"run/{name}", value, ended, 0) for name, value in run.numbers.items()]
    for epoch in run.epochs:
        at = _ms(epoch.finished_at)
        metrics += [Metric(f"epoch/{name}", value, at, epoch.epoch) for name, value in epoch.numbers.items()]
    parameters = [Param(key, str(value)[:_LONGEST_OF_MLFLOW]) for key, value in run.parameters.items()]
    tags = [RunTag(key, value[:_LONGEST_OF_MLFLOW]) for key, value in run.tags.items()]
    for start in range(0, len(metrics), _MOST_METRICS):
        client.log_batch(own_id, metrics=metrics[start : start + _MOST_METRICS])
    for start in range(0, max(len(parameters), len(tags)), _MOST_OTHERS):
        part = slice(start, start + _MOST_OTHERS)
        client.log_batch(own_id, params=parameters[part], tags=tags[part])


def _ended_at(run: ExportedRun) -> float:
    return run.epochs[-1].finished_at if run.epochs else run.started_at


def _ms(unix_s: float) -> int:
    return round(unix_s * 1000)


def write_wandb(runs: Sequence[ExportedRun], folder: Path) -> None:
    """Write a folder `wandb/offline-run-…` per run, which `wandb sync` uploads when its owner wants that."""
    import wandb

    settings = wandb.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        disable_git=True,
        disable_code=True,
        save_code=False,
    )
    for run in runs:
        with wandb.init(
            mode="offline",
            dir=str(folder),
            project=run.sweep,
            name=run.name,
            id=run.run_id[:32],
            group=run.tags.get("configuration"),
            job_type=run.tags.get("strategy"),
            config={**run.parameters, "tags": dict(run.tags)},
            settings=settings,
        ) as written:
            for epoch in run.epochs:
                written.log({f"epoch/{name}": value for name, value in epoch.numbers.items()}, step=epoch.epoch)
            written.summary.update({f"run/{name}": value for name, value in run.numbers.items()})
