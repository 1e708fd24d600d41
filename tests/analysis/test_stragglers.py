"""Tails of step times, imbalance of ranks and nodes, headroom of memory, cost and CO₂, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import load, per_run, summary
from parallelbench.world.machine import host_memory_limit
from tests.analysis.factory import MIB, Fake, config, published


def one(tmp_path: Path, fake: Fake, **changes: Any) -> dict[str, Any]:
    published(config(tmp_path, **({"strategy": "ddp", "devices": 2, "epochs": 4} | changes)), fake)
    return per_run(load(tmp_path)).row(0, named=True)


def test_percentiles_are_of_the_slowest_rank_in_steady_epochs_without_first_steps(tmp_path: Path) -> None:
    """Epochs 2 to 4 have 40 such steps each: 1 to 40, and as many again beyond 40 and 80, of rank 1; rank 0 is faster.

    Of 1 to 120: 60.5, 1 + 0.95 · 119 and 1 + 0.99 · 119.
    """

    def times_s(epoch: int, rank: int) -> list[float]:
        steps = [40.0 * (epoch - 2) + step for step in range(1, 41)]
        return [9000.0, *(steps if epoch > 1 and rank else [0.5] * 40 if epoch > 1 else [8000.0] * 40)]

    row = one(tmp_path, Fake(step_times_s=times_s))
    found = [row[f"step_time_p{percent}_s"] for percent in (50, 95, 99)]
    assert found == pytest.approx([60.5, 114.05, 118.81])


@pytest.mark.parametrize(("steps", "known"), [(0, 0), (6, 1), (7, 2), (33, 2), (34, 3)])
def test_a_percentile_needs_steps_beyond_it(tmp_path: Path, steps: int, known: int) -> None:
    """Of three steady epochs; 20 steps for the 95th, 100 for the 99th."""
    row = one(tmp_path, Fake(step_times_s=lambda epoch, rank: [1.0] * (steps + 1)))
    found = [row[f"step_time_p{percent}_s"] for percent in (50, 95, 99)]
    assert found == [1.0] * known + [None] * (3 - known)


def test_the_slow_rank_is_the_one_that_computes_longest(tmp_path: Path) -> None:
    """Ranks 0 to 3 need 4, 4, 6, 4 s of the processor, rank 3 in epoch 4 even 8: 6 ÷ 4, 6 ÷ 4 and 8 ÷ 4."""

    def cpu_s(epoch: int, rank: int) -> float:
        return 8.0 if (epoch, rank) == (4, 3) else 6.0 if rank == 2 else 4.0

    row = one(
        tmp_path, Fake(epoch_time_s=lambda *_: 9.0, cpu_time_s=cpu_s, node=lambda rank: "ab"[rank // 2]), devices=4
    )
    assert row["rank_imbalance"] == pytest.approx(1.5)
    assert (row["slow_rank"], row["slow_rank_share"]) == (2, pytest.approx(2 / 3))
    assert row["node_imbalance"] == 1.0, "median ranks of the nodes, the faster of two: 4 and 4, 4 and 4, 4 and 6"


def test_of_two_ranks_and_of_two_nodes_the_median_one_is_the_faster(tmp_path: Path) -> None:
    """4 and 6 s; of nodes of one rank each likewise."""
    fake = Fake(cpu_time_s=lambda epoch, rank: 4.0 + 2.0 * rank, node=lambda rank: "ab"[rank])
    row = one(tmp_path, fake)
    assert (row["rank_imbalance"], row["node_imbalance"]) == (1.5, 1.5)
    assert (row["slow_rank"], row["slow_rank_share"]) == (1, 1.0)


def test_on_gpus_it_takes_the_phases(tmp_path: Path) -> None:
    def phases(rank: int, step: int) -> dict[str, float | None]:
        return {"data_wait": 0.0, "forward": 2.0 + rank, "communication": 1.0 - rank, "other": 0.0}

    on_gpus: dict[str, Any] = {"device_type": "cuda", "cpu_time_s": lambda epoch, rank: 5.0 + rank}
    row = one(tmp_path / "attributed", Fake(**on_gpus, phases=phases))
    assert (row["rank_imbalance"], row["slow_rank"], row["slow_rank_share"]) == (pytest.approx(3 / 2), 1, 1.0)
    assert row["node_imbalance"] is None, "one node"
    assert one(tmp_path / "not", Fake(**on_gpus))["rank_imbalance"] is None


def test_headroom_on_cpus_is_of_the_fullest_node(tmp_path: Path) -> None:
    fake = Fake(
        host_peak_rss_bytes=lambda epoch, rank: (100 + 100 * rank) * MIB,
        node=lambda rank: "ab"[rank // 2],
        memory_limit_bytes=1000 * MIB,
    )
    assert one(tmp_path, fake, devices=4)["memory_headroom"] == pytest.approx(1 - 700 / 1000)
    assert summary(load(tmp_path))["memory_limit_by"].item() == "node"


def test_headroom_on_gpus_is_of_the_fullest_device(tmp_path: Path) -> None:
    gpus: dict[str, Any] = {"device_type": "cuda", "memory_limit_bytes": 1000}
    each = Fake(**gpus, peak_allocated_bytes=lambda epoch, rank: 300 + 100 * epoch + rank)
    assert one(tmp_path / "each", each)["memory_headroom"] == pytest.approx(1 - 701 / 1000)
    whole = Fake(
        **gpus,
        processes=1,
        peak_allocated_bytes=lambda epoch, rank: 900,
        peak_allocated_bytes_by_device=lambda epoch, rank: "300,600",
    )
    assert one(tmp_path / "whole", whole)["memory_headroom"] == pytest.approx(1 - 600 / 1000)
    assert one(tmp_path / "unknown", Fake(device_type="cuda"))["memory_headroom"] is None


def test_retries_are_those_of_steady_epochs_on_all_ranks(tmp_path: Path) -> None:
    retries = Fake(device_type="cuda", allocator_retries=lambda epoch, rank: 10 if epoch == 1 else epoch * rank)
    assert one(tmp_path / "gpu", retries)["allocator_retries"] == 2 + 3 + 4
    assert one(tmp_path / "cpu", Fake())["allocator_retries"] is None


def test_a_training_costs_what_the_site_says(tmp_path: Path) -> None:
    """Two GPUs of 100 and 200 W for 3,600 s: 1.2 kWh in four epochs."""
    site = {"price_per_device_hour": 2.5, "grams_co2_per_kwh": 400.0}
    fake = Fake(
        device_type="cuda",
        gpu_power_w=lambda epoch, rank: 100.0 * (rank + 1),
        epoch_time_s=lambda *_: 3600.0,
        epoch_every_s=10_000.0,
    )
    row = one(tmp_path / "named", fake, site=site)
    assert row["device_hours"] == pytest.approx(8.0)
    assert row["cost"] == pytest.approx(20.0)
    assert row["co2_g"] == pytest.approx(4 * 0.3 * 400)
    bare = one(tmp_path / "not", fake)
    assert (bare["device_hours"], bare["cost"], bare["co2_g"]) == (pytest.approx(8.0), None, None)


def test_the_smaller_limit_of_a_node_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    limit = tmp_path / "sys/fs/cgroup/job/memory.max"
    for text, expected in (("500", (500, "cgroup")), ("5000", (1000, "node")), ("max", (1000, "node"))):
        limit.write_text(text)
        assert host_memory_limit(tmp_path, node_bytes=1000) == expected
