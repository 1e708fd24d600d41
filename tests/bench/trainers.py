"""The same training by the suite, by Lightning's Trainer and by Hugging Face accelerate, with the same bits at the end.

Both are spared what they do besides training: no logger, no checkpoints, no progress bar; their data are normalised
already, and sums of losses and of correct predictions are read once per epoch, as in the suite.
"""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.loaders.order import generator
from parallelbench.training.torch_session import build_model
from tests.bench.loop import OVERRIDES, Suite
from tests.bench.measure import Figure, paired, ratios

OTHERS = {"lightning": "Lightning's Trainer", "accelerate": "accelerate"}
"""Package → how it is called."""


def figures() -> list[Figure]:
    """Time of each of the two ÷ the suite's; identical parameters are asserted."""
    missing = [package for package in OTHERS if importlib.util.find_spec(package) is None]
    if missing:
        print(f"left out: {', '.join(missing)} not installed (pip install 'parallelbench[bench]')", end=" ")
        return []
    run = one_run(OVERRIDES).run
    suite, others = Suite(run), {"lightning": _Lightning(run), "accelerate": _Accelerate(run)}
    epochs: dict[str, Callable[[], float]] = {name: other.epoch for name, other in others.items()}
    results = paired({"suite": suite.epoch, **epochs})
    for name, other in others.items():
        for key, value in suite.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[key]), f"{name}: the work was not identical: {key}"
    note = "cnn_small, batch 128, 100 steps; identical parameters afterwards"
    return [
        Figure(f"{called} ÷ suite, time of an epoch", ratios(results, package, "suite"), "×", 1, True, note)
        for package, called in OTHERS.items()
    ]


class _Training:
    """The run's model and optimizer, and the samples of each epoch in the suite's order."""

    def __init__(self, run: RunConfig) -> None:
        arrays, self.model = run.data.load(Path("nowhere")), build_model(run)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=run.optimizer.lr)
        scale = torch.full((1, 28, 28), 1 / (255 * run.data.std[0]), dtype=torch.float64).float()
        shift = torch.full((1, 28, 28), -run.data.mean[0] / run.data.std[0], dtype=torch.float64).float()
        images = torch.addcmul(shift, torch.from_numpy(arrays.train_images), scale)
        self.order = _Order(len(images))
        dataset = TensorDataset(images, torch.from_numpy(arrays.train_labels))
        self.loader = DataLoader(dataset, run.batch_size, sampler=self.order, drop_last=True)
        self.total, self.correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    def count(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.total += loss.detach()
        self.correct += (logits.argmax(1) == labels).sum()

    def read(self) -> None:
        self.total.item(), self.correct.item()


class _Order(Sampler[int]):
    """The suite's permutation of each epoch."""

    def __init__(self, samples: int) -> None:
        self._samples, self.epoch = samples, 0

    def __iter__(self) -> Iterator[int]:
        made = generator(seed=0, epoch=self.epoch, purpose="order")
        return iter(torch.randperm(self._samples, generator=made).tolist())

    def __len__(self) -> int:
        return self._samples


class _Lightning:
    """A module of a few lines; the epoch is timed from its first hook to its last, without what surrounds `fit`."""

    def __init__(self, run: RunConfig) -> None:
        import lightning

        # Advice on data loaders with more workers, which a pinned core has no use for, and on the hardware.
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self._training, self._lightning = _Training(run), lightning
        self.model = self._training.model
        training, model = self._training, self._training.model

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.started, self.seconds = model, 0.0, 0.0

            def on_train_epoch_start(self) -> None:
                self.started = time.perf_counter()

            def training_step(self, batch: Any, _index: int) -> torch.Tensor:
                images, labels = batch
                logits = self.model(images)
                loss = F.cross_entropy(logits, labels)
                training.count(loss, logits, labels)
                return loss

            def on_train_epoch_end(self) -> None:
                training.read()
                self.seconds = time.perf_counter() - self.started

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return training.optimizer

        self._module = Module()

    def epoch(self) -> float:
        self._training.order.epoch += 1
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = self._lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **dict.fromkeys(off, False))
            trainer.fit(self._module, self._training.loader)
        return float(self._module.seconds)


class _Accelerate:
    """The loop of accelerate's own documentation."""

    def __init__(self, run: RunConfig) -> None:
        from accelerate import Accelerator

        self._training, self._accelerator = _Training(run), Accelerator(cpu=True)
        self.model = self._training.model
        self._prepared = self._accelerator.prepare(self.model, self._training.optimizer, self._training.loader)

    def epoch(self) -> float:
        model, optimizer, loader = self._prepared
        self._training.order.epoch += 1
        start = time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            self._accelerator.backward(loss)
            optimizer.step()
            self._training.count(loss, logits, labels)
        self._training.read()
        return time.perf_counter() - start
