"""A process group of one rank on NCCL: what a single GPU can show of meshes, sharding and sharded updates."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from parallelbench.gpu_check.check_result import at_most
from parallelbench.gpu_check.small_runs import loader_of, replica_of
from parallelbench.gpu_check.training import small_run
from parallelbench.strategies.parts.fsdp_shards import shard_layers
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import backends, group_kinds

if TYPE_CHECKING:
    from parallelbench.world.world import World

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
_STEPS = 3


def sharded(world: World) -> str:
    """In fp64 a model in shards, of which one rank has all, trains like one that is not, with every optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'group'}"
        dist.init_process_group(backends(world.device_type), init_method=meeting, rank=0, world_size=1)
        try:
            kinds = ", ".join(dict.fromkeys((group_kinds() or {}).values()))
            worst = max(_difference(world, optimizer) for optimizer in OPTIMIZERS)
        finally:
            dist.destroy_process_group()
    return f"{at_most('largest relative difference of a loss', worst, 1e-9)}, {', '.join(OPTIMIZERS)}, by {kinds}"


def _difference(world: World, optimizer: str) -> float:
    """Of the losses of some steps."""
    alone = small_run("cnn_small", optimizer=optimizer, precision="fp64")
    strategy = small_run("cnn_small", strategy="fsdp", devices=2).strategy
    run = msgspec.structs.replace(alone, strategy=strategy)
    replica = shard_layers(build_model(run), run, world, shards=1, reshard_after_forward=True, gather="stored")
    reference, worst = replica_of(alone, world), 0.0
    for batch in islice(loader_of(alone, world).train(1), _STEPS):
        found, expected = replica.step(batch), reference.step(batch)
        assert found is not None
        assert expected is not None
        worst = max(worst, abs(found[0].item() / expected[0].item() - 1))
    return worst
