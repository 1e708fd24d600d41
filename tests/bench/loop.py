"""The training loop with all its probes against a loop of a few lines that does the same work."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from launch.sweep import one_run
from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.loaders.order import generator
from parallelbench.results.journal import Journal
from parallelbench.training.loop import Trainer
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World
from tests.bench.measure import Figure, paired, ratios

OVERRIDES = [
    "model=cnn_small",
    "data=synthetic",
    "data.channels=1",
    "data.image_size=28",
    "data.train_samples=12800",
    "data.test_samples=128",
    "batch_size=128",
    "epochs=1",
    "measure.parity=false",  # checksums are taken outside of the windows, which is what is compared here
]


def figures() -> list[Figure]:
    """Bare time ÷ suite time for one epoch of 100 steps; the parameters afterwards are asserted to be the same bits."""
    run = one_run(OVERRIDES).run
    suite, bare = Suite(run), _Bare(run)
    results = paired({"suite": suite.epoch, "bare": bare.epoch})
    for name, value in bare.model.state_dict().items():
        assert torch.equal(value, suite.model.state_dict()[name]), f"the work was not identical: {name} differs"
    note = "cnn_small, batch 128, 100 steps; identical parameters afterwards"
    return [
        Figure(
            "training loop with all probes ÷ bare loop, speed", ratios(results, "bare", "suite"), "", 0.99, True, note
        )
    ]


class Suite:
    """The suite's own loop: probes, sampled steps, memory, journal with fsync. Without evaluation, as the bare loop."""

    def __init__(self, run: RunConfig, world: World | None = None) -> None:
        """`world`: None for a CPU."""
        world = world or World()
        self.model, self._run = build_model(run), run
        self._loader = build_loader(run.data.load(Path("nowhere")), run, world, Shard())
        self._replica = run.strategy.prepare(self.model, run, world)
        keys = {"run_id": "bench", "attempt": 1}
        self._journal = Journal(Path(tempfile.mkdtemp()) / "journal-rank0.jsonl", keys=keys)
        self._trainer = Trainer(self._replica, self._loader, run=run, world=world, journal=self._journal)
        self._epoch = 0

    def epoch(self) -> float:
        """Seconds of one more epoch, with all that is written of it."""
        start = time.perf_counter()
        self._journal.event("epoch", **self.train_epoch())
        self._trainer.write_rows()
        self._journal.commit()
        return time.perf_counter() - start

    def train_epoch(self) -> dict[str, Any]:
        """One more epoch, unwritten: its columns of `ranks`."""
        self._epoch += 1
        return self._trainer.train_epoch(self._epoch)

    def accuracy(self) -> float:
        """On the test set."""
        sums = self._replica.evaluate(self._loader.test())
        assert sums is not None
        return float(sums[1].item()) / self._run.data.test_samples


class _Bare:
    """What one would write by hand, with nothing but the training itself."""

    def __init__(self, run: RunConfig) -> None:
        arrays, self._run = run.data.load(Path("nowhere")), run
        self.model = build_model(run)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=run.optimizer.lr)
        self._images = torch.from_numpy(arrays.train_images)
        self._labels = torch.from_numpy(arrays.train_labels)
        self._scale = torch.full((1, 28, 28), 1 / (255 * run.data.std[0]), dtype=torch.float64).float()
        self._shift = torch.full((1, 28, 28), -run.data.mean[0] / run.data.std[0], dtype=torch.float64).float()
        self._epoch = 0

    def epoch(self) -> float:
        self._epoch += 1
        model, optimizer = self.model, self._optimizer
        start = time.perf_counter()
        order = torch.randperm(len(self._labels), generator=generator(seed=0, epoch=self._epoch, purpose="order"))
        total, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for index in order.split(self._run.batch_size):
            images = torch.addcmul(self._shift, self._images.index_select(0, index), self._scale)
            labels = self._labels.index_select(0, index)
            optimizer.zero_grad()
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            correct += (logits.argmax(1) == labels).sum()
        total.item(), correct.item()
        return time.perf_counter() - start
