"""The loader: the data set lies on the device as uint8; batches are cut out, normalised, augmented there.

This is the general part of how airbench feeds a GPU (https://github.com/KellerJordan/cifar10-airbench): no
workers, no copies from the host within an epoch, one kernel to gather a batch and one to normalise it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from parallelbench.data.base import Arrays, Data
    from parallelbench.strategies.base import Shard

TEST_BATCH_SIZE = 1024
"""At most so many test samples are evaluated at once on one rank."""
_LEAST_TEST_BATCH_SIZE = 32


@dataclass(slots=True)
class Batch:
    """This rank's slice of a global batch."""

    images: Tensor | None
    """Normalised, shape (size, channels, height, width); None where the rank never looks at images."""
    labels: Tensor | None
    """int64, shape (size,); None where the rank never looks at labels."""
    size: int
    """Samples in the slice."""


def generator(*, seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A CPU generator for each (seed, epoch, purpose), the same on all ranks, devices and world sizes."""
    digest = hashlib.sha256(f"{purpose}/{seed}/{epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def evaluation_slices(samples: int, *, index: int, count: int, at_most: int = TEST_BATCH_SIZE) -> list[tuple[int, int]]:
    """Cut the test set into the batches of shard `index` of `count`: (start, stop) of each.

    All shards get equally many batches, so that collectives within a forward pass match; all batches have one
    size of at most `at_most`, except that the last may be smaller (and, where there are fewer samples
    than shards, empty). Over all shards, every sample occurs exactly once.
    """
    steps = -(-samples // (count * at_most))
    per_step = -(-samples // (count * steps)) * count
    slices = []
    for start in range(0, samples, per_step):
        size = min(per_step, samples - start)
        slices.append((start + size * index // count, start + size * (index + 1) // count))
    return slices


class ResidentLoader:
    """Yields one rank's slices of every global batch, from a data set that lies on the device.

    Training: one permutation per (seed, epoch), the same for all strategies, world sizes and devices; step s
    takes its entries s·G … (s+1)·G − 1, of which shard i of n reads the i-th n-th. The tail that fills no
    global batch is dropped. `data.train_samples` may be a multiple of the stored samples (copies): numbers
    are taken modulo.

    Nothing in an iteration synchronises host and device; what an epoch needs is moved before its first batch.
    """

    def __init__(
        self,
        arrays: Arrays,
        data: Data,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int,
        global_batch_size: int,
        shard: Shard,
        channels_last: bool,
        steps_per_epoch: int,
    ) -> None:
        """Move the data set to `device`; `ConfigError` where the batch size fits neither shards nor data."""
        _check_batch(data, global_batch_size=global_batch_size, shards=shard.count, steps=steps_per_epoch)
        self.steps_per_epoch = steps_per_epoch
        self.local_batch_size = global_batch_size // shard.count
        self._data, self._shard, self._seed, self._device = data, shard, seed, device
        self._global_batch_size = global_batch_size
        self._stored = len(arrays.train_labels)
        # No more at once than in training: what evaluation takes must not show in the memory of training.
        self._test_batch_size = min(TEST_BATCH_SIZE, max(_LEAST_TEST_BATCH_SIZE, self.local_batch_size))
        self._train_images: _Images | None = None
        self._test_images: _Images | None = None
        self._train_labels: Tensor | None = None
        self._test_labels: Tensor | None = None
        if shard.images:
            padding = data.shape[1] // 8 if data.augment else 0
            normalise = _Normalise(data, device=device, dtype=dtype, channels_last=channels_last)
            self._train_images = _Images(arrays.train_images, normalise=normalise, padding=padding)
            self._test_images = _Images(arrays.test_images, normalise=normalise, padding=0)
        if shard.labels:
            self._train_labels = torch.from_numpy(np.array(arrays.train_labels)).to(device)
            self._test_labels = torch.from_numpy(np.array(arrays.test_labels)).to(device)

    def train(self, epoch: int) -> Iterator[Batch]:
        """Iterate over `steps_per_epoch` batches of `local_batch_size` samples; `epoch` counts from 1."""
        size = self.local_batch_size
        order = torch.randperm(
            self._data.train_samples, generator=generator(seed=self._seed, epoch=epoch, purpose="order")
        )
        samples = self._mine(order) % self._stored
        labels: Iterable[Tensor | None] = repeat(None)
        if self._train_labels is not None:
            chosen = self._train_labels.index_select(0, samples.to(self._device))
            labels = chosen.view(-1, size).unbind(0)
        if self._train_images is None:
            for _, target in zip(range(self.steps_per_epoch), labels, strict=False):
                yield Batch(None, target, size)
            return
        for images, target in zip(self._train_batches(samples, epoch), labels, strict=False):
            yield Batch(images, target, size)

    def test(self, samples: int | None = None) -> Iterator[Batch]:
        """Iterate over this shard's part of the test set, or of its first `samples`, in order.

        See `evaluation_slices` for the sizes of batches.
        """
        whole = self._data.test_samples
        for start, stop in evaluation_slices(
            whole if samples is None else min(samples, whole),
            index=self._shard.index,
            count=self._shard.count,
            at_most=self._test_batch_size,
        ):
            images = None if self._test_images is None else self._test_images.slice(start, stop)
            labels = None if self._test_labels is None else self._test_labels[start:stop]
            yield Batch(images, labels, stop - start)

    def _mine(self, values: Tensor) -> Tensor:
        """Of one value per sample, in training order: this shard's, shape (steps · local_batch_size,)."""
        used = values[: self.steps_per_epoch * self._global_batch_size]
        return used.view(self.steps_per_epoch, self._shard.count, -1)[:, self._shard.index].reshape(-1)

    def _train_batches(self, samples: Tensor, epoch: int) -> Iterator[Tensor]:
        assert self._train_images is not None
        size = self.local_batch_size
        if not self._data.augment:
            for index in samples.to(self._device).view(-1, size).unbind(0):
                yield self._train_images.select(index)
            return
        # Drawn for all samples of the epoch, so that a sample's shift doesn't depend on the number of shards.
        total, span = self._data.train_samples, 2 * self._train_images.padding + 1
        random = generator(seed=self._seed, epoch=epoch, purpose="augment")
        down, right = torch.randint(span, (2, total), generator=random)
        flips = torch.randint(2, (total,), generator=random, dtype=torch.uint8)
        starts = self._train_images.starts(samples, down=self._mine(down), right=self._mine(right))
        batches = starts.to(self._device).view(-1, size).unbind(0)
        if not self._data.flip:
            for start in batches:
                yield self._train_images.crop(start, None)
            return
        flip = self._mine(flips).to(self._device).view(-1, size, 1, 1, 1).unbind(0)
        for start, flipped in zip(batches, flip, strict=True):
            yield self._train_images.crop(start, flipped)


def _check_batch(data: Data, *, global_batch_size: int, shards: int, steps: int) -> None:
    if global_batch_size % shards:
        raise ConfigError(
            f"a global batch of {global_batch_size} samples can't be cut into {shards} equal slices: "
            f"choose a batch_size that makes it a multiple of {shards}"
        )
    if steps < 1 or steps * global_batch_size > data.train_samples:
        raise ConfigError(
            f"data={data.name} has {data.train_samples} training samples, not enough for "
            f"{max(steps, 1)} steps of {global_batch_size}: choose a smaller batch_size"
        )


class _Normalise:
    """(x / 255 − mean) / std as scale·x + shift: one kernel from uint8 to float, and one more to a half type.

    Half types are computed in float32, since a scale rounded to 8 bits would shift every image.
    """

    def __init__(self, data: Data, *, device: torch.device | str, dtype: torch.dtype, channels_last: bool) -> None:
        self.device, self.dtype, self.channels_last = device, dtype, channels_last
        wide = dtype if dtype == torch.float64 else torch.float32
        channels, height, width = data.shape
        shape = (height, width, channels) if channels_last else data.shape
        per_channel = (1, 1, -1) if channels_last else (-1, 1, 1)
        std = torch.tensor(data.std, dtype=torch.float64).view(per_channel)
        mean = torch.tensor(data.mean, dtype=torch.float64).view(per_channel)
        # One value per element of an image: on a CPU five times as fast as broadcasting three of them
        # channels last.
        self.scale = (1 / (255 * std)).expand(shape).to(device, wide).contiguous()
        self.shift = (-mean / std).expand(shape).to(device, wide).contiguous()

    def __call__(self, images: Tensor) -> Tensor:
        """From uint8 in the stored layout to (n, channels, height, width) in `dtype`."""
        result = torch.addcmul(self.shift, images, self.scale)
        if result.dtype != self.dtype:
            result = result.to(self.dtype)
        return result.permute(0, 3, 1, 2) if self.channels_last else result


class _Images:
    """uint8 images on the device, (n, channels, height, width) or channels last, with a border of zeros."""

    def __init__(self, images: NDArray[np.uint8], *, normalise: _Normalise, padding: int) -> None:
        stored = torch.from_numpy(np.array(images)).to(normalise.device)
        self.padding, self._normalise = padding, normalise
        self._width_axis = -2 if normalise.channels_last else -1
        shape = stored.shape[1:]
        if padding:
            stored = F.pad(stored, (padding,) * 4)
        if normalise.channels_last:
            stored = stored.permute(0, 2, 3, 1)
            shape = torch.Size((shape[1], shape[2], shape[0]))
        self._stored = stored.contiguous()
        # Every place of the padded pixels as the first element of an image: overlapping views, no copies.
        # Gathering rows of this tensor crops, in the one kernel that picks the images anyway.
        strides = self._stored.stride()[1:]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        self._windows = self._stored.as_strided((self._stored.numel() - extent + 1, *shape), (1, *strides))

    def select(self, index: Tensor) -> Tensor:
        """The images of the given numbers, normalised."""
        return self._normalise(self._stored.index_select(0, index))

    def slice(self, start: int, stop: int) -> Tensor:
        """The images from `start` up to `stop`, normalised."""
        return self._normalise(self._stored[start:stop])

    def starts(self, samples: Tensor, *, down: Tensor, right: Tensor) -> Tensor:
        """First elements of the windows `down` and `right` of the padded images' upper left corners."""
        per_image = self._stored.stride(0)
        per_row, per_column = (
            self._stored.stride()[1:3] if self._normalise.channels_last else self._stored.stride()[2:4]
        )
        return samples * per_image + down * per_row + right * per_column

    def crop(self, starts: Tensor, flip: Tensor | None) -> Tensor:
        """The windows at `starts`, those with a 1 in `flip` (uint8, (n, 1, 1, 1)) mirrored, normalised."""
        images = self._windows.index_select(0, starts)
        if flip is not None:
            # x ^ ((x ^ mirrored) · flip): on a CPU five times as fast as torch.where.
            mirrored = images.flip(self._width_axis).bitwise_xor_(images).mul_(flip)
            images.bitwise_xor_(mirrored)
        return self._normalise(images)
