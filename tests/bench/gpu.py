"""On a GPU: the training loop with all its probes against hand-written loops that do the same work."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launch.sweep import one_run
from parallelbench.config.components import Model
from parallelbench.config.run import RunConfig
from parallelbench.data.synthetic import Synthetic
from parallelbench.loaders.order import generator
from parallelbench.models.modules import sequence
from parallelbench.training.torch_session import build_model
from parallelbench.world.machine import device_name
from parallelbench.world.numerics import set_precision
from parallelbench.world.world import World
from tests.bench.loop import Suite
from tests.bench.measure import Figure, paired, ratios

ROUNDS = 7
TOLERANCE = 0.05
"""Of a loss afterwards: kernels that add up in a changing order part two trainings, and bf16 rounds coarsely."""


class Speedrun(Model, frozen=True, kw_only=True):
    """The layers of the 94 % recipe of cifar10-airbench (Keller Jordan 2024, arXiv 2404.00498), in words of our own.

    24 fixed filters of 2 × 2 pixels, here not fitted to the data; three blocks, which halve the image; logits ÷ 9.
    """

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The filters, three blocks, the head."""
        return ("filters", "block1", "block2", "block3", "head")

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """1.97 million parameters for three channels and ten classes."""
        filters = nn.Conv2d(in_channels, 24, 2)
        filters.weight.requires_grad_(False)
        layers: list[nn.Module] = [nn.Sequential(filters, nn.GELU())]
        for inputs, width in ((24, 64), (64, 256), (256, 256)):
            first, second = nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
            norms = [nn.BatchNorm2d(width) for _ in range(2)]
            layers.append(nn.Sequential(first, nn.MaxPool2d(2), norms[0], nn.GELU(), second, norms[1], nn.GELU()))
        side = (image_size - 1) // 8 // 3
        layers.append(nn.Sequential(nn.MaxPool2d(3), nn.Flatten(), nn.Linear(256 * side**2, num_classes), _Ninth()))
        return sequence(self.layer_names, layers)


class _Ninth(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits / 9


class Mirrored(Synthetic, frozen=True, kw_only=True):
    """Made-up images of which half are mirrored, as CIFAR's are."""

    flip: ClassVar[bool] = True


class _Case(NamedTuple):
    what: str
    goal: float
    overrides: tuple[str, ...]
    model: Model | None = None
    """In place of the overrides'."""


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
    _Case(
        "airbench's CIFAR-10 recipe, bf16, channels last, batch 1,024, shifted images, against its plain script",
        1 / 1.05,
        (
            *("model=cnn", "data=synthetic", "data.augment=true", "data.test_samples=1024", "batch_size=1024"),
            *("channels_last=true", "precision=bf16", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.85"),
            *("optimizer.nesterov=true", "optimizer.weight_decay=0.0005", "loss.label_smoothing=0.2"),
            *("lr_schedule=cosine", "lr_schedule.warmup_epochs=2", "epochs=20"),
        ),
        Speedrun(name="speedrun"),
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
    run = one_run(["epochs=1", *case.overrides, f"device={device_type}", "measure.parity=false"]).run
    if case.model is not None:
        data = Mirrored(**msgspec.structs.asdict(run.data))
        run = msgspec.structs.replace(run, model=case.model, data=data)
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
    """What one would write by hand: data on the device, autocast, loss, backward, torch's fused update.

    Images that are shifted are normalised once, and all of an epoch's are cut before its first step, as airbench does.
    """

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
        if run.data.augment:
            half = torch.bfloat16 if run.precision == "bf16" else torch.float32
            padded = F.pad(self._inputs, [run.data.shape[1] // 8] * 4)
            self._padded = torch.addcmul(self._shift, padded, self._scale).to(half, memory_format=layout)
        self._epoch = self._steps = 0

    def loss_of(self, model: nn.Module) -> float:
        """Of the first batch; neither training's own."""
        with torch.no_grad():
            return self._loss(model, torch.arange(self._run.batch_size, device=self._device)).item()

    def epoch(self) -> float:
        self._epoch += 1
        start = time.perf_counter()
        order = torch.randperm(len(self._labels), generator=generator(seed=0, epoch=self._epoch, purpose="order"))
        total = torch.zeros((), device=self._device)
        if self._run.data.augment:
            self._inputs = self._augmented()
        for index in order.to(self._device).split(self._run.batch_size)[: self._run.steps_per_epoch]:
            loss = self._loss(self.model, index)
            self._steps += 1
            for group in self._optimizer.param_groups if self._run.lr_schedule.changes else ():
                group["lr"] = self._run.optimizer.lr * self._run.rate_factor(self._steps)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
            total += loss.detach()
        total.item()
        return time.perf_counter() - start

    def _augmented(self) -> Tensor:
        """All images, each shifted and half of them mirrored: a selection for each distance, down and to the right."""
        count, size, distances = len(self._labels), self._run.data.shape[1], 2 * (self._run.data.shape[1] // 8) + 1
        down, right = torch.randint(distances, (2, count), device=self._device)
        tall = torch.empty_like(self._padded[:, :, :size])
        cut = torch.empty_like(self._padded[:, :, :size, :size])
        for distance in range(distances):
            chosen = down == distance
            tall[chosen] = self._padded[chosen, :, distance : distance + size]
        for distance in range(distances):
            chosen = right == distance
            cut[chosen] = tall[chosen, :, :, distance : distance + size]
        mirrored = torch.rand(count, 1, 1, 1, device=self._device) < 0.5
        return torch.where(mirrored, cut.flip(-1), cut)

    def _loss(self, model: nn.Module, index: Tensor) -> Tensor:
        inputs, labels = self._inputs.index_select(0, index), self._labels.index_select(0, index)
        if self._normalises and not self._run.data.augment:
            inputs = torch.addcmul(self._shift, inputs, self._scale)
        if self._normalises and self._run.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if not self._normalises:
            inputs = inputs.long()
        half = (
            torch.autocast(self._device.type, dtype=torch.bfloat16) if self._run.precision == "bf16" else nullcontext()
        )
        with half:
            logits = model(inputs)
        smoothing = getattr(self._run.loss, "label_smoothing", 0.0)
        return F.cross_entropy(logits.float().flatten(0, -2), labels.long().flatten(), label_smoothing=smoothing)
