"""Batches by torch's own `DataLoader`, used as in most programs, except for the order, which is the suite's."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import signal
import tempfile
import time
import warnings
from abc import abstractmethod
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from parallelbench.config.components import Batch
from parallelbench.errors import ConfigError
from parallelbench.loaders.images import laid_out
from parallelbench.loaders.order import BatchLoader
from parallelbench.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.process import BaseProcess
    from multiprocessing.synchronize import Semaphore
    from typing import Unpack

    from numpy.typing import NDArray

    from parallelbench.config.components import Arrays, Data, LoaderArgs, TorchLoader
    from parallelbench.loaders.images import Normalise
    from parallelbench.loaders.order import Plan


_PATIENCE_S = 10.0
"""Time that workers have to end, all together, s."""
_START_S = 60.0
"""Time that each of them has to begin, s."""
_DEATH_S = 1.0
"""Time within which a worker that broke something by its end has ended, s."""
_SOCKET_PATH_BYTES = 107
"""The longest path of a socket (unix(7))."""
Key = Any
"""What a data set's `__getitem__` takes."""


class _Batches(Sampler[list[Key]]):
    """The keys of each batch, set anew for each pass over the data."""

    def __init__(self) -> None:
        self.keys: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


class _Part:
    """A `DataLoader` of the training or the test set."""

    def __init__(self, dataset: Dataset[Any], options: TorchLoader, *, pinned: bool) -> None:
        several = options.workers > 0
        fork = multiprocessing.get_context("fork")
        if several:
            _choose_socket_folder()
            self._begun = fork.Semaphore(0)
        self._batches = _Batches()
        with _without_advice():
            self._loader = DataLoader(
                dataset,
                batch_sampler=self._batches,
                num_workers=options.workers,
                pin_memory=pinned and options.pin_memory,
                prefetch_factor=options.prefetch_factor if several else None,
                persistent_workers=options.persistent_workers and several,
                worker_init_fn=functools.partial(_begin, os.getpid(), self._begun) if several else None,
                # The data set is inherited; other ways of starting would send it to each worker.
                multiprocessing_context=fork if several else None,
                # Its workers' seeds must not be drawn from what a model's dropout draws from.
                generator=torch.Generator(),
            )
        self._workers: set[BaseProcess] = set()
        self._pass: Iterator[list[Tensor]] | None = None
        self._passes = 0

    def over(self, keys: Iterable[list[Key]]) -> Iterator[list[Tensor]]:
        """The collated batches of these keys. Only `self` holds the iterator with workers: see `close`."""
        self._passes = this = self._passes + 1
        self._batches.keys = keys
        others = set(multiprocessing.active_children())
        with _without_advice(), _without_interruption(), self._explained():
            self._pass = iter(self._loader)
        started = set(multiprocessing.active_children()) - others
        self._workers |= started
        if not all(self._begun.acquire(timeout=_START_S) for _ in started):
            raise ConfigError(
                f"not all worker processes of the loader began within {_START_S:g} s: choose loader.workers=0, or fewer"
            )
        while (batch := self._next(this)) is not None:
            yield batch

    def _next(self, this: int) -> list[Tensor] | None:
        assert self._pass is not None, "the loader is closed"
        assert this == self._passes, "a newer iteration has ended this one"
        with self._explained():
            return next(self._pass, None)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say that a worker was killed, whatever that broke first."""
        try:
            yield
        except (OSError, EOFError, RuntimeError) as error:
            if died := self._died():
                raise RuntimeError(died) from error
            raise

    def _died(self) -> str:
        """How a worker was killed, in torch's words; empty where none was."""
        ended = wait([worker.sentinel for worker in self._workers], _DEATH_S)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join(_DEATH_S)  # a process that dies closes its files before it has an exit code
        killed = [worker for worker in self._workers if (worker.exitcode or 0) < 0]
        how = [signal.strsignal(-(worker.exitcode or 0)) for worker in killed]
        return f"DataLoader worker (pid {killed[0].pid}) is killed by signal: {how[0]}. " if killed else ""

    def pids(self) -> list[int]:
        """The living workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None and worker.is_alive()]

    def close(self) -> None:
        """Drop the iterator and the loader, which ends the workers, and wait for their end."""
        self._pass = None
        self._loader = None  # type: ignore[assignment]
        deadline = time.monotonic() + _PATIENCE_S  # of all together
        for worker in self._workers:
            worker.join(timeout=max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._workers.clear()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence torch's warning of more workers than cores: on a CPU they share the device's cores on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@contextmanager
def _without_interruption() -> Iterator[None]:
    """Keep torch from raising between any two instructions once a worker ends: whoever waits for a batch notices."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before)


def _begin(parent: int, begun: Semaphore, _: int) -> None:
    """In a worker: say so, end when the rank does, however it ends, and lose no batch in silence."""
    die_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)
    # A batch that can't be sent would only be printed there, and the rank wait for it without end.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    begun.release()


def _send_error(queue: Any, _error: Exception, item: tuple[int, Any]) -> None:
    """Send the error that is being handled in a batch's place."""
    queue.put((item[0], ExceptionWrapper(where="in DataLoader worker process")))


def _choose_socket_folder() -> None:
    """Let workers listen where the paths of their sockets are short enough, if TMPDIR is too long for that."""
    longest = "/pymp-12345678/listener-12345678"
    if len(os.fsencode(tempfile.gettempdir() + longest)) <= _SOCKET_PATH_BYTES:
        return
    before, short = tempfile.tempdir, [each for each in ("/tmp", "/var/tmp", "/dev/shm") if os.access(each, os.W_OK)]
    if not short:
        raise ConfigError(
            f"TMPDIR={before} is too long for sockets, and /tmp can't be written: choose a shorter TMPDIR"
        )
    tempfile.tempdir = short[0]
    try:
        multiprocessing.util.get_temp_dir()  # stays chosen, and is removed at the end
    finally:
        tempfile.tempdir = before


class TorchBatches(BatchLoader):
    """A `DataLoader` for training and one for evaluation; subclasses choose the data set."""

    def __init__(self, arrays: Arrays, data: Data, options: TorchLoader, **arguments: Unpack[LoaderArgs]) -> None:
        """Build both; workers start with the first batch of each."""
        super().__init__(arrays, data, **arguments)
        self.workers = 0 if self._uses_nothing else options.workers
        self._normalise = self._normaliser(self._device)
        pinned = self._device.type == "cuda"
        train = self._dataset(arrays.train_images, arrays.train_labels, padding=self._padding)
        test = self._dataset(arrays.test_images, arrays.test_labels, padding=0)
        self._parts = _Part(train, options, pinned=pinned), _Part(test, options, pinned=pinned)

    @abstractmethod
    def _dataset(self, images: NDArray[Any], labels: NDArray[np.int64], *, padding: int) -> Dataset[Any]:
        """A data set whose items are an image and a label, or one of them, as the shard has it."""

    def worker_pids(self) -> list[int]:
        return [pid for part in self._parts for pid in part.pids()]

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _moved(self, parts: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """A collated batch on the device: images as floats in the stored layout, and labels."""
        with self._moving():
            moved = iter([part.to(self._device, non_blocking=True) for part in parts])
        images = next(moved) if self._shard.images else None
        return images, next(moved) if self._shard.labels else None

    def _finished(self, images: Tensor | None) -> Tensor | None:
        return None if images is None else self._normalise.finished(images)

    @abstractmethod
    def _keys(self, start: int, stop: int) -> list[Key]:
        """The keys of test samples."""

    def _test(self, slices: list[tuple[int, int]]) -> Iterator[Batch]:
        # No samples, which the last slice may have, can't be collated.
        batches = self._parts[1].over(self._keys(start, stop) for start, stop in slices if stop > start)
        for start, stop in slices:
            images, labels = self._moved(next(batches)) if stop > start else self._no_samples()
            yield Batch(self._finished(images), labels, stop - start)
        next(batches, None)  # ends workers that are not persistent

    def _no_samples(self) -> tuple[Tensor | None, Tensor | None]:
        empty = self._normalise.no_samples(self._device)
        labels = torch.empty((0, *self._data.label_shape), dtype=torch.int64, device=self._device)
        return empty if self._shard.images else None, labels if self._shard.labels else None


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
