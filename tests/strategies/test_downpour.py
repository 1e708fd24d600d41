"""Asynchronous servers: training equals a sequential replay of the same arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.strategies.servers import ParameterServer
from parallelbench.training.torch_session import build_model
from tests.launch.programs import Program, kill
from tests.ranks import run_ranks
from tests.strategies.serving import EPOCHS, PARAMETERS, small, train_epochs
from tests.strategies.training import shard_loader

pytestmark = pytest.mark.slow


ASYNC = ["strategy=parameter_server", "strategy.mode=async"]
DOWNPOUR = ["strategy=downpour", "optimizer=adagrad", "optimizer.eps=1e-6"]
"""A key's bias has no effect on attention. With the default eps Adagrad makes 1e-7 of its gradient's rounding."""


@pytest.mark.parametrize(
    ("model", "devices", "options"),
    [
        *(("mlp", 2, DOWNPOUR), ("cnn_small", 4, DOWNPOUR), ("vit_tiny", 4, DOWNPOUR), ("resnet_group", 2, DOWNPOUR)),
        ("cnn_small", 3, ["strategy=downpour", "optimizer=adagrad"]),
        ("cnn_small", 4, [*ASYNC, "strategy.n_push=3", "strategy.n_fetch=2", "strategy.slow_worker_factor=2.5"]),
        ("cnn_small", 4, [*ASYNC, "strategy.servers=2", "strategy.n_push=2", "optimizer=adam", "optimizer.lr=0.01"]),
        ("cnn_small", 2, [*ASYNC, "strategy.n_fetch=3"]),
        ("mlp", 3, ["strategy=downpour", "optimizer=adagrad", "strategy.n_fetch=2"]),
        ("vit_tiny", 3, ["strategy=downpour", "optimizer.momentum=0.0"]),
        ("resnet_group", 3, [*ASYNC, "strategy.n_push=2", "optimizer.momentum=0.9"]),
    ],
)
@pytest.mark.cases("*-2-options0", "*-2-options3", "cnn_small-4-options1", "cnn_small-2-*")
def test_asynchronous_training_equals_a_replay_of_its_arrivals(
    model: str, devices: int, options: list[str], tmp_path: Path
) -> None:
    run = small(*options, f"devices={devices}", model=model)
    assert not run.strategy.equals_one_device(run)
    ranks = run_ranks(train_epochs, devices, tmp_path, run)
    assert_replayed(run, ranks)
    stale = any(staleness for rank in ranks for epoch in rank["pushes"] for _, staleness in epoch)
    if _of(run).n_push == 1:  # no fetch precedes an epoch's first push, so the second worker to make one is late
        assert stale == (devices - _of(run).servers > 1)


def _of(run: RunConfig) -> ParameterServer:
    assert isinstance(run.strategy, ParameterServer)
    return run.strategy


def assert_replayed(run: RunConfig, ranks: list[dict[str, Any]]) -> None:
    """What workers and servers computed is what follows from the order in which the servers were asked."""
    strategy = _of(run)
    workers = run.devices - strategy.servers
    replay = Replay(run, strategy, [rank["arrivals"] for rank in ranks[workers:]])
    for epoch in range(EPOCHS):
        replay.epoch(epoch)
        for worker, rank in enumerate(ranks[:workers]):
            torch.testing.assert_close(rank["vectors"][epoch], replay.vector(), rtol=0, atol=1e-9)
            assert rank["losses"][epoch] == pytest.approx(replay.losses[worker], rel=1e-9)
            assert rank["pushes"][epoch] == replay.pushes(worker), "step and staleness"


@pytest.mark.exhaustive
def test_asynchronous_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    options = ["strategy.servers=2", "strategy.n_push=3", "strategy.n_fetch=2"]
    run = small(*DOWNPOUR, "devices=4", *options)
    ranks = run_ranks(train_epochs, 4, tmp_path, run)
    size = PARAMETERS * 8
    assert run.steps_per_epoch == 4
    for worker in ranks[:2]:  # pushes after the steps 3 and 4
        assert worker["sent"] == [{"gradient": 2 * size, "parameter": 0}] * EPOCHS
    for server in ranks[2:]:  # two workers fetch before step 3 and at the end
        assert server["sent"] == [{"gradient": 0, "parameter": 2 * 2 * size // 2}] * EPOCHS


class Replay:
    """Downpour SGD in one process: workers that compute in turns, servers that follow recorded orders."""

    def __init__(self, run: RunConfig, strategy: ParameterServer, arrivals: list[list[list[tuple[str, int]]]]) -> None:
        self._run, self._strategy, self._arrivals = run, strategy, arrivals
        workers = run.devices - strategy.servers
        self._models = [build_model(run).double() for _ in range(workers)]
        vector = parameters_to_vector(self._models[0].parameters()).detach()
        bounds = [vector.numel() * server // strategy.servers for server in range(strategy.servers + 1)]
        self._slices = [slice(*pair) for pair in pairwise(bounds)]
        self._shards = [nn.Parameter(vector[part].clone()) for part in self._slices]
        self._optimizers = [run.optimizer.build([shard], run, "cpu") for shard in self._shards]
        self._loaders = [shard_loader(run, Shard(worker, workers)) for worker in range(workers)]

    def vector(self) -> Tensor:
        return torch.cat([shard.detach() for shard in self._shards])

    def epoch(self, epoch: int) -> None:
        """All that happened in an epoch, counted from 0 here; each server's events in its own order."""
        self.losses: list[list[float]] = [[] for _ in self._models]
        for model in self._models:
            vector_to_parameters(self.vector(), model.parameters())
        self._gradients = [torch.zeros_like(self.vector()) for _ in self._models]
        self._fetched = [self.vector() for _ in self._models]
        self._events = [list(server[epoch]) for server in self._arrivals]
        programs = [self._program(worker, epoch + 1) for worker in range(len(self._models))]
        waiting = {worker: next(program) for worker, program in enumerate(programs)}
        heads = [0 for _ in self._events]
        answered: dict[int, set[int]] = {worker: set() for worker in waiting}
        while waiting:
            before = list(heads)
            for server, events in enumerate(self._events):
                while heads[server] < len(events):
                    kind, worker = events[heads[server]]
                    if waiting.get(worker) != kind or server in answered[worker]:
                        break
                    self._answer(kind, worker, server)
                    answered[worker].add(server)
                    heads[server] += 1
                    if len(answered[worker]) == len(self._events):
                        answered[worker] = set()
                        waiting[worker] = next(programs[worker], "")
                        if not waiting[worker]:
                            del waiting[worker]
            assert heads != before, "the recorded orders fit no execution"
        assert heads == [len(events) for events in self._events]

    def pushes(self, worker: int) -> list[tuple[int, int]]:
        """Step and largest staleness of a worker's pushes, read off the recorded orders alone."""
        per_server = [self._staleness(worker, events) for events in self._events]
        return [max(stales) for stales in zip(*per_server, strict=True)]

    def _staleness(self, worker: int, events: list[tuple[str, int]]) -> list[tuple[int, int]]:
        """Updates by others that the oldest gradient of each push lacks, along the worker's program."""
        n_push, n_fetch, steps = self._strategy.n_push, self._strategy.n_fetch, self._run.steps_per_epoch
        others = iter(
            [
                sum(k == "push" and w != worker for k, w in events[:i])
                for i, (_, who) in enumerate(events)
                if who == worker
            ]
        )
        found, version, accrued = [], 0, []
        for step in range(1, steps + 1):
            if step > 1 and (step - 1) % n_fetch == 0:
                version = next(others)
            accrued.append(version)
            if step % n_push == 0 or step == steps:
                found.append((step, next(others) - min(accrued)))
                accrued.clear()
        return found

    def _program(self, worker: int, epoch: int) -> Iterator[str]:
        """What a worker does; yields where it needs the servers."""
        model, strategy, steps = self._models[worker], self._strategy, self._run.steps_per_epoch
        for step, batch in enumerate(self._loaders[worker].train(epoch), start=1):
            if step > 1 and (step - 1) % strategy.n_fetch == 0:
                yield "fetch"
                vector_to_parameters(self._fetched[worker], model.parameters())
            model.zero_grad()
            loss = F.cross_entropy(model(batch.images), batch.labels)
            loss.backward()
            self.losses[worker].append(loss.item() * batch.size)
            gradient = parameters_to_vector([parameter.grad for parameter in model.parameters()])
            self._gradients[worker] += gradient
            if strategy.n_fetch > 1:
                local = parameters_to_vector(model.parameters()).detach() - self._run.optimizer.lr * gradient
                vector_to_parameters(local, model.parameters())
            if step % strategy.n_push == 0 or step == steps:
                yield "push"
                self._gradients[worker].zero_()

    def _answer(self, kind: str, worker: int, server: int) -> None:
        part = self._slices[server]
        if kind == "fetch":
            self._fetched[worker][part] = self._shards[server].detach()
        else:
            self._shards[server].grad = self._gradients[worker][part].clone()
            self._optimizers[server].step()


# --- whole runs


DIGITS = ("device=cpu", "data=digits", "model=cnn_small", "strategy=downpour", "optimizer=adagrad", "devices=3")


@pytest.mark.exhaustive
def test_a_killed_worker_ends_the_others_and_is_named(tmp_path: Path) -> None:
    with Program("run", *DIGITS, "launcher.oversubscribe=true", "epochs=100000", results=tmp_path) as program:
        attempt = program.attempt()
        program.epochs(attempt, at_least=1)
        kill(program.pid_of("rank 1", attempt))
        assert program.end() == 1, program.text
        assert program.survivors() == []
    outcome = attempt.outcome()
    assert outcome is not None
    assert outcome.outcome == "killed"
    assert "rank 1 was killed by SIGKILL" in outcome.reason
