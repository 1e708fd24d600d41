"""Whole epochs with parameter servers on this rank; what the tests of synchronous and asynchronous servers share."""

from __future__ import annotations

from typing import Any

from parallelbench.config.run import RunConfig
from parallelbench.strategies.servers.servers import AsyncServer
from parallelbench.strategies.servers.workers import WorkerReplica
from tests.strategies.test_parity import MODELS, SYNTHETIC
from tests.strategies.training import configure, loader_of, prepared

PARAMETERS = 402_442
"""Of cnn_small on 28×28×1."""
EPOCHS = 2


def small(*overrides: str, model: str = "cnn_small") -> RunConfig:
    """A run of a few steps; `model` is one of those of the parity tests."""
    return configure(*SYNTHETIC, *MODELS[model], *overrides)


def train_epochs(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Whole epochs on this rank, and what a server was asked for, in the order of arrival."""
    replica = prepared(run, rank, size)
    arrivals = record_arrivals(replica) if isinstance(replica, AsyncServer) else None
    loader = loader_of(replica, run)
    found: dict[str, Any] = {"sent": [], "losses": [], "pushes": [], "vectors": [], "arrivals": []}
    for epoch in range(1, EPOCHS + 1):
        results = [replica.step(batch) for batch in loader.train(epoch)]
        found["sent"].append({kind: getattr(replica.traffic, kind) for kind in ("gradient", "parameter")})
        replica.traffic.take()
        found["losses"].append([result[0].item() for result in results if result is not None])
        found["pushes"].append([(push.step, push.staleness) for push in replica.take_pushes()])
        if arrivals is not None:
            found["arrivals"].append(list(arrivals))
            arrivals.clear()
        elif isinstance(replica, WorkerReplica):
            found["vectors"].append(replica._flat.values.clone())
    return found


def record_arrivals(server: AsyncServer) -> list[tuple[str, int]]:
    """Every request that the server answers from now on."""
    arrivals: list[tuple[str, int]] = []
    for kind in ("push", "fetch"):
        answer = getattr(server, f"_{kind}")

        def recorded(worker: int, kind: str = kind, answer: Any = answer) -> None:
            arrivals.append((kind, worker))
            answer(worker)

        setattr(server, f"_{kind}", recorded)
    return arrivals
