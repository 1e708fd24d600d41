"""How many kernels a training step launches, and how long it takes, beside a bare loop over the same model."""

from __future__ import annotations

import time
from itertools import chain, count, islice
from typing import TYPE_CHECKING

import msgspec
import torch
from torch.nn import functional as F

from parallelbench.gpu_check.results import at_most
from parallelbench.gpu_check.training import llama_run, small_run, training_difference
from parallelbench.gpu_check.variants import loader_of, replica_of
from parallelbench.training.checks.parity import as_checked
from parallelbench.training.torch_session import build_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World

_STEPS = 200
_COUNTED = 64
"""Sums of this many steps are added up together."""


def per_step(world: World) -> str:
    """Kernels per step; none of them waits, as other checks show."""
    step = _suite(small_run("cnn_small"), world)
    _warm(step, world)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_COUNTED):
            step()
        world.synchronize()
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
    return at_most("largest relative difference", training_difference(_graphed(run), world, run, world), 1e-9)


def beside_a_bare_loop(world: World) -> str:
    """Milliseconds per step of the suite, of a captured step, and of forward, backward and update alone."""
    # Long epochs: what an epoch moves to the device before its first step is no part of a step.
    run = small_run("cnn_small", data=("synthetic", {"train_samples": 96 * 10 * _STEPS}))
    steps = {"bare": _bare(run, world), "suite": _suite(run, world), "graph=true": _suite(_graphed(run), world)}
    times_s = {name: _mean_s(step, world) for name, step in steps.items()}
    return ", ".join(f"{name} {1000 * time_s:.3f} ms" for name, time_s in times_s.items())


def _graphed(run: RunConfig) -> RunConfig:
    return msgspec.structs.replace(run, graph=True)


def _suite(run: RunConfig, world: World) -> Callable[[], object]:
    replica, loader = replica_of(run, world), loader_of(run, world)
    batches = chain.from_iterable(map(loader.train, count(1)))
    total = None

    def step() -> None:
        nonlocal total
        (batch,) = islice(batches, 1)
        result = replica.step(batch)
        assert result is not None
        if total is None:
            total = result
        else:
            total += result

    return step


def _bare(run: RunConfig, world: World) -> Callable[[], object]:
    """On one batch, with torch's own optimizer, without sums."""
    model = build_model(run).to(world.device)
    optimizer = run.optimizer.build(model.parameters(), run, world.device_type)
    batch = next(loader_of(run, world).train(1))
    images, labels = batch.images, batch.labels
    assert images is not None
    assert labels is not None

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def _warm(step: Callable[[], object], world: World) -> None:
    for _ in range(_COUNTED):
        step()
    world.synchronize()


def _mean_s(step: Callable[[], object], world: World) -> float:
    _warm(step, world)
    start = time.perf_counter()
    for _ in range(_STEPS):
        step()
    world.synchronize()
    return (time.perf_counter() - start) / _STEPS
