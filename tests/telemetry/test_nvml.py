"""GPUs through NVML's C interface: every column's value is the profile's; what can't be read is null and said once."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelbench.results.sensor_columns import Samples, columns
from tests.telemetry.playback import play

FOUR = "\n".join(
    f"""device GPU-{name}
energy {1000 * n} {1000 * n + 100 * n} {1000 * n + 300 * n} {1000 * n + 400 * n}
instant {n}000 {n}500
power 99000
utilization {n}0 {n}5
memory {n}000000
clock 1{n}00
temperature 4{n}
throttle {n}
processes {n} {n} {n + 1} {n + 1} {n}"""
    for n, name in enumerate("abcd", start=1)
)
"""Counters in mJ, powers in mW, clocks in MHz; the last value repeats. Each look at the processes takes two."""


@pytest.mark.slow
def test_every_column_of_four_gpus(tmp_path: Path) -> None:
    played = play(tmp_path, FOUR, samples=4, gpus=4)
    assert played.warnings == []
    for n, uuid in enumerate(("GPU-a", "GPU-b", "GPU-c", "GPU-d"), start=1):
        assert played.column(uuid, "energy_j") == pytest.approx([n, 1.1 * n, 1.3 * n, 1.4 * n])
        assert played.column(uuid, "power_w") == [n, n + 0.5, n + 0.5, n + 0.5]
        assert played.column(uuid, "utilization") == pytest.approx([0.1 * n, *[0.1 * n + 0.05] * 3])
        assert played.column(uuid, "memory_used_bytes") == [1_000_000 * n] * 4
        assert played.column(uuid, "clock_hz") == [(1000 + 100 * n) * 1e6] * 4
        assert played.column(uuid, "temperature_c") == [40 + n] * 4
        assert played.column(uuid, "throttle_reasons") == [n] * 4
        assert played.column(uuid, "processes") == [n, n + 1, n, n], "those of others are among them"
        assert played.column(uuid, "time") == [0.0, 0.1, 0.2, 0.3]
        assert played.column(uuid, "network_sent_bytes") == [None] * 4
    assert len(played.of(None)) == 4, "the host's own"


@pytest.mark.slow
def test_only_the_runs_own_gpus_are_asked(tmp_path: Path) -> None:
    first = play(tmp_path, FOUR, samples=1, gpus=2)
    assert {row["device_uuid"] for row in first.rows} == {"GPU-a", "GPU-b", None}
    by_index = play(tmp_path, FOUR, samples=1, gpus=2, CUDA_VISIBLE_DEVICES="3,1,0")
    assert {row["device_uuid"] for row in by_index.rows} == {"GPU-d", "GPU-b", None}
    by_uuid = play(tmp_path, FOUR, samples=1, gpus=1, CUDA_VISIBLE_DEVICES="GPU-c")
    assert {row["device_uuid"] for row in by_uuid.rows} == {"GPU-c", None}
    confined = play(tmp_path, f"device GPU-z denied\n{FOUR}", samples=1, gpus=1, CUDA_VISIBLE_DEVICES="0")
    assert {row["device_uuid"] for row in confined.rows} == {"GPU-a", None}, "CUDA does not count the first"


def test_a_gpu_that_falls_off_the_bus_leaves_nulls_and_one_warning(tmp_path: Path) -> None:
    lost = "device GPU-a\nenergy 1000 2000 !15 9000\ninstant 5000\nutilization 10\n"
    played = play(tmp_path, lost + FOUR.replace("GPU-a", "GPU-e"), samples=5, gpus=2)
    assert played.column("GPU-a", "energy_j") == [1.0, 2.0, None, None, None]
    assert played.column("GPU-a", "power_w") == [5.0, 5.0, None, None, None]
    assert played.column("GPU-e", "energy_j") == pytest.approx([1, 1.1, 1.3, 1.4, 1.4]), "the others are not disturbed"
    assert [w for w in played.warnings if "lost" in w[0]] == [("GPU is lost", "GPU-a")]


def test_a_passing_error_costs_one_sample(tmp_path: Path) -> None:
    played = play(tmp_path, FOUR.replace("energy 1000 1100", "energy 1000 !999"), samples=4)
    assert played.column("GPU-a", "energy_j") == [1.0, None, 1.3, 1.4]
    assert played.warnings == [("Unknown Error", "GPU-a")]


def test_without_permission_a_column_is_null_and_the_others_are_not(tmp_path: Path) -> None:
    played = play(tmp_path, FOUR.replace("energy 1000", "energy !4"), samples=2)
    assert played.column("GPU-a", "energy_j") == [None, None]
    assert played.column("GPU-a", "power_w") == [1.0, 1.5]
    assert played.warnings == [("no energy_j (Insufficient Permissions)", "GPU-a")]


@pytest.mark.slow
def test_an_old_driver_lacks_the_counter_and_has_one_power_only(tmp_path: Path) -> None:
    played = play(tmp_path, FOUR, samples=2, old_driver=True)
    assert played.column("GPU-a", "energy_j") == [None, None]
    assert played.column("GPU-a", "power_w") == [99.0, 99.0]
    assert played.column("GPU-a", "throttle_reasons") == [1, 1]
    assert played.warnings == [
        ("no energy_j (Function Not Found)", "GPU-a"),
        ("power is the driver's average, for lack of an instantaneous one", "GPU-a"),
    ]


@pytest.mark.parametrize(
    ("profile", "variables", "device"),
    [
        ("device GPU-a mig\nenergy 1000\n", {}, "GPU-a"),
        ("device GPU-a\nenergy 1000\n", {"CUDA_VISIBLE_DEVICES": "MIG-1"}, "MIG-1"),
        ("device GPU-a\nenergy 1000\nhandle !15\n", {}, "GPU-a"),
        ("device GPU-a\nenergy 1000\ncount !999\n", {}, "all GPUs"),
        (None, {}, "all GPUs"),
    ],
)
def test_what_nvml_can_not_measure_is_no_row_but_one_warning(
    tmp_path: Path, profile: str | None, variables: dict[str, str], device: str
) -> None:
    played = play(tmp_path, profile, samples=3, **variables)
    assert len(played.rows) == len(played.of(None)) == 3, "the host is still sampled"
    assert [about for _, about in played.warnings] == [device]


def test_an_epochs_energy_is_exactly_that_of_the_profile(tmp_path: Path) -> None:
    """From 0.05 s to 0.25 s, n J of GPU n begin at 1000 n mJ, and rise by 0.1 n, 0.2 n and 0.1 n J in 0.1 s each."""
    played = play(tmp_path, FOUR, samples=4, gpus=4)
    # Four ranks, of which two share a GPU and one drives two: each GPU counts once.
    uuids = ["GPU-a", "GPU-b", "GPU-b", "GPU-c,GPU-d"]
    ranks = [
        {"attempt": 1, "node": "here", "device_uuid": uuid, "training_started_at": 0.05, "training_ended_at": end}
        for uuid, end in zip(uuids, (0.2, 0.25, 0.25, 0.1), strict=True)
    ]
    found = columns(ranks, Samples(played.recordings))
    assert found["gpu_energy_j"] == pytest.approx((0.05 + 0.2 + 0.05) * (1 + 2 + 3 + 4))
    # Power rises by 0.5 W from the first sample to the second one, and stays: 0.25 / 2 × 0.05 s / 0.2 s are missing.
    assert found["gpu_power_mean_w"] == pytest.approx(1 + 2 + 3 + 4 + 4 * (0.5 - 0.125 * 0.25))
    assert found["gpu_power_max_w"] == 4.5
    assert found["gpu_utilization_mean"] == pytest.approx(0.25 + 0.05)
    assert found["gpu_memory_used_max_bytes"] == 4_000_000
    assert found["gpu_processes_max"] == 5, "GPU-d in its second sample"
    assert found["gpu_throttle_reasons"] == 1 | 2 | 3 | 4
    assert found["gpu_clock_mean_hz"] == pytest.approx((1100 + 1200 + 1300 + 1400) / 4 * 1e6)
    assert found["gpu_temperature_max_c"] == 44
    assert found["telemetry_flags"] == "short"


def test_slow_answers_do_not_shift_the_energys_time(tmp_path: Path) -> None:
    played = play(tmp_path, "device GPU-a\nenergy 1000 2000\ninstant ~30:5000\n", samples=2)
    assert played.column("GPU-a", "time") == [0.0, 0.1]
    assert played.column("GPU-a", "power_w") == [5.0, 5.0]
