"""On a GPU: the training loop with all its probes against hand-written loops that do the same work."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from launch.sweep import one_run
from parallelbench.loaders.order import generator
from parallelbench.training.torch_session import build_model
from parallelbench.world.machine import device_name
from parallelbench.world.numerics import set_precision
from parallelbench.world.world import World
from tests.bench.loop import Suite
from tests.bench.measure import Figure, paired, ratios

if TYPE_CHECKING:
    from torch import Tensor, nn

    from parallelbench.config.run import RunConfig

ROUNDS = 7
TOLERANCE = 0.05
"""Of a loss afterwards: kernels that add up in a changing order part two trainings, and bf16 rounds coarsely."""


class _Case(NamedTuple):
    what: str
    goal: float
    overrides: tuple[str, ...]


_SMALL = ("model=cnn_small", "data=synthetic", "data.channels=1", "data.image_size=28", "batch_size=128")
_IMAGES = ("data=synthetic", "batch_size=256", "channels_last=true", "precision=bf16")
CASES = (
    _Case("cnn_small, fp32, batch 128", 0.99, (*_SMALL, "data.train_samples=51200")),
    _Case("cnn_small, fp32, batch 128, graph=true", 0.99, (*_SMALL, "data.train_samples=51200", "graph=true")),
    _Case("resnet50, bf16, channels last, batch 256 of 32 × 32", 0.99, ("model=resnet50", *_IMAGES)),
    _Case(
        "gpt2_small, bf16, AdamW, 8 windows of 1,024 tokens, against a loop like nanoGPT's",
        0.97,
        (
            *("model=gpt2_small", "data=tokens", "data.sequence=1024", "optimizer=adamw", "precision=bf16"),
            *("batch_size=8", "data.train_samples=160", "data.test_samples=8"),
        ),
    ),
)
"""Speeds of these are compared."""


def figures() -> list[Figure]:
    """Bare time ÷ suite time of an epoch, per case; none where there is no GPU."""
    if not torch.cuda.is_available():
        return []
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # as a rank beside its GPU: backward has a thread of its own
    return [_figure(case) for case in CASES]


def _figure(case: _Case, device_type: str = "cuda") -> Figure:
    run = one_run([*case.overrides, "epochs=1", f"device={device_type}", "measure.parity=false"]).run
    set_precision(run.precision)
    world = World(device_type="cuda", devices=(torch.device("cuda", 0),)) if device_type == "cuda" else World()
    suite, bare = Suite(run, world), _Bare(run, world.device)
    results = paired({"suite": suite.epoch, "bare": bare.epoch}, ROUNDS)
    one, two = bare.loss_of(suite.model), bare.loss_of(bare.model)
    assert abs(one - two) <= TOLERANCE * two, f"{case.what}: the work was not alike: losses {one:.4g} and {two:.4g}"
    unit = "tokens" if run.model.name.startswith("gpt") else "samples"
    samples = run.steps_per_epoch * run.global_batch_size
    rate = samples * (run.data.shape[0] if unit == "tokens" else 1) / statistics.median(results["suite"])
    note = (
        f"{device_name(world)}, {run.steps_per_epoch} steps an epoch, {rate:,.0f} {unit}/s; losses {one:.4g}, {two:.4g}"
    )
    speed = ratios(results, "bare", "suite")
    return Figure(f"{case.what}: training loop with all probes ÷ bare loop, speed", speed, "", case.goal, True, note)


class _Bare:
    """What one would write by hand: data on the device, autocast, loss, backward, torch's fused update."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        arrays, self._run, self._device = run.data.load(Path("nowhere")), run, device
        layout = torch.channels_last if run.channels_last else torch.preserve_format
        self.model = build_model(run).to(device, memory_format=layout)
        self._optimizer = run.optimizer.build(self.model.parameters(), run, device.type)
        self._inputs = torch.from_numpy(arrays.train_images.copy()).to(device)
        self._labels = torch.from_numpy(arrays.train_labels.copy()).to(device)
        self._normalises = self._inputs.dim() == 4
        if self._normalises:
            of_data = (torch.tensor(each, dtype=torch.float64) for each in (run.data.mean, run.data.std))
            mean, std = (each.view(1, -1, 1, 1) for each in of_data)
            self._scale, self._shift = (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
        self._epoch = 0

    def loss_of(self, model: nn.Module) -> float:
        """Of the first batch; neither training's own."""
        with torch.no_grad():
            return self._loss(model, torch.arange(self._run.batch_size, device=self._device)).item()

    def epoch(self) -> float:
        self._epoch += 1
        start = time.perf_counter()
        order = torch.randperm(len(self._labels), generator=generator(seed=0, epoch=self._epoch, purpose="order"))
        total = torch.zeros((), device=self._device)
        for index in order.to(self._device).split(self._run.batch_size)[: self._run.steps_per_epoch]:
            loss = self._loss(self.model, index)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
            total += loss.detach()
        total.item()
        return time.perf_counter() - start

    def _loss(self, model: nn.Module, index: Tensor) -> Tensor:
        inputs, labels = self._inputs.index_select(0, index), self._labels.index_select(0, index)
        if self._normalises:
            inputs = torch.addcmul(self._shift, inputs, self._scale)
            if self._run.channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
        else:
            inputs = inputs.long()
        half = (
            torch.autocast(self._device.type, dtype=torch.bfloat16) if self._run.precision == "bf16" else nullcontext()
        )
        with half:
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, -2), labels.long().flatten())
