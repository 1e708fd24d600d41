"""The probe of a rank's own device: what it measures, and what of several ranks counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from parallelbench.measure import machine_probe
from parallelbench.measure.machine_probe import probe
from parallelbench.world.world import World

if TYPE_CHECKING:
    from parallelbench.measure.machine_probe import Moment


class Three(World):
    """Rank 1 of three; `sum` adds what the two others have."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape == (3, 2):
            values += torch.tensor([[4e9, 5e9], [0.0, 0.0], [2e9, 7e9]], dtype=torch.float64)
        return values


@pytest.mark.parametrize("moment", ["start", "end"])
def test_the_slowest_of_all_ranks_counts(moment: Moment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "_measured", lambda _: (3e9, 6e9))
    expected = {
        "start": {"probed_start_matmul_flop_per_s": 2e9, "probed_start_memory_bytes_per_s": 5e9},
        "end": {"probed_end_matmul_flop_per_s": 2e9, "probed_end_memory_bytes_per_s": 5e9},
    }
    assert probe(Three(rank=1, size=3, local_rank=1), moment) == expected[moment]


class Clock:
    """Stands in for the module `time`: a matrix product takes 2 s, a copy 4 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.exhaustive
def test_operations_and_bytes_are_counted_by_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    multiply, copy = torch.mm, torch.Tensor.copy_

    def timed_multiply(*arguments: Any, **options: Any) -> torch.Tensor:
        clock.now += 2.0
        return multiply(*arguments, **options)

    def timed_copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        clock.now += 4.0
        return copy(target, source)

    monkeypatch.setattr(machine_probe, "time", clock)
    monkeypatch.setattr(torch, "mm", timed_multiply)
    monkeypatch.setattr(torch.Tensor, "copy_", timed_copy)
    found = probe(World(), "start")
    assert found["probed_start_matmul_flop_per_s"] == 2 * 256**3 / 2.0
    assert found["probed_start_memory_bytes_per_s"] == 2 * 2 * 2**20 / 4.0, "read once, written once"


@pytest.mark.exhaustive
def test_a_device_without_memory_left_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", full)
    assert set(probe(World(), "end").values()) == {None}
