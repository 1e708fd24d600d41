"""How many kernels a training step launches; whether steps that are captured train like others."""

from __future__ import annotations

from itertools import chain, count, islice
from typing import TYPE_CHECKING

import msgspec
import torch

from parallelbench.gpu_check.results import at_most
from parallelbench.gpu_check.training import llama_run, small_run, training_difference
from parallelbench.gpu_check.variants import loader_of, replica_of
from parallelbench.training.checks.parity import as_checked

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World

_COUNTED = 64
"""Sums of this many steps are added up together."""


def per_step(world: World) -> str:
    """Kernels per step; none of them waits, as other checks show."""
    run = small_run("cnn_small")
    replica, loader = replica_of(run, world), loader_of(run, world)
    batches = chain.from_iterable(map(loader.train, count(1)))

    def train() -> None:
        total = None
        for batch in islice(batches, _COUNTED):
            result = replica.step(batch)
            assert result is not None
            if total is None:
                total = result
            else:
                total += result
        world.synchronize()

    train()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        train()
    found = sum(1 for event in profiler.events() if event.device_type.name == "CUDA")
    return f"{found / _COUNTED:.1f} kernels, copies and fills per step of cnn_small in fp32"


def captured(world: World) -> str:
    """In fp64 a captured step trains like one that is not."""
    return _difference_when_captured(small_run("cnn_small"), world)


def captured_gpt(world: World) -> str:
    """Likewise of language models, with either kind of positions."""
    runs = {"GPT-2's": small_run("gpt_tiny", optimizer="adamw"), "Llama's": llama_run(optimizer="adamw")}
    texts = [f"{name} layers: {_difference_when_captured(run, world)}" for name, run in runs.items()]
    return ", ".join(texts)


def _difference_when_captured(run: RunConfig, world: World) -> str:
    run = as_checked(run)
    return at_most(
        "largest relative difference",
        training_difference(msgspec.structs.replace(run, graph=True), world, run, world),
        1e-9,
    )
