"""A run's preprocessing: rank 0 has it done, all ranks train on the result."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from parallelbench.config.components import Arrays
from parallelbench.config.dataset_check import checked
from parallelbench.errors import ConfigError
from parallelbench.preprocess.prepared_rows import PreparedRows
from parallelbench.preprocess.reference import prepare
from parallelbench.preprocess.stage import in_order, preprocess, task_of
from parallelbench.results.files import storage_errors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from parallelbench.config.run import RunConfig
    from parallelbench.preprocess.reference import Columns
    from parallelbench.results.attempt import Attempt
    from parallelbench.world.world import World


_POLL_S = 0.05
_CHANGES_TEST = ("filter", "join")
"""Recipes that hold for the test set, too: which labels there are, and what they mean."""


class Preprocessing:
    """The stage of one run, on one rank."""

    def __init__(self, run: RunConfig, attempt: Attempt, world: World) -> None:
        self._run, self._world, self._task = run, world, task_of(run)
        self._folder = attempt.path / "preprocess"
        self._files = [attempt.path / f"prepared-{what}.npy" for what in ("images", "labels")]
        self._columns: Columns = {}
        self.rows: list[dict[str, Any]] = []
        """Of the table `preprocess`, on rank 0."""
        self.facts: dict[str, Any] = {}
        """Columns of the table `run`, on rank 0."""

    def carry_out(self, arrays: Arrays) -> None:
        """Do it, on rank 0, and remove what earlier attempts have left that were killed meanwhile."""
        if self._world.rank == 0:
            _remove_leftovers(self._folder.parent)
            prepared = preprocess(self._run, arrays, self._folder)
            self._columns, self.rows, self.facts = prepared.columns, prepared.rows, prepared.facts

    def training_set(self, arrays: Arrays) -> tuple[RunConfig, Arrays]:
        """The prepared rows as the run's data set; the test set is changed alike by NumPy.

        Raises `ConfigError` where they fill no batch.
        """
        images, labels = self._on_all_ranks()
        test_images, test_labels = self._test_set(arrays)
        data = PreparedRows(
            name=self._run.data.name,
            augment=self._run.data.augment,
            stored=self._run.data,
            train_samples=len(labels),
            test_samples=len(test_labels),
        )
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

    def _on_all_ranks(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Images and labels; rank 0 passes them on through files of the attempt's folder."""
        if self._world.rank == 0:
            columns = in_order(self._task, self._columns)
            self._columns = {}
            images = np.ascontiguousarray(columns["pixels"], np.uint8).reshape(-1, *self._run.data.shape)
            parts: list[NDArray[Any]] = [
                images,
                columns["group" if self._task.recipe == "join" else "label"].astype(np.int64),
            ]
        if self._world.size > 1:
            if self._world.rank == 0:
                with storage_errors(self._files[0]):
                    for path, part in zip(self._files, parts, strict=True):
                        unfinished = path.with_suffix(".unfinished.npy")
                        np.save(unfinished, part, allow_pickle=False)
                        unfinished.replace(path)
            else:  # not by a collective: an engine may need longer than those may take
                while not all(path.exists() for path in self._files):
                    time.sleep(_POLL_S)
            self._world.barrier()
            if self._world.rank:
                parts = [np.load(path, allow_pickle=False) for path in self._files]
            self._world.barrier()
            if self._world.rank == 0:
                for path in self._files:
                    path.unlink()
        return parts[0], parts[1]

    def _test_set(self, arrays: Arrays) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        if self._task.recipe not in _CHANGES_TEST:
            return arrays.test_images, arrays.test_labels
        places = np.arange(len(arrays.test_labels))
        kept = prepare(self._task, {"sample": places, "label": np.asarray(arrays.test_labels)})
        labels = kept["group" if self._task.recipe == "join" else "label"].astype(np.int64)
        return arrays.test_images[kept["sample"]], labels


def _remove_leftovers(attempt: Path) -> None:
    """Tables and prepared rows of all attempts until this one: many times the size of what they are prepared from."""
    for earlier in attempt.parent.iterdir():
        if earlier.name.isdecimal() and int(earlier.name) <= int(attempt.name):
            shutil.rmtree(earlier / "preprocess", ignore_errors=True)
            for file in earlier.glob("prepared-*.npy"):
                file.unlink(missing_ok=True)
