"""The ring of ring_ddp against gloo's own all-reduce: 10 MB, two ranks, a core each."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.data_parallel.ring import ring_average
from tests.bench.measure import Figure, all_cores, paired, ratios
from tests.ranks import run_ranks

RANKS = 2
VALUES = 2_500_000
"""fp32: 10 MB."""
REPEATS = 20
"""Calls per round."""


def figures() -> list[Figure]:
    """Gloo's time ÷ the ring's for the mean over both ranks, as rank 0 sees it; both are asserted to give the same."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_measure, RANKS, Path(folder))[0]
    ms = {name: f"{1e3 * statistics.median(values):.1f} ms" for name, values in results.items()}
    note = f"10 MB fp32: {ms['ring']} against {ms['gloo']}, of which {ms['gloo, sum only']} without the division"
    return [
        Figure("ring of ring_ddp ÷ gloo's all_reduce, bandwidth", ratios(results, "gloo", "ring"), "", 0.9, True, note)
    ]


def _measure(rank: int, ranks: int) -> dict[str, list[float]]:
    os.sched_setaffinity(0, {all_cores()[rank]})
    traffic = Traffic()

    def mean_by_gloo(values: torch.Tensor) -> None:
        dist.all_reduce(values)
        values.mul_(1 / ranks)

    def mean_by_ring(values: torch.Tensor) -> None:
        ring_average(values, traffic)

    expected, found = _values(rank), _values(rank)
    mean_by_gloo(expected)
    mean_by_ring(found)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    alternatives = {"ring": mean_by_ring, "gloo": mean_by_gloo, "gloo, sum only": dist.all_reduce}
    return paired({name: _timed(call, rank) for name, call in alternatives.items()})


def _timed(call: Callable[[torch.Tensor], object], rank: int) -> Callable[[], float]:
    def seconds() -> float:
        values = _values(rank)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            call(values)
        return (time.perf_counter() - start) / REPEATS

    return seconds


def _values(rank: int) -> torch.Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(rank))
