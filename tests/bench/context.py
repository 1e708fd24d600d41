"""Context parallelism at a sequence of 4,096: activations that a rank keeps, and speed, against one device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launch.sweep import one_run
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.bench.measure import Figure, paired, ratios
from tests.bench.pipeline import Team
from tests.ranks import run_ranks
from tests.strategies.training import loader_of

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig

TOKENS = 4096
WORK = [
    *("model=gpt_tiny", f"model.sequence={TOKENS}", "data=tokens", f"data.sequence={TOKENS}", "optimizer=sgd"),
    *("data.train_samples=8", "data.test_samples=2", "batch_size=1"),
]
EXCHANGES = ("ring", "all_gather", "all_to_all")
MOST_KEPT, LEAST_SPEED = 0.55, 1.6


def figures() -> list[Figure]:
    """Kept activations and speed of each exchange × 2, against one device; equal losses are asserted."""
    runs = {"single": one_run([*WORK, "strategy=single"]).run}
    for exchange in EXCHANGES:
        asked = ["strategy=context_parallel", f"strategy.exchange={exchange}", "devices=2"]
        runs[exchange] = one_run([*WORK, *asked]).run
    kept = {name: kept_bytes(run) for name, run in runs.items()}
    teams = {name: Team(run) for name, run in runs.items()}
    try:
        results = paired({name: team.round for name, team in teams.items()})
        losses = {name: team.loss for name, team in teams.items()}
    finally:
        for team in teams.values():
            team.stop()
    assert max(losses.values()) - min(losses.values()) < 1e-3 * losses["single"], f"not the same work: {losses}"
    found = []
    for name in EXCHANGES:
        what, note = f"context_parallel × 2, {name}, {TOKENS} tokens", f"gpt_tiny, batch 1; {kept[name] / 1e6:.1f} MB"
        share, speed = [kept[name] / kept["single"]], ratios(results, "single", name)
        found += [
            Figure(f"{what}: activations kept for backward ÷ one device's", share, "", MOST_KEPT, False, note),
            Figure(f"{what}: speed ÷ one device's", speed, "×", LEAST_SPEED, True, "gpt_tiny, batch 1"),
        ]
    return found


def kept_bytes(run: RunConfig) -> int:
    """Of the fullest rank: what autograd keeps from forward to backward in the second step, without parameters."""
    with tempfile.TemporaryDirectory() as folder:
        return max(run_ranks(_kept, run.devices, Path(folder), run))


def _kept(rank: int, size: int, run: RunConfig) -> int:
    replica: Any = new_replica(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    batches = loader_of(replica, run).train(1)
    replica.step(next(batches))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in replica.trained()[0].parameters()}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()  # all that was noted is still there: backward has not begun
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        replica.step(next(batches))
    return sum(size_bytes for place, size_bytes in storages.items() if place not in parameters)
