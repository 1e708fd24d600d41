"""What an engine is asked to do. Loads nothing but the standard library: engines' own environments have little else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

HASH_FACTOR, HASH_TERM, HASH_MASK = 1_103_515_245, 12_345, 2**31 - 1
"""hash(sample) = (sample · factor + term) mod 2³¹, which no engine's 64-bit integers overflow for samples below 2³²."""
SUBSET_BOUND = 2**31 // 10
"""A sample is in the random subset if its hash is below: a tenth of all."""
RECIPES = ("normalise", "filter", "subset", "statistics", "join", "sort")
SELECTING = ("filter", "subset", "join", "sort")
"""Recipes whose result is rows of the training set as they were stored, so that a run can train on them."""


@dataclass(frozen=True)
class Task:
    """One recipe on one table: `sample` int64, `label` int64, `pixels` uint8 of fixed length.

    normalise: pixels become (x ÷ 255 − mean) ÷ deviation of their channel, in float32. filter: rows of the lower half
    of the labels. subset: rows by a hash of their number. statistics: per label the number of rows, and mean and
    standard deviation of all their pixels, in float64. join: an inner join with a table that gives every label a group.
    sort: by label, then by sample.
    """

    recipe: str
    pixels: int
    """Values of one row: channels × height × width."""
    classes: int
    mean: tuple[float, ...]
    """Of each channel, or one of all."""
    deviation: tuple[float, ...]

    @property
    def kept_labels(self) -> int:
        """Labels that the filter keeps: 0 … kept_labels − 1."""
        return max(1, self.classes // 2)

    @property
    def groups(self) -> list[int]:
        """The label table: label → group."""
        return [label // 2 for label in range(self.classes)]


@dataclass(frozen=True)
class Request:
    """One process: a task, files, and how often it is carried out."""

    task: Task
    engine: str
    threads: int
    executions: int
    launched_at: float
    """Unix time at which the process was started."""
    folder: str

    @property
    def input(self) -> Path:
        """The table, as an Arrow IPC file."""
        return Path(self.folder, "input.arrow")

    @property
    def report(self) -> Path:
        """What the process measured; there once all else is."""
        return Path(self.folder, "report.json")

    def output(self, execution: int) -> Path:
        """What an execution returned, as an Arrow IPC file."""
        return Path(self.folder, f"output-{execution}.arrow")

    def write(self, path: Path) -> None:
        """Write the request as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Request:
        """The request that was written."""
        plain = json.loads(path.read_text())
        task = plain.pop("task")
        task |= {key: tuple(task[key]) for key in ("mean", "deviation")}
        return cls(task=Task(**task), **plain)
