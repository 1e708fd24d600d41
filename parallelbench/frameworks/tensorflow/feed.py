"""How batches reach TensorFlow's replicas: cut out of the data set in memory, inside the step's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from parallelbench.config.components import Batch
from parallelbench.loaders.order import evaluation_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from parallelbench.config.components import Arrays, Shard
    from parallelbench.config.run import RunConfig
    from parallelbench.training.exchange import Exchange, Order

_HOST = "/cpu:0"


class Preparation(NamedTuple):
    """What becomes of stored images, in a step's graph."""

    dtype: Any
    scale: NDArray[np.float64]
    """Of each channel, what a byte is multiplied by; then `shift` is added."""
    shift: NDArray[np.float64]
    padding: int | None
    """Border around stored images, of which augmentation cuts windows: 0 for those below 8 pixels, which have one
    window. None: no augmentation."""
    height: int
    width: int

    @classmethod
    def of(cls, run: RunConfig) -> Preparation:
        """That of a run."""
        dtype = tf.float64 if run.precision == "fp64" else tf.float32
        std, mean = (np.array(each, dtype=np.float64) for each in (run.data.std, run.data.mean))
        _, height, width = run.data.shape
        return cls(dtype, 1 / (255 * std), -mean / std, height // 8 if run.data.augment else None, height, width)

    def images(self, stored: Any, samples: Any, *moved: Any) -> Any:
        """The images of these samples, normalised; `moved`: window's place and whether it is mirrored."""
        images = tf.gather(stored, samples)
        return self.normalised(self._cut(images, *moved) if moved else images)

    def normalised(self, images: Any) -> Any:
        """Bytes as numbers of mean 0 and deviation 1."""
        return tf.cast(images, self.dtype) * tf.constant(self.scale, self.dtype) + tf.constant(self.shift, self.dtype)

    def _cut(self, padded: Any, down: Any, right: Any, flip: Any = None) -> Any:
        """One window of each padded image; mirrored where `flip` is 1."""
        images = tf.gather(padded, down[:, None] + tf.range(self.height), axis=1, batch_dims=1)
        images = tf.gather(images, right[:, None] + tf.range(self.width), axis=2, batch_dims=1)
        return images if flip is None else tf.where(flip[:, None, None, None] > 0, images[:, :, ::-1], images)


class Feed:
    """What the feeds have of a `BatchLoader`'s interface: no processes, and nothing to close."""

    workers = 0

    def worker_pids(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing."""


class ResidentFeed(Feed):
    """The data set lies in each device's memory, channels last; a replica gathers and normalises its slice of a batch.

    The order of samples is torch's (`Exchange.order`). The images of its batches are this feed, which the step asks for
    its samples.
    """

    def __init__(
        self, arrays: Arrays, run: RunConfig, exchange: Exchange, *, shard: Shard, devices: Sequence[str]
    ) -> None:
        """`shard`: this rank's, which its `devices` share evenly; each of them holds the whole data set."""
        self._run, self._exchange, self._shard, self.replicas = run, exchange, shard, len(devices)
        self.steps_per_epoch, self.local_batch_size = run.steps_per_epoch, run.global_batch_size // shard.count
        self._preparation = Preparation.of(run)
        self._stored = len(arrays.train_labels)
        # TensorFlow gathers neither bytes nor int32 on a GPU: all of them would go to the host in each step. fp16 holds
        # every byte, and labels are int64.
        stored = np.uint8 if devices[0].startswith("/cpu") else np.float16
        images = padded(channels_last(arrays.train_images), self._preparation.padding).astype(stored, copy=False)
        test_images = channels_last(arrays.test_images).astype(stored, copy=False)
        labels, test_labels = (np.asarray(each, dtype=np.int64) for each in (arrays.train_labels, arrays.test_labels))
        with tf.device(_HOST):
            held, tested = (tuple(map(tf.constant, each)) for each in ((images, labels), (test_images, test_labels)))
        self.held = [_copied(held, device) for device in devices]
        """Training images and labels on each device, as no step should take them from another one."""
        self._test_images, self._test_labels = _copied(tested, devices[0])
        shape = (self.steps_per_epoch, self.replicas, self.local_batch_size // self.replicas)
        fields = 1 if self._preparation.padding is None else 3 + run.data.flip
        with tf.device(_HOST):
            self._position = tf.Variable(0, dtype=tf.int32, trainable=False)
            self._order = [tf.Variable(np.zeros(shape, np.int32), trainable=False) for _ in range(fields)]

    def train(self, epoch: int) -> Iterator[Batch]:
        """One epoch's batches."""
        orders = orders_of_shard(self._exchange.order(epoch), self._shard, self.replicas, self._run)
        for variable, values in zip(self._order, orders, strict=True):
            variable.assign(values)
        self._position.assign(0)
        for _ in range(self.steps_per_epoch):
            yield Batch(self, None, self.local_batch_size)  # type: ignore[arg-type]

    def test(self, samples: int | None = None) -> Iterator[Batch]:
        """This shard's part of the test set, or of its first `samples`, as `BatchLoader.test`; images: start, stop."""
        for start, stop in evaluation_batches(self._run.data, self._shard, self.local_batch_size, samples):
            yield Batch((self, start, stop), None, stop - start)  # type: ignore[arg-type]

    def next(self, replica: int) -> tuple[Any, Any]:
        """In a step's graph: the images and labels of one of this rank's replicas."""
        images, labels = self.held[replica]
        with tf.device(_HOST):
            samples, *moved = (tf.gather(variable, self._position)[replica] for variable in self._order)
            rows = samples % self._stored
        return self._preparation.images(images, rows, *moved), tf.gather(labels, rows)

    def advance(self) -> None:
        """In a step's graph, after all replicas have their samples: go on to the next batch."""
        self._position.assign_add(1)

    def tested(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """In a graph: test images and labels from `start` up to `stop`."""
        return self._preparation.normalised(self._test_images[start:stop]), self._test_labels[start:stop]


def _copied(tensors: Sequence[Any], device: str) -> tuple[Any, ...]:
    """On this device; a processor's devices share them."""
    with tf.device(device):
        return tuple(map(tf.identity, tensors))


def orders_of_shard(order: Order, shard: Shard, slices: int, run: RunConfig) -> list[NDArray[np.int32]]:
    """A shard's part of an epoch's order in so many slices: each of shape (steps, slices, samples of a slice)."""
    pieces = (values.reshape(run.steps_per_epoch, shard.count, slices, -1) for values in order if values is not None)
    return [piece[:, shard.index].astype(np.int32, copy=False) for piece in pieces]


def channels_last(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images of shape (n, channels, height, width) as (n, height, width, channels)."""
    return np.ascontiguousarray(np.asarray(images).transpose(0, 2, 3, 1))


def padded(images: NDArray[np.uint8], border: int | None) -> NDArray[np.uint8]:
    """Images, channels last, with a black border."""
    return np.pad(images, [(0, 0), (border, border), (border, border), (0, 0)]) if border else images
