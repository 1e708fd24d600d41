"""Small tables, and the recipes written out in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from parallelbench.config.task import RECIPES, Request, Task
from parallelbench.preprocess import tables
from parallelbench.preprocess.process import engine_of, execute
from parallelbench.preprocess.recipes import Columns

__all__ = ["RECIPES", "by_hand", "carried_out", "columns", "table", "task"]


def task(recipe: str, *, channels: int = 1) -> Task:
    """Five labels and four pixels per channel."""
    means, deviations = (0.1307, 0.4822, 0.4465), (0.3081, 0.2435, 0.2616)
    return Task(recipe, pixels=4 * channels, classes=5, mean=means[:channels], deviation=deviations[:channels])


def columns(each: Task, *, rows: int) -> Columns:
    """Random rows in which label 3 does not occur; the samples are not in order."""
    random = np.random.default_rng(rows)
    return {
        "sample": random.permutation(rows).astype(np.int64),
        "label": random.choice([0, 1, 2, 4], rows).astype(np.int64),
        "pixels": random.integers(0, 256, (rows, each.pixels)).astype(np.uint8),
    }


def table(of: Columns, *, batch_rows: int) -> pa.Table:
    """The columns in record batches."""
    rows = len(of["sample"])
    parts = [
        {name: values[start : start + batch_rows] for name, values in of.items()}
        for start in range(0, rows, batch_rows)
    ]
    return pa.Table.from_batches([tables.batch(part) for part in parts])


def carried_out(engine: str, each: Task, stored: pa.Table) -> Columns:
    """What an engine makes of a table, in this process."""
    request = Request(each, engine, threads=1, executions=1, launched_at=0.0, folder="")
    row, result = execute(engine_of(request), stored)
    assert row["execution_time_s"] > 0
    return tables.columns_of(result)


def by_hand(each: Task, of: Columns) -> list[dict[str, Any]]:
    """The rows that a recipe asks for, one at a time."""
    rows = [dict(zip(of, values, strict=True)) for values in zip(*(v.tolist() for v in of.values()), strict=True)]
    match each.recipe:
        case "normalise":
            return [row | {"pixels": [_normalised(each, *pair) for pair in enumerate(row["pixels"])]} for row in rows]
        case "filter":
            return [row for row in rows if row["label"] in (0, 1)]  # the lower half of five labels
        case "subset":
            return [row for row in rows if (row["sample"] * 1_103_515_245 + 12_345) % 2**31 < 2**31 // 10]
        case "statistics":
            return [_statistics(rows, label) for label in (0, 1, 2, 4)]
        case "join":
            return [row | {"group": {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}[row["label"]]} for row in rows]
    return sorted(rows, key=lambda row: (row["label"], row["sample"]))


def _normalised(each: Task, place: int, value: int) -> np.float32:
    channel = place // 4
    mean, deviation = np.float32(each.mean[channel]), np.float32(each.deviation[channel])
    return np.float32(np.float32(np.float32(value) / np.float32(255)) - mean) / deviation


def _statistics(rows: list[dict[str, Any]], label: int) -> dict[str, Any]:
    values = [value for row in rows if row["label"] == label for value in row["pixels"]]
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    count = sum(row["label"] == label for row in rows)
    return {"label": label, "count": count, "mean": mean, "deviation": deviation}
