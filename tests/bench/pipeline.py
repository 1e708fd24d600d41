"""Pipelines against their bound, and the naive layer split against one device; a device is one core and one thread."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from tests.bench.measure import Figure, paired, ratios

STEPS = 1
"""Optimizer steps per round; about a second on one core."""
# Embedding and head are small beside the blocks, so two stages of three blocks each are equal within 1 %. A micro-batch
# of 8 images has 520 tokens: products nearly as fast as those of a whole batch.
WORK = [
    *("model=vit", "model.dim=128", "model.depth=6", "model.heads=4", "batch_size=128", "optimizer=sgd"),
    *("data=synthetic", "data.channels=3", "data.image_size=32", "data.train_samples=1024", "data.test_samples=128"),
]
ALTERNATIVES = {
    "single": ("strategy=single", "devices=1"),
    "model_parallel": ("strategy=model_parallel", "devices=2"),
    "pipeline of 8": ("strategy=pipeline", "devices=2", "strategy.micro_batches=8"),
    "pipeline of 16": ("strategy=pipeline", "devices=2", "strategy.micro_batches=16"),
}


def figures() -> list[Figure]:
    """Speed-ups over one rank on one core for the same batches; the losses afterwards are asserted to be the same."""
    teams = {name: Team(one_run([*WORK, *overrides]).run) for name, overrides in ALTERNATIVES.items()}
    try:
        results = paired({name: team.round for name, team in teams.items()})
        losses = {name: team.loss for name, team in teams.items()}
    finally:
        for team in teams.values():
            team.stop()
    assert max(losses.values()) - min(losses.values()) < 1e-3 * losses["single"], (
        f"the work was not identical: {losses}"
    )
    found = []
    for micro_batches in (8, 16):
        bound = 2 * micro_batches / (micro_batches + 1)
        speedups = ratios(results, "single", f"pipeline of {micro_batches}")
        what = f"pipeline, p=2 m={micro_batches}: speed-up ÷ pm/(m+p−1) = {bound:.3f}"
        note = f"1f1b, vit of 6 blocks, batch 128; speed-up {sorted(speedups)[len(speedups) // 2]:.3f}"
        found.append(Figure(what, [speedup / bound for speedup in speedups], "", 0.93, True, note))
    naive = ratios(results, "single", "model_parallel")
    return [
        *found,
        Figure("naive layer split on 2 devices ÷ one device, speed", naive, "", 0.97, True, "the same model"),
    ]


class Team:
    """The ranks of one alternative, waiting for rounds, each on a core of its own."""

    def __init__(self, run: RunConfig) -> None:
        self.loss = float("nan")
        context = multiprocessing.get_context("spawn")
        size, init = run.devices, Path(tempfile.mkdtemp()) / "init"
        self._ends: list[Connection] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            context.Process(target=_rank, args=(run, rank, size, str(init), theirs), daemon=True).start()
            self._ends.append(mine)
        for end in self._ends:
            assert end.recv() == "ready"

    def round(self) -> float:
        """Seconds of the slowest rank for `STEPS` steps; all others sleep meanwhile."""
        for end in self._ends:
            end.send("go")
        answers = [end.recv() for end in self._ends]
        self.loss = sum(loss for _, loss in answers)
        return max(seconds for seconds, _ in answers)

    def stop(self) -> None:
        for end in self._ends:
            end.send("stop")


def _rank(run: RunConfig, rank: int, size: int, init: str, end: Any) -> None:
    os.sched_setaffinity(0, {_CORES[rank % len(_CORES)]})
    import torch
    import torch.distributed as dist

    from parallelbench.loaders.resident import ResidentLoader
    from parallelbench.training.torch_session import build_model
    from parallelbench.world.world import World

    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=size)
    world = World(rank=rank, size=size, local_rank=rank)
    replica = run.strategy.prepare(build_model(run), run, world)
    loader = ResidentLoader(
        run.data.load(Path("nowhere")),
        run.data,
        device="cpu",
        dtype=torch.float32,
        seed=run.effective_seed,
        global_batch_size=run.global_batch_size,
        shard=replica.data_shard,
        channels_last=False,
        steps_per_epoch=STEPS,
    )
    end.send("ready")
    epoch = 0
    while end.recv() == "go":
        epoch += 1
        batches = list(loader.train(epoch))
        world.barrier()
        start = time.perf_counter()
        results = [replica.step(batch) for batch in batches]
        seconds = time.perf_counter() - start
        end.send((seconds, sum(result[0].item() for result in results if result is not None)))


_CORES = sorted(os.sched_getaffinity(0)) if len(os.sched_getaffinity(0)) > 1 else list(range(os.cpu_count() or 1))
"""Cores for ranks: the benchmarks themselves run on one, which here only waits."""
