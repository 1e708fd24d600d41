"""The data set on the device, as uint8. Importing this file loads no torch; building the loader does."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

from parallelbench.config.components import Batch, Kind, Loader
from parallelbench.loaders.order import BatchLoader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Unpack

    from numpy.typing import NDArray
    from torch import Tensor

    from parallelbench.config.components import Arrays, Data, LoaderArgs
    from parallelbench.loaders.order import Plan


class Resident(Loader, frozen=True, kw_only=True):
    """The whole data set lies on the device; batches are cut out, normalised and augmented there."""

    feeds: ClassVar[tuple[Kind, ...]] = ("images", "vectors", "tokens")
    on_device: ClassVar[bool] = True

    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Move the data set to the device."""
        return ResidentLoader(arrays, data, **arguments)


class ResidentLoader(BatchLoader):
    """The data set lies on the device as uint8; batches are cut out, normalised, augmented there.

    This is the general part of how airbench feeds a GPU (https://github.com/KellerJordan/cifar10-airbench): no
    workers, no copies from the host within an epoch, one kernel to gather a batch and one to normalise it.
    Nothing in an iteration synchronises host and device; what an epoch needs is moved before its first batch.
    """

    def __init__(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> None:
        import numpy as np
        import torch

        super().__init__(arrays, data, **arguments)
        self._tokens = data.kind == "tokens"
        from parallelbench.loaders.images import laid_out

        def moved(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.array(values)).to(self._device)

        def pixels(images: NDArray[Any], padding: int) -> Tensor:
            return laid_out(moved(images), padding=padding, channels_last=self._channels_last)

        has = self._shard
        if has.images:
            self._normalise = self._normaliser(self._device)
        self._train_images = pixels(arrays.train_images, self._padding) if has.images else None
        self._test_images = pixels(arrays.test_images, 0) if has.images else None
        self._train_labels = moved(arrays.train_labels) if has.labels else None
        self._test_labels = moved(arrays.test_labels) if has.labels else None

    def _train(self, plan: Plan) -> Iterator[Batch]:
        size = self.local_batch_size
        labels: Iterable[Tensor | None] = repeat(None)
        if self._train_labels is not None:
            labels = self._train_labels.index_select(0, plan.samples.to(self._device))
            labels = labels.unflatten(0, (-1, size)).unbind(0)
        images: Iterable[Tensor | None] = repeat(None)
        if self._train_images is not None:
            images = self._train_batches(self._train_images, plan)
        for _, pixels, target in zip(range(self.steps_per_epoch), images, labels, strict=False):
            yield Batch(pixels, target, size)

    def _train_batches(self, stored: Tensor, plan: Plan) -> Iterator[Tensor]:
        size = self.local_batch_size
        if plan.down is None or plan.right is None:
            for index in plan.samples.to(self._device).view(-1, size).unbind(0):
                yield self._normalise(stored.index_select(0, index))
            return
        from parallelbench.loaders.images import Windows

        windows = Windows(stored, padding=self._padding, channels_last=self._channels_last)
        starts = windows.starts(plan.samples, down=plan.down, right=plan.right)
        batches = starts.to(self._device).view(-1, size).unbind(0)
        for start, flip in zip(batches, self._flips(plan), strict=False):
            yield self._normalise(windows.at(start, flip))

    def _test(self, slices: list[tuple[int, int]]) -> Iterator[Batch]:
        # A model may change its batch in place, so none is the stored memory: normalising copies, but tokens stay.
        for start, stop in slices:
            images = None if self._test_images is None else self._normalise(self._test_images[start:stop])
            labels = None if self._test_labels is None else self._test_labels[start:stop].clone()
            yield Batch(images.clone() if images is not None and self._tokens else images, labels, stop - start)
