"""What was run on what, in one small table: as publication 000 begins its experiments (its table 1)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import latex, text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from analysis.reader import Runs

_OF_RUNS = {
    "Strategies": "strategy",
    "Models": "model",
    "Epochs": "epochs",
    "Devices": "devices",
    "Data sets": "data",
    "Global batch": "global_batch_size",
    "Precision": "precision",
}
"""Row → the column of the run table."""
_GPU, _LINK = re.compile(r"GPU\d+"), re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
"""Words of `nvidia-smi topo -m`; NV12: twelve NVLinks."""
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_GIB = 2**30


def experiment(runs: Runs) -> list[tuple[str, str]]:
    """What it is, and its distinct values in the order of numbers; a dash where none was recorded."""
    environments = [json.loads(each) for each in runs.run["environment_json"].drop_nulls().unique(maintain_order=True)]
    cuda = [each.get("cuda") or {} for each in environments]
    devices = [device for each in cuda for device in each.get("devices") or ()]
    shown: dict[str, Iterable[Any]] = {
        "Device": runs.run["device_name"].drop_nulls(),
        "Memory of a GPU": [f"{device['memory_bytes'] / _GIB:.0f} GiB" for device in devices],
        "Links between GPUs": [link for each in cuda for link in _links(each.get("topology"))],
        "Nodes": runs.run["nodes"],
        "Framework": _frameworks(runs),
        **{name: runs.run[column].drop_nulls() for name, column in _OF_RUNS.items()},
    }
    repeats = runs.run["repeat"].n_unique()
    counts = [("Repeats", str(repeats)), ("Runs", f"{runs.run.height:,}")]
    return [*((name, _listed(values)) for name, values in shown.items()), *counts]


def _links(topology: str | None) -> list[str]:
    """Of the matrix, from GPU to GPU alone: network cards stand behind them, and below it all kinds are explained."""
    rows = [_ESCAPES.sub("", line).split() for line in (topology or "").splitlines()]
    gpus = max((sum(bool(_GPU.fullmatch(cell)) for cell in row) for row in rows), default=0)
    of_gpus = [row[1 : 1 + gpus] for row in rows if row and _GPU.fullmatch(row[0])]
    return [cell for row in of_gpus for cell in row if _LINK.fullmatch(cell)]


def _frameworks(runs: Runs) -> list[str]:
    """Each with its version: "torch 2.15.0"."""
    rows = runs.run.select(pl.col("framework").fill_null("torch"), "environment_json").unique(maintain_order=True)
    versions = ((name, (json.loads(each or "{}").get("packages") or {}).get(name)) for name, each in rows.rows())
    return [f"{name} {version}" if version else name for name, version in versions]


def _listed(values: Iterable[Any]) -> str:
    distinct = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    return ", ".join(map(str, distinct)) or text.MISSING


def as_rows(entries: list[tuple[str, str]]) -> pl.DataFrame:
    """For the CSV file: entry and value."""
    return pl.DataFrame(entries, schema={"entry": pl.String, "value": pl.String}, orient="row")


def as_tabular(entries: list[tuple[str, str]]) -> str:
    """For a paper."""
    body = [[latex.escape(cell) for cell in entry] for entry in entries]
    rows = latex.Rows(f"l{latex.broken(0.6)}", ("Experiment", "Values"), body)
    return latex.floats([("What was run, and on what", [rows])], name="experiment")
