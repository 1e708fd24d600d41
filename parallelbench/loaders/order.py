"""What all loaders share: which samples a rank takes, in which order, and how they are augmented.

Loaders differ only in how samples get from their storage into a batch on the device. Importing this file loads no
torch, so a loader's options and its `BatchLoader` may lie in one file, as in `resident.py`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import TYPE_CHECKING

from parallelbench.config.components import Batch
from parallelbench.world.spans import phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from parallelbench.config.components import Arrays, Data, Shard
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.images import Normalise

    LoaderOf = Callable[[RunConfig, Shard], "BatchLoader"]


TEST_BATCH_SIZE = 1024
"""Most test samples in one batch of one rank."""
_LEAST_TEST_BATCH_SIZE = 32


def generator(*, seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A CPU generator for each (seed, epoch, purpose), the same on all ranks, devices and world sizes."""
    import torch

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


def evaluation_batches(data: Data, shard: Shard, local_batch_size: int, samples: int | None) -> list[tuple[int, int]]:
    """`evaluation_slices` of a shard's part of the test set, or of its first `samples`.

    Batches are no larger than in training: evaluation must not raise the peak of training's memory.
    """
    whole, most = data.test_samples, min(TEST_BATCH_SIZE, max(_LEAST_TEST_BATCH_SIZE, local_batch_size))
    samples = whole if samples is None else min(samples, whole)
    return evaluation_slices(samples, index=shard.index, count=shard.count, at_most=most)


def endless(loader: BatchLoader, *, first: int = 1) -> Iterator[Batch]:
    """Batches of one epoch after the other, for checks that take more steps than some epochs have."""
    return chain.from_iterable(map(loader.train, count(first)))


@dataclass(frozen=True)
class Plan:
    """One rank's samples of an epoch: one value per sample, in training order, on the host."""

    samples: Tensor
    """Numbers of the stored samples."""
    down: Tensor | None
    """How far below the padded image's upper left corner the window begins; None where nothing is augmented."""
    right: Tensor | None
    """Likewise, to the right."""
    flip: Tensor | None
    """uint8: 1 where the window is mirrored; None where no image is."""


class BatchLoader(ABC):
    """Yields one rank's slices of every global batch.

    Training: one permutation per (seed, epoch), the same for all strategies, world sizes and devices; step s
    takes its entries s·G … (s+1)·G − 1, of which shard i of n reads the i-th n-th. The tail that fills no
    global batch is dropped. `data.train_samples` may be a multiple of the stored samples (copies): numbers
    are taken modulo.

    Each loader implements `_train` and `_test`. They yield batches in the plan's order, with the values that
    `Normalise` gives, and None for what the shard doesn't use. They are not called where the shard uses neither
    images nor labels.
    """

    workers = 0
    """Worker processes per split."""

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
        """`check_run` has refused batch sizes that don't suit the shards or the data set."""
        import torch

        assert global_batch_size % shard.count == 0
        assert 0 < steps_per_epoch * global_batch_size <= data.train_samples
        self.steps_per_epoch = steps_per_epoch
        self.local_batch_size = global_batch_size // shard.count
        self._data, self._shard, self._seed = data, shard, seed
        self._device, self._dtype, self._channels_last = torch.device(device), dtype, channels_last
        self._global_batch_size = global_batch_size
        self._stored = len(arrays.train_labels)
        self._padding = data.shape[1] // 8 if data.augment else 0
        self._moves_batches = self._device.type != "cpu"

    def train(self, epoch: int) -> Iterator[Batch]:
        """Iterate over `steps_per_epoch` batches of `local_batch_size` samples; `epoch` counts from 1.

        One iteration at a time: a new one may end the one before.
        """
        if self._uses_nothing:
            yield from repeat(Batch(None, None, self.local_batch_size), self.steps_per_epoch)
        else:
            yield from self._train(self.plan(epoch))

    def test(self, samples: int | None = None) -> Iterator[Batch]:
        """Iterate over this shard's part of the test set, or of its first `samples`, in order.

        See `evaluation_slices` for the sizes of batches.
        """
        slices = evaluation_batches(self._data, self._shard, self.local_batch_size, samples)
        if self._uses_nothing:
            yield from (Batch(None, None, stop - start) for start, stop in slices)
        else:
            yield from self._test(slices)

    @abstractmethod
    def _train(self, plan: Plan) -> Iterator[Batch]:
        """The batches of one epoch."""

    @abstractmethod
    def _test(self, slices: list[tuple[int, int]]) -> Iterator[Batch]:
        """The test samples from start up to stop, for each slice one batch."""

    def _moving(self) -> AbstractContextManager[None]:
        """The phase of moving a batch to the device; none where it lies there."""
        return phase("host_to_device") if self._moves_batches else nullcontext()

    def worker_pids(self) -> list[int]:
        """Ids of the living worker processes."""
        return []

    def close(self) -> None:  # noqa: B027
        """End the loader's threads and processes; it yields no more batches."""

    @property
    def _uses_nothing(self) -> bool:
        return not (self._shard.images or self._shard.labels)

    def plan(self, epoch: int) -> Plan:
        """This shard's samples of an epoch."""
        import torch

        total = self._data.train_samples
        order = torch.randperm(total, generator=generator(seed=self._seed, epoch=epoch, purpose="order"))
        samples = self._of_shard(order) % self._stored
        if not (self._data.augment and self._shard.images):
            return Plan(samples, None, None, None)
        # Drawn for all samples of the epoch, so that a sample's shift doesn't depend on the number of shards.
        random = generator(seed=self._seed, epoch=epoch, purpose="augment")
        down, right = torch.randint(2 * self._padding + 1, (2, total), generator=random)
        flips = torch.randint(2, (total,), generator=random, dtype=torch.uint8)
        return Plan(
            samples, self._of_shard(down), self._of_shard(right), self._of_shard(flips) if self._data.flip else None
        )

    def _of_shard(self, values: Tensor) -> Tensor:
        """This shard's values, of one value per sample in training order: shape (steps · local_batch_size,)."""
        used = values[: self.steps_per_epoch * self._global_batch_size]
        return used.view(self.steps_per_epoch, self._shard.count, -1)[:, self._shard.index].reshape(-1)

    def _flips(self, plan: Plan) -> Iterable[Tensor | None]:
        """For each step what `Windows.at` takes, on the device."""
        if plan.flip is None:
            return repeat(None)
        return plan.flip.to(self._device).view(-1, self.local_batch_size, 1, 1, 1).unbind(0)

    def _shifts(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """For each step down, right and flip, on the device; nothing at all where nothing is augmented."""
        if plan.down is None or plan.right is None:
            return
        down, right = (
            shift.to(self._device).view(-1, self.local_batch_size).unbind(0) for shift in (plan.down, plan.right)
        )
        yield from zip(down, right, self._flips(plan), strict=False)

    def _cut(self, padded: Tensor, down: Tensor, right: Tensor, flip: Tensor | None) -> Tensor:
        """Cut one window out of each padded image of a batch on the device."""
        import torch

        from parallelbench.loaders.images import Windows

        windows = Windows(padded, padding=self._padding, channels_last=self._channels_last)
        places = torch.arange(len(padded), device=self._device)
        return windows.at(windows.starts(places, down=down, right=right), flip)

    def _normaliser(self, device: torch.device | str, *, padding: int = 0) -> Normalise:
        from parallelbench.loaders.images import Normalise

        return Normalise(
            self._data, device=device, dtype=self._dtype, channels_last=self._channels_last, padding=padding
        )
