"""Batches of a torch `TensorDataset`, augmented on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from parallelbench.config.components import Batch
from parallelbench.loaders.images import laid_out
from parallelbench.loaders.torch_loader import Key, TorchBatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from parallelbench.loaders.batch_loader import Plan


class TensorLoader(TorchBatches):
    """All images lie in host memory as floats, normalised before training; the device cuts and mirrors batches."""

    def _dataset(self, images: NDArray[Any], labels: NDArray[np.int64], *, padding: int) -> Dataset[Any]:
        tensors = []
        if self._shard.images:
            stored = laid_out(torch.from_numpy(np.array(images)), padding=padding, channels_last=self._channels_last)
            tensors.append(self._normaliser("cpu", padding=padding).values(stored))
        if self._shard.labels:
            tensors.append(torch.from_numpy(np.array(labels)))
        return TensorDataset(*tensors)

    def _train(self, plan: Plan) -> Iterator[Batch]:
        size = self.local_batch_size
        keys = (step.tolist() for step in plan.samples.view(-1, size).unbind(0))
        windows = self._shifts(plan)
        for parts in self._parts[0].over(keys):
            images, labels = self._moved(parts)
            window = next(windows, None)
            if images is not None and window is not None:
                images = self._cut(images, *window)
            yield Batch(self._finished(images), labels, size)

    def _keys(self, start: int, stop: int) -> list[Key]:
        return list(range(start, stop))
