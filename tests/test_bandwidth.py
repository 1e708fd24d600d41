"""The bandwidth probe: its formula, and that its ranks agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.measure import bandwidth
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


def test_a_rank_that_is_alone_on_its_node_takes_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rank 1 of nodes with several: torch would bind its group to the second one, and find tensors elsewhere."""
    asked: dict[str, Any] = {}

    def init(backend: str, **options: Any) -> None:
        asked.update(options, backend=backend)

    for name, stand_in in {"init_process_group": init, "all_reduce": id, "destroy_process_group": lambda: None}.items():
        monkeypatch.setattr(dist, name, stand_in)
    monkeypatch.setattr(bandwidth, "collectives", lambda _, device: asked.update(measured=device))
    assert bandwidth.main(["tcp://127.0.0.1:1", "1", "2", "cuda"]) == 0
    assert asked["device_id"] == asked["measured"] == torch.device("cuda", 0)
    assert asked["backend"] == "cpu:gloo,cuda:nccl"
