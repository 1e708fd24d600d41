"""Batches of a torch `Dataset` whose samples are augmented one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from parallelbench.config.components import Batch
from parallelbench.loaders.torch_loader import Key, TorchBatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from parallelbench.loaders.batch_loader import Plan
    from parallelbench.loaders.images import Normalise


class SampleLoader(TorchBatches):
    """Every sample is cropped, mirrored and normalised by itself, as a transform of torchvision's would."""

    def _dataset(self, images: NDArray[Any], labels: NDArray[np.int64], *, padding: int) -> Dataset[Any]:
        normalise = self._normaliser("cpu")
        return _Samples(
            images if self._shard.images else None,
            labels if self._shard.labels else None,
            normalise=normalise,
            padding=padding,
        )

    def _train(self, plan: Plan) -> Iterator[Batch]:
        for parts in self._parts[0].over(self._steps(plan)):
            images, labels = self._moved(parts)
            yield Batch(self._finished(images), labels, self.local_batch_size)

    def _keys(self, start: int, stop: int) -> list[Key]:
        return [(number, 0, 0, 0) for number in range(start, stop)]

    def _steps(self, plan: Plan) -> Iterator[list[Key]]:
        """Number, shift and flip travel together: a worker needs to know nothing of epochs and ranks."""
        zeros = torch.zeros_like(plan.samples)
        columns = (zeros if values is None else values for values in (plan.down, plan.right, plan.flip))
        steps = zip(*(values.view(-1, self.local_batch_size) for values in (plan.samples, *columns)), strict=True)
        for step in steps:
            yield list(zip(*(values.tolist() for values in step), strict=True))


class _Samples(Dataset[tuple[Any, ...]]):
    """Images and labels one by one; a key is the sample's number, its window's place, and whether it is mirrored."""

    def __init__(
        self,
        images: NDArray[Any] | None,
        labels: NDArray[np.int64] | None,
        *,
        normalise: Normalise,
        padding: int,
    ) -> None:
        self._images, self._labels, self._normalise, self._padding = images, labels, normalise, padding

    def __getitem__(self, key: tuple[int, int, int, int]) -> tuple[Any, ...]:
        number, down, right, flip = key
        label = () if self._labels is None else (torch.from_numpy(np.array(self._labels[number])),)
        return label if self._images is None else (self._image(self._images[number], down, right, flip), *label)

    def _image(self, image: NDArray[Any], down: int, right: int, flip: int) -> Tensor:
        border = self._padding
        if border:
            _, height, width = image.shape
            padded = np.pad(image, ((0, 0), (border, border), (border, border)))
            image = padded[:, down : down + height, right : right + width]
        if flip:
            image = image[:, :, ::-1]
        if self._normalise.channels_last:
            image = image.transpose(1, 2, 0)
        return self._normalise.values(torch.from_numpy(np.array(image, order="C")))
