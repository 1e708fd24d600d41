"""The bandwidth probe: its formula, and that its ranks agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelbench.measure.bandwidth import OPERATIONS, Collective, collectives
from tests.ranks import run_ranks


def test_a_ring_of_n_ranks_sends_two_n_minus_one_nths() -> None:
    assert Collective(size_bytes=400, time_s=2.0, ranks=4).sent_bytes == 2 * 3 / 4 * 400
    assert Collective(size_bytes=400, time_s=2.0, ranks=2).sent_bytes == 400


@pytest.mark.parametrize(("operation", "sent"), [("all_gather", 300), ("all_to_all", 300), ("send", 400)])
def test_other_messages_send_what_their_definition_says(operation: str, sent: float) -> None:
    assert Collective(operation=operation, size_bytes=400, time_s=2.0, ranks=4).sent_bytes == sent  # type: ignore[arg-type]


def probe(rank: int, size: int) -> list[Collective]:
    cpu = torch.device("cpu")
    rows = [row for each in OPERATIONS for row in collectives(each, cpu, sizes_bytes=(4096,), rounds=2)]
    return [*collectives("all_reduce", cpu, sizes_bytes=(1,), rounds=3), *rows]


@pytest.mark.slow
def test_every_operation_is_timed_and_every_rank_gets_the_slowest_rank_times(tmp_path: Path) -> None:
    first, second = run_ranks(probe, 2, tmp_path)
    assert first == second
    assert all(row.time_s > 0 and row.ranks == 2 for row in first)
    sizes = [("all_reduce", 8), *((each, 4096) for each in OPERATIONS)]
    assert [(row.operation, row.size_bytes) for row in first] == sizes, "a number per rank at least"
