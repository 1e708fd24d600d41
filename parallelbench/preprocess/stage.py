"""A run's preprocessing: rank 0 has it done, all ranks train on the rows that it leaves.

Write the training set as a table, start the engine's process, compare its result with NumPy's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from parallelbench.config.components import Arrays, Data
from parallelbench.config.dataset_check import checked
from parallelbench.config.task import Request, Task
from parallelbench.environments import interpreter
from parallelbench.errors import ConfigError, EngineError, one_line
from parallelbench.preprocess import tables
from parallelbench.preprocess.recipes import Columns, prepare
from parallelbench.processes import die_with_parent, inherited
from parallelbench.results.files import storage_errors
from parallelbench.world.allowance import processor_time_is_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from parallelbench.config.run import RunConfig
    from parallelbench.results.attempt import Attempt
    from parallelbench.world.world import World


_POLL_S = 0.05
_CHANGES_TEST = ("filter", "join")
"""Recipes that hold for the test set, too: which labels there are, and what they mean."""


class Preprocessing:
    """The stage of one run, on one rank."""

    def __init__(self, run: RunConfig, attempt: Attempt, world: World) -> None:
        self._run, self._world, self._task = run, world, task_of(run)
        self._folder, self._done = attempt.path / "preprocess", attempt.path / "preprocessed"
        self.rows: list[dict[str, Any]] = []
        """Of the table `preprocess`, on rank 0."""
        self.facts: dict[str, Any] = {}
        """Columns of the table `run`, on rank 0."""

    def carry_out(self, arrays: Arrays) -> None:
        """Do it, on rank 0, and remove what earlier attempts have left that were killed meanwhile; others wait."""
        if self._world.rank == 0:
            _remove_leftovers(self._folder.parent)
            self.rows, self.facts = preprocess(self._run, arrays, self._folder)
        if self._world.size > 1:  # not by a collective: an engine may need longer than those may take
            if self._world.rank == 0:
                with storage_errors(self._done):
                    self._done.touch()
            while not self._done.exists():
                time.sleep(_POLL_S)
            self._world.barrier()
            if self._world.rank == 0:
                self._done.unlink()

    def training_set(self, arrays: Arrays) -> tuple[RunConfig, Arrays]:
        """The rows that the recipe leaves as the run's data set; of the test set likewise.

        NumPy says which: the engine's result was compared with its own, bit for bit. Raises `ConfigError` where they
        fill no batch.
        """
        samples, labels = self._left(arrays.train_labels, self._run.data.train_samples)
        images = arrays.train_images[samples % len(arrays.train_images)]
        test_images, test_labels = arrays.test_images, arrays.test_labels
        if self._task.recipe in _CHANGES_TEST:
            places, test_labels = self._left(test_labels, len(test_labels))
            test_images = test_images[places]
        same = {key: getattr(self._run.data, key) for key in PreparedRows.__struct_fields__ if "samples" not in key}
        data = PreparedRows(train_samples=len(labels), test_samples=len(test_labels), **same)
        run = msgspec.structs.replace(self._run, data=data)
        if not run.steps_per_epoch or not len(test_labels):
            raise ConfigError(
                f"preprocess.recipe={self._task.recipe} leaves {len(labels)} training and {len(test_labels)} test "
                f"samples of data={data.name}, too few for a global batch of {run.global_batch_size}: choose a smaller "
                "batch_size, or more data"
            )
        self.facts |= {
            "train_samples": len(labels),
            "test_samples": len(test_labels),
            "steps_per_epoch": run.steps_per_epoch,
            "dropped_samples": len(labels) - run.steps_per_epoch * run.global_batch_size,
        }
        return run, checked(data, Arrays(images, labels, test_images, test_labels))

    def _left(self, labels: NDArray[np.int64], rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers and labels of what the recipe leaves of so many rows; beyond the stored ones they are copies."""
        sample = np.arange(rows)
        left = prepare(self._task, {"sample": sample, "label": np.asarray(labels)[sample % len(labels)]})
        return left["sample"], left["group" if self._task.recipe == "join" else "label"]


def _remove_leftovers(attempt: Path) -> None:
    """Tables of all attempts until this one: many times the size of what they are prepared from."""
    for earlier in attempt.parent.iterdir():
        if earlier.name.isdecimal() and int(earlier.name) <= int(attempt.name):
            shutil.rmtree(earlier / "preprocess", ignore_errors=True)


class PreparedRows(Data, frozen=True, kw_only=True):
    """Another data set with another number of samples; its arrays exist in memory only."""

    train_samples: int
    """Training samples that were prepared."""
    test_samples: int
    """Test samples that belong to them."""
    mean: tuple[float, ...]  # type: ignore[misc]
    """As of the data set, like all that follows."""
    std: tuple[float, ...]  # type: ignore[misc]
    flip: bool  # type: ignore[misc]
    shape: tuple[int, ...]
    num_classes: int
    """Also where some labels don't occur any more."""

    def load(self, data_dir: Path) -> Arrays:
        """Never: every rank has the arrays."""
        raise AssertionError("prepared rows lie in no file")


_ROUNDED = {"statistics": 1e-12}
_ROUNDED_BY = {("normalise", "polars"): 1e-6}


def tolerance(recipe: str, engine: str) -> float:
    """Largest difference from NumPy that passes, relative where the value is above 1; 0: the same bits.

    Sums of the statistics are whole numbers, but their quotients and roots are rounded in float64. Polars multiplies by
    a reciprocal where it divides by a number, so its float32 is off by a few of the last bits.
    """
    return _ROUNDED.get(recipe, 0.0) or _ROUNDED_BY.get((recipe, engine), 0.0)


_START = (
    "import sys; sys.path.append(sys.argv[2]); from parallelbench.preprocess.process import main; main(sys.argv[1])"
)
"""The suite's folder comes last, so that an engine's own environment finds its own packages first."""
_ROOT = Path(__file__).resolve().parents[2]


def task_of(run: RunConfig) -> Task:
    """The run's recipe on its training set."""
    assert run.preprocess.recipe is not None
    channels, height, width = run.data.shape
    return Task(
        recipe=run.preprocess.recipe,
        pixels=channels * height * width,
        classes=run.data.num_classes,
        mean=run.data.mean,
        deviation=run.data.std,
    )


def preprocess(run: RunConfig, arrays: Arrays, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Carry out the run's recipe; `folder` holds the tables meanwhile. Raises `EngineError` where the engine fails.

    Returns rows of the table `preprocess`, without the keys of the run, and columns of the table `run`.

    The stage's time is that of the engine's process and of reading its result; writing its input and the comparison
    are not part of it.
    """
    task, chosen = task_of(run), run.preprocess
    with _temporary(folder):
        stored = table_of(task, arrays, rows=run.data.train_samples)
        request = Request(task, chosen.engine, chosen.threads, chosen.executions, time.time(), str(folder))
        with storage_errors(folder):
            tables.write(stored, request.input)
        rows_in = stored.num_rows
        del stored
        report, began = run_process(request)
        found = tables.columns_of(tables.read(request.output(1)))
        stage_s = time.perf_counter() - began
        _compare(request, found)
    rows = [row | {"input_rows": rows_in, "input_bytes": report["input_bytes"]} for row in report["executions"]]
    facts = {"preprocess_version": report["version"], "preprocess_time_s": stage_s, "preprocess_failed": False}
    return rows, facts


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    with storage_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table_of(task: Task, arrays: Arrays, *, rows: int) -> pa.Table:
    """The training set as a table; rows beyond those that are stored are copies of them."""
    import pyarrow as pa

    images = arrays.train_images.reshape(len(arrays.train_images), task.pixels)
    batches = []
    for start in range(0, rows, tables.BATCH_ROWS):
        sample = np.arange(start, min(start + tables.BATCH_ROWS, rows), dtype=np.int64)
        stored = sample % len(images)
        columns: Columns = {"sample": sample, "label": arrays.train_labels[stored], "pixels": images[stored]}
        batches.append(tables.batch(columns))
    return pa.Table.from_batches(batches)


def run_process(request: Request) -> tuple[dict[str, Any], float]:
    """Start the engine's process and wait for it; returns its report, and the clock's reading at its start."""
    folder = Path(request.folder)
    python, path, log = interpreter(request.engine), folder / "request.json", folder / "log.txt"
    variables = inherited(os.environ) | {
        "OMP_NUM_THREADS": str(request.threads),
        "POLARS_MAX_THREADS": str(request.threads),
    }
    with log.open("wb") as stream:
        began = time.perf_counter()
        Request(**{**vars(request), "launched_at": time.time()}).write(path)
        done = subprocess.run(
            # Isolated from PYTHONPATH, which may lead to other versions, where the environment is the engine's own.
            [str(python), *(["-I"] if request.engine == "velox" else []), "-c", _START, str(path), str(_ROOT)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=variables,
            preexec_fn=die_with_parent,
            check=False,
        )
    if not request.report.exists():
        raise _failure(request, done.returncode, log.read_text(errors="replace"))
    report: dict[str, Any] = json.loads(request.report.read_text())
    return report, began


def _failure(request: Request, returncode: int, printed: str) -> EngineError:
    lines = [line for line in printed.splitlines() if line.strip()]
    said = f": {lines[-1]}" if lines else ""
    what = f"preprocess.engine={request.engine} with recipe={request.task.recipe}"
    if returncode == -signal.SIGXCPU:
        return EngineError(one_line(f"{what}: its process {processor_time_is_up()}"), "error")
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = ", by hand or by the kernel for lack of memory" if name == "SIGKILL" else ""
        kind = "killed" if name == "SIGKILL" else "error"
        return EngineError(one_line(f"{what}: its process was killed by {name}{hint}{said}"), kind)
    return EngineError(one_line(f"{what}: its process ended with exit code {returncode}{said}"), "error")


def _compare(request: Request, found: Columns) -> None:
    """Compare the first and the last result with NumPy's; raises `EngineError` where one differs."""
    task = request.task
    expected = prepare(task, tables.columns_of(tables.read(request.input)))
    last = tables.columns_of(tables.read(request.output(request.executions)))
    for execution, result in ((1, found), (request.executions, last)):
        limit = tolerance(task.recipe, request.engine)
        differs = tables.difference(in_order(task, result), in_order(task, expected), tolerance=limit)
        if differs:
            raise EngineError(
                f"preprocess.engine={request.engine} with recipe={task.recipe} prepares something else than NumPy in "
                f"execution {execution}: {differs}",
                "error",
            )


def in_order(task: Task, columns: Columns) -> Columns:
    """The rows by sample, or by label where there are no samples: of all recipes but sort the order means nothing."""
    if task.recipe == "sort":
        return columns
    key = columns["label" if task.recipe == "statistics" else "sample"]
    if (np.diff(key) > 0).all():
        return columns
    order = np.argsort(key, kind="stable")
    return {name: values[order] for name, values in columns.items()}
