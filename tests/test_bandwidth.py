"""The bandwidth probe: its formula, and that its ranks agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelbench.probes.link_bandwidth import AllReduce, all_reduces
from tests.ranks import run_ranks


def test_a_ring_of_n_ranks_sends_two_n_minus_one_nths() -> None:
    assert AllReduce(size_bytes=400, time_s=2.0, ranks=4).bus_bytes_per_s == 2 * 3 / 4 * 400 / 2.0
    assert AllReduce(size_bytes=400, time_s=2.0, ranks=2).bus_bytes_per_s == 200.0


def probe(rank: int, size: int) -> list[AllReduce]:
    return all_reduces(torch.device("cpu"), sizes_bytes=(1, 4096), rounds=3)


@pytest.mark.slow
def test_every_rank_gets_the_slowest_rank_times(tmp_path: Path) -> None:
    first, second = run_ranks(probe, 2, tmp_path)
    assert first == second
    assert [(row.size_bytes, row.ranks) for row in first] == [(4, 2), (4096, 2)]
    assert all(row.time_s > 0 for row in first)
