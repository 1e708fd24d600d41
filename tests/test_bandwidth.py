"""The bandwidth probe: its formula, and that its ranks agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelbench.measure.bandwidth import OPERATIONS, Collective, all_reduces, collectives
from tests.ranks import run_ranks


def test_a_ring_of_n_ranks_sends_two_n_minus_one_nths() -> None:
    assert Collective(size_bytes=400, time_s=2.0, ranks=4).bus_bytes_per_s == 2 * 3 / 4 * 400 / 2.0
    assert Collective(size_bytes=400, time_s=2.0, ranks=2).bus_bytes_per_s == 200.0


def probe(rank: int, size: int) -> list[Collective]:
    return all_reduces(torch.device("cpu"), sizes_bytes=(1, 4096), rounds=3)


@pytest.mark.slow
def test_every_rank_gets_the_slowest_rank_times(tmp_path: Path) -> None:
    first, second = run_ranks(probe, 2, tmp_path)
    assert first == second
    assert [(row.size_bytes, row.ranks) for row in first] == [(8, 2), (4096, 2)], "a number per rank at least"
    assert all(row.time_s > 0 for row in first)


@pytest.mark.parametrize(("operation", "sent"), [("all_gather", 300), ("all_to_all", 300), ("send", 400)])
def test_other_messages_send_what_their_definition_says(operation: str, sent: float) -> None:
    assert Collective(operation=operation, size_bytes=400, time_s=2.0, ranks=4).sent_bytes == sent  # type: ignore[arg-type]


def every_operation(rank: int, size: int) -> list[tuple[str, int, bool]]:
    cpu = torch.device("cpu")
    rows = [row for each in OPERATIONS for row in collectives(each, cpu, sizes_bytes=(4096,), rounds=2)]
    return [(row.operation, row.size_bytes, row.time_s > 0) for row in rows]


@pytest.mark.slow
def test_every_operation_is_timed(tmp_path: Path) -> None:
    first, second = run_ranks(every_operation, 2, tmp_path)
    assert first == second == [(each, 4096, True) for each in OPERATIONS]
