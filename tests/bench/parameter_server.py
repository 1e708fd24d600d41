"""Push and fetch of synchronous workers against the bound that the bandwidth between two ranks sets."""

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
from parallelbench.config.components import Batch
from parallelbench.errors import count_of
from parallelbench.strategies.servers.servers import SyncServer
from parallelbench.strategies.servers.workers import SyncWorker
from tests.bench.measure import Figure, all_cores, paired, ratios
from tests.ranks import run_ranks
from tests.strategies.training import prepared

REPEATS = 20
"""Calls per round."""
NOTHING = Batch(None, None, 0)


def figures() -> list[Figure]:
    """Bound ÷ time for one and for two workers of one server; cnn_large's 10.5 MB. On the wire alone, and whole."""
    return [figure for workers in (1, 2) for figure in _figures(workers)]


def _figures(workers: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_measure, workers + 1, Path(folder), workers)[0]
    # n workers, one server: nM/B each way.
    results["bound"] = [2 * workers * seconds for seconds in results["one message"]]
    ms = {name: f"{1e3 * statistics.median(values):.1f} ms" for name, values in results.items()}
    crowded = "; workers share a core, the server has one" if workers + 1 > (os.cpu_count() or 1) else ""
    found = []
    for name, what in (
        ("exchange", "wire only: bandwidth bound ÷ push and fetch"),
        ("step", "whole: bandwidth bound ÷ push, the server's sum and Adam, and fetch"),
    ):
        note = f"10.5 MB: {ms[name]}, bound {ms['bound']}{crowded}"
        values = ratios(results, "bound", name)
        found.append(Figure(f"parameter server, {count_of(workers, 'worker')}, {what}", values, "", 0.85, True, note))
    return found


def _measure(rank: int, size: int, workers: int) -> dict[str, list[float]]:
    cores = all_cores()
    os.sched_setaffinity(0, {cores[-1] if rank == workers else cores[rank % max(1, len(cores) - 1)]})
    overrides = ["model=cnn_large", "data=synthetic", "data.channels=1", "data.image_size=28", "optimizer=adam"]
    run = one_run([*overrides, "strategy=parameter_server", f"devices={size}", f"batch_size={workers}"]).run
    replica = prepared(run, rank, size)
    message = torch.randn(2_636_554)

    def one_message() -> None:
        if rank == 0:
            dist.send(message, workers)
        elif rank == workers:
            dist.recv(message, 0)

    def step() -> None:
        if isinstance(replica, SyncServer):
            replica.step(NOTHING)
        else:
            assert isinstance(replica, SyncWorker)
            replica._exchange()

    def exchange() -> None:
        if isinstance(replica, SyncServer):
            # Communication alone: neither sum nor update.
            average, update = replica._average, replica._update
            replica._average, replica._update = lambda: replica._received[0], lambda: None  # type: ignore
            replica.step(NOTHING)
            replica._average, replica._update = average, update  # type: ignore[method-assign]
        else:
            step()

    calls = {"one message": one_message, "exchange": exchange, "step": step}
    return paired({name: _timed(call) for name, call in calls.items()})


def _timed(call: Callable[[], None]) -> Callable[[], float]:
    """Seconds per call, until the last rank is done."""

    def seconds() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        dist.barrier()
        return (time.perf_counter() - start) / REPEATS

    return seconds
