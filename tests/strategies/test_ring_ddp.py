"""The ring: equal to a library's all-reduce, at the textbook's cost, whatever the size and the number of ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelbench.config.run import RunConfig
from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.data_parallel.ring import ring_average
from parallelbench.strategies.replica import gradient_bytes
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import configure, loader_of, prepared

SIZES = [1, 2, 3, 4, 5, 12, 1000, 1001, 65537]
MODEL = [
    *["data=synthetic", "data.channels=1", "data.image_size=28", "data.train_samples=96", "data.test_samples=37"],
    "model=cnn_small",
]


def values_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(1000 * rank + size))


def average_all(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """By the ring, by all_reduce, and the bytes that this rank sent round the ring."""
    results = []
    for dtype in (torch.float64, torch.float32):
        for size in SIZES:
            ring, library, traffic = values_of(rank, size, dtype), values_of(rank, size, dtype), Traffic()
            ring_average(ring, traffic)
            dist.all_reduce(library)
            results.append((ring, library / ranks, traffic.gradient))
    return results


@pytest.mark.cases("2")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_equals_all_reduce_and_sends_what_the_textbook_says(ranks: int, tmp_path: Path) -> None:
    for cases in zip(*run_ranks(average_all, ranks, tmp_path), strict=True):
        rings = [ring for ring, _, _ in cases]
        for one, other in pairwise(rings):
            assert torch.equal(one, other), "all ranks hold the same bits"
        ring, library, _ = cases[0]
        tolerance = 1e-15 if ring.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(ring, library, rtol=tolerance, atol=tolerance)
        sent, size_bytes = [case[2] for case in cases], ring.numel() * ring.element_size()
        assert sum(sent) == 2 * (ranks - 1) * size_bytes
        # Chunks differ by one value at most.
        assert (
            max(abs(rank_sent - 2 * (ranks - 1) / ranks * size_bytes) for rank_sent in sent) < 2 * ring.element_size()
        )
        if ring.numel() % ranks == 0:
            assert set(sent) == {2 * (ranks - 1) / ranks * size_bytes}


def one_step(rank: int, size: int, run: RunConfig) -> tuple[float, int]:
    """Bytes sent in one step, and the bytes of all gradients."""
    model = build_model(run)
    replica = run.strategy.prepare(model, run, World(rank=rank, size=size, local_rank=rank))
    replica.step(next(loader_of(replica, run).train(epoch=1)))
    return replica.traffic.take()["gradient_bytes_sent"], gradient_bytes(model)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_mib", [25.0, 0.01])
def test_a_step_sends_each_gradient_round_the_ring_once(bucket_mib: float, tmp_path: Path) -> None:
    run = configure(*MODEL, "strategy=ring_ddp", "devices=2", f"strategy.bucket_mib={bucket_mib}")
    (sent, size_bytes), (other, _) = run_ranks(one_step, 2, tmp_path, run)
    assert sent + other == 2 * size_bytes, "2(n−1) M over both ranks"


def lonely_step(rank: int, size: int, run: RunConfig) -> str | None:
    """Rank 1 is gone when rank 0 wants to average."""
    replica = prepared(run, rank, size)
    if rank == 1:
        dist.destroy_process_group()
        return None
    with pytest.raises(RuntimeError) as caught:
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_step_with_an_error(tmp_path: Path) -> None:
    run = configure(*MODEL, "strategy=ring_ddp", "devices=2")
    message, _ = run_ranks(lonely_step, 2, tmp_path, run)
    assert "closed" in message.lower() or "reset" in message.lower(), message
