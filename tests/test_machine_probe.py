"""The probe of a rank's own device: what it measures, and what of several ranks counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelbench.measure import machine_probe
from parallelbench.measure.machine_probe import Moment, probe
from parallelbench.world.world import World
from tests.helpers import Clock
from tests.scripted_cuda import WORLD, ScriptedCuda


class Three(World):
    """Rank 1 of three; `sum` adds what the two others have."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape == (3, 2):
            values += torch.tensor([[4e9, 5e9], [0.0, 0.0], [2e9, 7e9]], dtype=torch.float64)
        return values


@pytest.mark.parametrize("moment", ["start", "end"])
def test_the_slowest_of_all_ranks_counts(moment: Moment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "_measured", lambda *_: (3e9, 6e9))
    expected = {
        "start": {"probed_start_matmul_flop_per_s": 2e9, "probed_start_memory_bytes_per_s": 5e9},
        "end": {"probed_end_matmul_flop_per_s": 2e9, "probed_end_memory_bytes_per_s": 5e9},
    }
    assert probe(Three(rank=1, size=3, local_rank=1), moment) == expected[moment]


def test_the_slowest_of_a_ranks_own_devices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"cuda:0": (3e9, 6e9), "cuda:1": (2e9, 7e9), "cuda:2": (0.0, 0.0)}
    monkeypatch.setattr(machine_probe, "_measured", lambda _, device: speeds[str(device)])
    world = World(device_type="cuda", devices=tuple(map(torch.device, speeds)))
    found = probe(world, "start")
    assert found == {"probed_start_matmul_flop_per_s": 2e9, "probed_start_memory_bytes_per_s": 6e9}


@pytest.mark.exhaustive
def test_operations_and_bytes_are_counted_by_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix product takes 2 s, a copy 4 s."""
    clock = Clock()
    monkeypatch.setattr(machine_probe, "time", clock)
    monkeypatch.setattr(torch, "mm", clock.taking(2.0, torch.mm))
    monkeypatch.setattr(torch.Tensor, "copy_", clock.taking(4.0, torch.Tensor.copy_))
    found = probe(World(), "start")
    assert found["probed_start_matmul_flop_per_s"] == 2 * 256**3 / 2.0
    assert found["probed_start_memory_bytes_per_s"] == 2 * 2 * 2**20 / 4.0, "read once, written once"


@pytest.mark.exhaustive
def test_a_device_without_memory_left_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", full)
    assert set(probe(World(), "end").values()) == {None}


def test_of_a_gpu_neither_launches_nor_waits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes the device 40 µs and the host 25, who needs 10 to notice that the device is idle."""
    gpu, clock = ScriptedCuda(), Clock()
    gpu.install(monkeypatch)
    monkeypatch.setattr(machine_probe, "time", clock)

    def piece() -> None:
        gpu.now_s += 25e-6
        gpu.launch(40e-6)

    def synchronize(device: torch.device) -> None:
        gpu.synchronize(device)
        gpu.now_s += 10e-6
        clock.now_s = gpu.now_s

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    found = machine_probe.times_s([piece], WORLD)
    assert found == pytest.approx([40e-6] * len(found))
    assert 500 < len(found) < machine_probe.PIECE_S / 40e-6, "most of the time the device does what is measured"


def test_a_long_piece_is_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = ScriptedCuda(), Clock()
    gpu.install(monkeypatch)
    monkeypatch.setattr(machine_probe, "time", clock)

    def synchronize(device: torch.device) -> None:
        gpu.synchronize(device)
        clock.now_s = gpu.now_s

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    found = machine_probe.times_s([lambda: gpu.launch(0.25)], WORLD)
    assert found == pytest.approx([0.25])
