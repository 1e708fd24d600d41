"""The recipes in NumPy: what every engine's result is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from parallelbench.config.task import HASH_FACTOR, HASH_MASK, HASH_TERM, SUBSET_BOUND

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from parallelbench.config.task import Task


Columns = dict[str, "NDArray[Any]"]
"""Name → values, one per row; pixels have the shape (rows, pixels)."""


def prepare(task: Task, columns: Columns) -> Columns:
    """Carry out a recipe; rows keep their order, but for `sort`."""
    label, sample = columns["label"], columns["sample"]
    match task.recipe:
        case "normalise":
            return columns | {"pixels": normalised(task, columns["pixels"])}
        case "filter":
            return _rows(columns, label < task.kept_labels)
        case "subset":
            hashes = (sample * np.int64(HASH_FACTOR) + np.int64(HASH_TERM)) & np.int64(HASH_MASK)
            return _rows(columns, hashes < SUBSET_BOUND)
        case "statistics":
            return statistics(task, label, columns["pixels"])
        case "join":
            return columns | {"group": np.array(task.groups, np.int64)[label]}
        case "sort":
            return _rows(columns, np.lexsort((sample, label)))
    raise AssertionError(task.recipe)


def normalised(task: Task, pixels: NDArray[Any]) -> NDArray[np.float32]:
    """(x ÷ 255 − mean) ÷ deviation; each of the three operations is rounded to float32."""
    mean, deviation = (per_pixel(task, values) for values in (task.mean, task.deviation))
    result = pixels.astype(np.float32)
    result /= np.float32(255)
    result -= mean
    result /= deviation
    return result


def per_pixel(task: Task, channels: tuple[float, ...]) -> NDArray[np.float32]:
    """The value of each pixel's channel."""
    return np.repeat(np.array(channels, np.float32), task.pixels // len(channels))


def statistics(task: Task, label: NDArray[Any], pixels: NDArray[Any]) -> Columns:
    """Count, mean and standard deviation per label that occurs; sums are whole numbers, so little is rounded."""
    sums = pixels.sum(axis=1, dtype=np.int64)
    squares = np.einsum("ij,ij->i", pixels, pixels, dtype=np.int64)
    count = np.bincount(label, minlength=task.classes)
    occurs = np.flatnonzero(count)
    values = count[occurs] * task.pixels
    total, total_squares = (np.bincount(label, of, minlength=task.classes)[occurs] for of in (sums, squares))
    mean = total / values
    deviation = np.sqrt(total_squares / values - mean**2)
    return {"label": occurs.astype(np.int64), "count": count[occurs], "mean": mean, "deviation": deviation}


def _rows(columns: Columns, which: NDArray[Any]) -> Columns:
    return {name: values[which] for name, values in columns.items()}
