"""A few steps of training under one strategy, on this rank; what the strategy tests compare."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launch.sweep import one_run
from parallelbench.config.components import Shard
from parallelbench.config.replica import Replica
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.loaders.order import BatchLoader
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.training.checks.comparability import as_reference
from parallelbench.training.loop import Trainer
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World

STEPS = 3
TOKENS = ("data=tokens", "data.sequence=12", "data.vocabulary=20", "data.train_samples=96", "data.test_samples=13")


@functools.cache
def configure(*overrides: str, device_type: str = "cpu") -> RunConfig:
    """A small run in fp64."""
    run = one_run(["precision=fp64", "batch_size=24", "optimizer=sgd", "optimizer.lr=0.05", *overrides]).run
    check_run(run, device_type)
    return run


def small(strategy: str, devices: int, *options: str) -> RunConfig:
    """The same of a small language model."""
    gpt = ("model=gpt_tiny", "model.layers=2", "model.width=16", "model.sequence=12", "model.vocabulary=24")
    return configure(*TOKENS, *gpt, f"strategy={strategy}", f"devices={devices}", *options)


def train(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Train `STEPS` steps; losses (summed per step, where owned), evaluation sums, state and gradients."""
    return drive(new_replica(build_model(run), run, World(rank=rank, size=size, local_rank=rank)), run)


def drive(replica: Replica, run: RunConfig, steps: int = STEPS) -> dict[str, Any]:
    """The same for a replica that is there already."""
    loader = loader_of(replica, run)
    batches = chain.from_iterable(map(loader.train, count(1)))
    results = [replica.step(next(batches)) for _ in range(steps)]
    evaluated = replica.evaluate(loader.test())
    return {
        "steps": [None if result is None else result.tolist() for result in results],
        "evaluated": None if evaluated is None else evaluated.tolist(),
        "gradients": replica.full_gradients(),
        "state": replica.full_state_dict(),
    }


def sent_in_a_step(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Bytes that this rank says it sends in a third step, by kind and in all, and those that pass torch.distributed.

    DDP lays its buckets out anew in its second step, with small messages of its own.
    """
    replica = new_replica(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    batches = chain.from_iterable(map(loader_of(replica, run).train, count(1)))
    for _ in range(2):
        replica.step(next(batches))
    replica.traffic.take()
    with CountedBytes() as counted:
        replica.step(next(batches))
    said = {name.removesuffix("_bytes_sent"): size_bytes for name, size_bytes in replica.traffic.take().items()}
    replica.close()
    passed = counted.sent_bytes + counted.control_bytes
    return {**said, "said": sum(said.values()), "passed": passed, "unknown": counted.unknown}


def kept_bytes(rank: int, size: int, run: RunConfig) -> int:
    """What autograd keeps from forward to backward in the second step, without parameters."""
    replica: Any = new_replica(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    batches = loader_of(replica, run).train(1)
    replica.step(next(batches))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in replica.trained()[0].parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()  # all that was noted is still there: backward has not begun
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        replica.step(next(batches))
    return sum(size_bytes for place, size_bytes in storages.items() if place not in parameters)


def prepared(run: RunConfig, rank: int = 0, size: int = 1) -> Replica:
    """A rank's replica of the run's model."""
    return run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))


def loader_of(replica: Replica, run: RunConfig) -> BatchLoader:
    """The batches that the replica's rank reads."""
    return shard_loader(run, replica.data_shard)


def shard_loader(run: RunConfig, shard: Shard) -> BatchLoader:
    """The batches of a shard."""
    return build_loader(run.data.load(Path("nowhere")), run, World(), shard)


def plain_epochs(model: nn.Sequential, run: RunConfig, loss: Callable[..., Tensor] = F.cross_entropy) -> Iterator[Any]:
    """A loop in plain PyTorch, on one device: after each epoch, the losses of its steps."""
    optimizer = run.optimizer.build(model.parameters(), run, "cpu")
    loader = shard_loader(run, Shard())
    for epoch in range(1, run.epochs + 1):
        losses = []
        for batch in loader.train(epoch):
            value = loss(model(batch.images), batch.labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        yield losses


def one_device(run: RunConfig) -> dict[str, Any]:
    """The same training on one device, in this process."""
    return train(0, 1, as_reference(run))


class Rows:
    """Takes the place of a journal: keeps the rows of each table."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def write(self, table: str, rows: list[dict[str, Any]]) -> None:
        self.of[table] += rows

    def event(self, name: str, **details: Any) -> None: ...

    def commit(self) -> None: ...


def trained(rank: int, size: int, run: RunConfig) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Tensor]]:
    """The rows of a whole training that this rank writes, and the model; steps before it leave no trace."""
    world, journal = World(rank=rank, size=size, local_rank=rank), Rows()
    replica = run.strategy.prepare(build_model(run), run, world)
    loader = loader_of(replica, run)
    replica.compile_warmup(next(loader.train(epoch=9)))
    Trainer(replica, loader, run=run, world=world, journal=journal).train()  # type: ignore[arg-type]
    state = replica.full_state_dict()
    replica.close()
    return journal.of, state


def summed(parts: list[list[float] | None]) -> list[float]:
    """Sum over the ranks that own something."""
    return [sum(values) for values in zip(*(part for part in parts if part is not None), strict=True)]
