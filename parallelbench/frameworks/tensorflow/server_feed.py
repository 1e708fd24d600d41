"""How batches reach the workers of `strategy=tf_parameter_server`: from their own memory, by numbers of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from parallelbench.config.components import Batch, Shard
from parallelbench.frameworks.tensorflow.feed import (
    Preparation,
    channels_last,
    evaluation_batches,
    orders_of_shard,
    padded,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from parallelbench.config.components import Arrays
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.server_cluster import Cluster
    from parallelbench.training.exchange import Exchange


class ServedStep(NamedTuple):
    """What a batch of the coordinator stands for."""

    feed: CoordinatorFeed
    step: int
    """Of the epoch, from 0."""


class CoordinatorFeed:
    """The order of samples; each worker has the data set in its own memory. With the interface of `BatchLoader`."""

    workers = 0

    def __init__(self, arrays: Arrays, run: RunConfig, exchange: Exchange, *, cluster: Cluster) -> None:
        """Let all workers read the data set, once for the run and its parity check."""
        self._run, self._exchange, self._cluster = run, exchange, cluster
        self.preparation = Preparation.of(run)
        self.order: list[NDArray[np.int32]] = []
        """Each of shape (steps, slices, samples of a slice): rows of the data set, and how they are moved."""
        self._stored = len(arrays.train_labels)
        if cluster.resident is None:
            files = _Files.write(exchange.folder, arrays, self.preparation.padding)
            cluster.resident = cluster.per_worker(files.dataset)
        self.resident = cluster.resident
        """Iterator of each worker over training images and labels, test images and labels, again and again."""

    def train(self, epoch: int) -> Iterator[Batch]:
        """One epoch's batches."""
        run = self._run
        samples, *moved = orders_of_shard(self._exchange.order(epoch), Shard(), self._cluster.workers, run)
        self.order = [samples % self._stored, *moved]
        for step in range(run.steps_per_epoch):
            yield Batch(ServedStep(self, step), None, run.global_batch_size)  # type: ignore[arg-type]

    def test(self, samples: int | None = None) -> Iterator[Batch]:
        """The whole test set, or its first `samples`; images: feed, start, stop."""
        local_batch_size = self._run.global_batch_size // self._cluster.workers
        for start, stop in evaluation_batches(self._run, Shard(), local_batch_size, samples):
            yield Batch((self, start, stop), None, stop - start)  # type: ignore[arg-type]

    def worker_pids(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing."""


class TaskFeed:
    """Batches without samples, for ranks whose server gets its steps from the coordinator."""

    workers = 0

    def __init__(self, run: RunConfig) -> None:
        self._steps = run.steps_per_epoch

    def train(self, epoch: int) -> Iterator[Batch]:
        """As many as the coordinator has."""
        for _ in range(self._steps):
            yield Batch(None, None, 0)

    def test(self, samples: int | None = None) -> Iterator[Batch]:
        """None."""
        yield from ()

    def worker_pids(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing."""


class _Files(NamedTuple):
    """The data set as workers read it: raw bytes, since TensorFlow sends no array that a worker would keep."""

    folder: Path
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def write(cls, folder: Path, arrays: Arrays, padding: int) -> _Files:
        """Write them into the attempt's folder, which all nodes see."""
        images = padded(channels_last(arrays.train_images), padding)
        labels = np.asarray(arrays.train_labels, np.int32)
        test_images, test_labels = channels_last(arrays.test_images), np.asarray(arrays.test_labels, np.int32)
        whole: list[NDArray[Any]] = [images, labels, test_images, test_labels]
        for number, array in enumerate(whole):
            array.tofile(folder / f"resident-{number}.bin")
        return cls(folder, tuple(array.shape for array in whole))

    def dataset(self) -> Any:
        """On a worker: all four arrays as one element, read once."""
        types = (tf.uint8, tf.int32, tf.uint8, tf.int32)

        def read(_: Any) -> tuple[Any, ...]:
            return tuple(
                tf.reshape(tf.io.decode_raw(tf.io.read_file(str(self.folder / f"resident-{number}.bin")), kind), shape)
                for number, (kind, shape) in enumerate(zip(types, self.shapes, strict=True))
            )

        return tf.data.Dataset.from_tensors(0).map(read).cache().repeat()
