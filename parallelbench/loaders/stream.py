"""Batches gathered on the host, some steps in advance, from arrays that may be files: for `loader=streamed`."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from parallelbench.config.components import Batch
from parallelbench.loaders.images import laid_out
from parallelbench.loaders.order import BatchLoader, Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Unpack

    from numpy.typing import NDArray

    from parallelbench.config.components import Arrays, Data, LoaderArgs

    Rows = NDArray[np.int64]
    Fetched = tuple[Tensor | None, Tensor | None, torch.cuda.Event | None]
    """Images and labels as they are stored, on their way to the device; on CUDA, the end of the copy."""


class StreamedLoader(BatchLoader):
    """One thread gathers uint8 images into page-locked memory and sends them on a stream of their own.

    The device pads, cuts, mirrors and normalises them, with the same operations as `ResidentLoader`. The host holds up
    to `prefetch` batches ahead and the device as many; neither holds the data set.
    """

    def __init__(self, arrays: Arrays, data: Data, *, prefetch: int, **arguments: Unpack[LoaderArgs]) -> None:
        """Keep the arrays where they are."""
        super().__init__(arrays, data, **arguments)
        self._arrays, self._prefetch = arrays, prefetch
        self._normalise = self._normaliser(self._device)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def _train(self, plan: Plan) -> Iterator[Batch]:
        size = self.local_batch_size
        steps = plan.samples.numpy().reshape(self.steps_per_epoch, size)
        fetched = self._ahead(steps, self._arrays.train_images, self._arrays.train_labels)
        windows = self._shifts(plan)
        for images, labels in fetched:
            window = next(windows, None)
            if images is not None:
                images = laid_out(images, padding=self._padding, channels_last=self._channels_last)
                images = self._normalise(images if window is None else self._cut(images, *window))
            yield Batch(images, labels, size)

    def _test(self, slices: list[tuple[int, int]]) -> Iterator[Batch]:
        steps = [np.arange(start, stop) for start, stop in slices]
        fetched = self._ahead(steps, self._arrays.test_images, self._arrays.test_labels)
        for rows, (images, labels) in zip(steps, fetched, strict=True):
            if images is not None:
                images = self._normalise(laid_out(images, padding=0, channels_last=self._channels_last))
            yield Batch(images, labels, len(rows))

    def _ahead(
        self, steps: Iterable[Rows], images: NDArray[np.uint8], labels: NDArray[np.int64]
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """The samples of each step, fetched by a thread that ends with this iterator, however that ends."""
        waiting = iter(steps)
        pool = ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=self._enter_device)
        try:
            begun: deque[Future[Fetched]] = deque(
                pool.submit(self._fetch, rows, images, labels) for rows in islice(waiting, self._prefetch)
            )
            while begun:
                fetched = begun.popleft().result()
                begun.extend(pool.submit(self._fetch, rows, images, labels) for rows in islice(waiting, 1))
                yield self._received(*fetched)
        finally:
            pool.shutdown(cancel_futures=True)

    def _enter_device(self) -> None:
        """In the thread: choose this rank's device, since a new thread's first CUDA call opens a context on GPU 0."""
        if self._copies is not None:
            torch.cuda.set_device(self._device)

    def _fetch(self, rows: Rows, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Fetched:
        """In the thread: gather the rows, and begin to copy them to the device."""
        pixels = self._taken(images, rows) if self._shard.images else None
        targets = self._taken(labels, rows) if self._shard.labels else None
        if self._copies is None:
            return pixels, targets, None
        with torch.cuda.stream(self._copies):
            moved = [None if part is None else part.to(self._device, non_blocking=True) for part in (pixels, targets)]
            return moved[0], moved[1], self._copies.record_event()

    def _taken(self, source: NDArray[Any], rows: Rows) -> Tensor:
        shape = (len(rows), *source.shape[1:])
        kind = torch.uint8 if source.dtype == np.uint8 else torch.int64
        gathered = torch.empty(shape, dtype=kind, pin_memory=self._copies is not None)
        # Other modes than "raise" write to `out` directly, without the interpreter's lock; all rows are in range.
        np.take(source, rows, axis=0, out=gathered.numpy(), mode="clip")
        return gathered

    def _received(
        self, images: Tensor | None, labels: Tensor | None, arrived: torch.cuda.Event | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Let the device, not the host, wait for the copy: what prefetching has not hidden."""
        with self._moving():
            if arrived is not None:
                here = torch.cuda.current_stream(self._device)
                here.wait_event(arrived)
                for part in (images, labels):
                    if part is not None:
                        part.record_stream(here)
        return images, labels
