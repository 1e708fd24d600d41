"""Feeding MNIST-shaped data: the resident loader and the others against what is usually written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from launch.sweep import one_run
from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.loaders.order import BatchLoader, generator
from tests.bench.measure import Figure, paired, ratios

BATCH_SIZE = 128
LOADERS: dict[str, list[str]] = {
    "resident": [],
    "dataloader": ["loader.workers=0"],
    "tensor_dataset": ["loader.workers=0"],
    "streamed": [],
}
"""The suite's, with their options: there is one core, which workers would only share."""
_NAMES = {
    "torchvision": "torchvision-style Dataset + DataLoader",
    "tensor_dataset": "TensorDataset + DataLoader",
    "index_select": "bare index_select",
}
SLOW_BATCHES = 50
"""Batches per round of the slow alternatives; rates are per image."""


def figures() -> list[Figure]:
    """Ratios of images per second; before that, all alternatives are asserted to yield the same batches."""
    feeds = _Feeds()
    feeds.check()
    results = paired(
        {
            "loader": lambda: _rate(feeds.loader("resident"), None),
            "streamed": lambda: _rate(feeds.loader("streamed"), None),
            "loader_tensors": lambda: _rate(feeds.loader("tensor_dataset"), SLOW_BATCHES * 4),
            "loader_samples": lambda: _rate(feeds.loader("dataloader"), SLOW_BATCHES),
            "index_select": lambda: _rate(feeds.index_select(), None),
            "tensor_dataset": lambda: _rate(feeds.tensor_dataset(), SLOW_BATCHES * 4),
            "torchvision": lambda: _rate(feeds.torchvision(), SLOW_BATCHES),
        }
    )
    speed = {name: f"{np.median(values) / 1000:,.0f}k images/s" for name, values in results.items()}
    return [
        _figure(results, "torchvision", 60, f"{speed['loader']} against {speed['torchvision']}"),
        _figure(results, "tensor_dataset", 5, f"against {speed['tensor_dataset']}"),
        _figure(results, "index_select", 0.9, f"against {speed['index_select']}, normalised in one pass as well"),
        _other(results, "loader=tensor_dataset", "loader_tensors", "tensor_dataset", speed),
        _other(results, "loader=dataloader", "loader_samples", "torchvision", speed),
        _other(results, "loader=streamed", "streamed", "tensor_dataset", speed),
    ]


def _figure(results: dict[str, list[float]], other: str, goal: float, note: str) -> Figure:
    return Figure(f"feeding ÷ {_NAMES[other]}", ratios(results, "loader", other), "×", goal, True, note)


def _other(results: dict[str, list[float]], what: str, ours: str, theirs: str, speed: dict[str, str]) -> Figure:
    """The suite's loaders are no straw men: they are at least as fast as what one writes by hand."""
    note = f"{speed[ours]}; both without workers" if ours != "streamed" else speed[ours]
    return Figure(f"{what} ÷ {_NAMES[theirs]}", ratios(results, ours, theirs), "×", 0.95, True, note)


def _rate(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], limit: int | None) -> float:
    """Images per second, from asking for the first batch to having the last."""
    images = 0
    start = time.perf_counter()
    for count, (batch, _) in enumerate(batches, start=1):
        images += len(batch)
        if count == limit:
            break
    return images / (time.perf_counter() - start)


class _Feeds:
    """The same samples in the same order, fed in several ways; each epoch draws its permutation within the time."""

    def __init__(self) -> None:
        sizes = ["data.train_samples=60000", "data.test_samples=10", "data.channels=1", "data.image_size=28"]
        run = one_run(["data=synthetic", *sizes, f"batch_size={BATCH_SIZE}"]).run
        arrays = run.data.load(Path("nowhere"))
        self._mean, self._std = run.data.mean[0], run.data.std[0]
        self._images, self._labels = torch.from_numpy(arrays.train_images), torch.from_numpy(arrays.train_labels)
        self._steps = run.steps_per_epoch
        self._loaders = {name: self._built(name, run) for name in LOADERS}
        floats = (self._images.float() / 255 - self._mean) / self._std
        self._float_set = TensorDataset(floats, self._labels)
        self._pil_set = PilDataset(arrays.train_images, arrays.train_labels, self._mean, self._std)

    def check(self) -> None:
        """All yield the same first batches."""
        makers: list[Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]] = [
            *(partial(self.loader, name) for name in LOADERS),
            self.index_select,
            self.tensor_dataset,
            self.torchvision,
        ]
        for make in makers:
            pairs = zip(self.loader("resident"), make(), strict=False)
            for (images, labels), (others, other_labels) in islice(pairs, 3):
                torch.testing.assert_close(images, others, rtol=0, atol=1e-5)
                assert torch.equal(labels, other_labels)

    def _order(self) -> torch.Tensor:
        return torch.randperm(len(self._labels), generator=generator(seed=0, epoch=1, purpose="order"))

    def _built(self, name: str, run: RunConfig) -> BatchLoader:
        return one_run([f"loader={name}", *LOADERS[name]]).run.loader.build(
            run.data.load(run.site.data_folder),
            run.data,
            device="cpu",
            dtype=torch.float32,
            seed=0,
            global_batch_size=BATCH_SIZE,
            shard=Shard(),
            channels_last=False,
            steps_per_epoch=run.steps_per_epoch,
        )

    def loader(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self._loaders[name].train(epoch=1):
            yield batch.images, batch.labels

    def index_select(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        scale = torch.full((1, 28, 28), 1 / (255 * self._std))
        shift = torch.full((1, 28, 28), -self._mean / self._std)
        for index in self._order().split(BATCH_SIZE)[: self._steps]:
            images = torch.addcmul(shift, self._images.index_select(0, index), scale)
            yield images, self._labels.index_select(0, index)

    def tensor_dataset(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from DataLoader(self._float_set, BATCH_SIZE, sampler=_Order(self._order()), drop_last=True)

    def torchvision(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from DataLoader(self._pil_set, BATCH_SIZE, sampler=_Order(self._order()), drop_last=True)


class _Order(Sampler[int]):
    """A given order of samples."""

    def __init__(self, order: torch.Tensor) -> None:
        self._order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order.tolist())


class PilDataset(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's MNIST: one PIL image per sample, transformed by ToTensor and Normalize."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, mean: float, std: float) -> None:
        from torchvision import transforms

        self._images, self._labels = images[:, 0], labels
        self._transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        return self._transform(Image.fromarray(self._images[index])), int(self._labels[index])
