"""Runs as a folder of MLflow: one experiment per sweep."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from analysis.export.exported_run import ExportedRun

_METRICS, _OTHERS = 1000, 100
"""Most metrics of one call, and most parameters or tags."""
_LONGEST = 5000
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
        _log(client, created.info.run_id, run)
        client.set_terminated(created.info.run_id, "FINISHED", end_time=_ms(_ended_at(run)))


def _log(client: Any, own_id: str, run: ExportedRun) -> None:
    from mlflow.entities import Metric, Param, RunTag

    ended = _ms(_ended_at(run))
    metrics = [Metric(f"run/{name}", value, ended, 0) for name, value in run.numbers.items()]
    for epoch in run.epochs:
        at = _ms(epoch.finished_at)
        metrics += [Metric(f"epoch/{name}", value, at, epoch.epoch) for name, value in epoch.numbers.items()]
    parameters = [Param(key, str(value)[:_LONGEST]) for key, value in run.parameters.items()]
    tags = [RunTag(key, value[:_LONGEST]) for key, value in run.tags.items()]
    for start in range(0, len(metrics), _METRICS):
        client.log_batch(own_id, metrics=metrics[start : start + _METRICS])
    for start in range(0, max(len(parameters), len(tags)), _OTHERS):
        part = slice(start, start + _OTHERS)
        client.log_batch(own_id, params=parameters[part], tags=tags[part])


def _ended_at(run: ExportedRun) -> float:
    return run.epochs[-1].finished_at if run.epochs else run.started_at


def _ms(unix_s: float) -> int:
    return round(unix_s * 1000)
