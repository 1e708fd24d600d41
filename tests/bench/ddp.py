"""DDP on two ranks against two copies that train at the same time and never communicate."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from launch.sweep import one_run
from parallelbench.config.components import Batch, Shard
from parallelbench.config.replica import Replica
from parallelbench.strategies.single import Single
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.bench.measure import Figure, all_cores, paired, ratios
from tests.ranks import run_ranks
from tests.strategies.training import prepared, shard_loader

RANKS = 2
GOALS = {128: 0.95, 32: 0.90}
"""Batch size per rank → share of the copies' speed."""
SAMPLES = 2560
"""Per rank and round."""


def figures() -> list[Figure]:
    """The copies' time ÷ DDP's, each that of the slowest rank; same batches, model and optimizer."""
    return [_figure(batch_size, goal) for batch_size, goal in GOALS.items()]


def _figure(batch_size: int, goal: float) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_measure, RANKS, Path(folder), batch_size)[0]
    ms = {name: f"{1e3 * statistics.median(values):.2f} ms" for name, values in results.items()}
    note = f"cnn_small, 1.6 MB of gradients: a step takes {ms['ddp']} against {ms['copies']}"
    what = f"ddp, 2 ranks, batch {batch_size} per rank ÷ two copies without communication, speed"
    return Figure(what, ratios(results, "copies", "ddp"), "", goal, True, note)


def _measure(rank: int, size: int, batch_size: int) -> dict[str, list[float]]:
    os.sched_setaffinity(0, {all_cores()[rank]})
    samples = [f"data.train_samples={SAMPLES * RANKS}", "data.test_samples=10"]
    data = ["model=cnn_small", "data=synthetic", "data.channels=1", "data.image_size=28", *samples]
    run = one_run([*data, "strategy=ddp", f"devices={size}", f"batch_size={batch_size * size}"]).run
    batches = list(shard_loader(run, Shard(rank, size)).train(epoch=1))
    ddp = prepared(run, rank, size)
    copy = Single(name="single").prepare(build_model(run), run, World())
    return paired({"ddp": _timed(ddp, batches), "copies": _timed(copy, batches)})


def _timed(replica: Replica, batches: list[Batch]) -> Callable[[], float]:
    """Seconds per step of the slowest rank."""

    def seconds() -> float:
        dist.barrier()
        start = time.perf_counter()
        for batch in batches:
            replica.step(batch)
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item() / len(batches)

    return seconds
