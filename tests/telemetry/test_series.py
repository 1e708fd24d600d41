"""Windows over samples, by hand: counters, their resets, integrals, and what lacks a sample."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelbench.results.sensor_columns import NOTHING, Samples, Series, Window, columns
from tests.telemetry.playback import recorded


def series(*samples: tuple[float, float]) -> Series:
    return Series(*np.array(samples).reshape(-1, 2).T)


RAMP = series((0.0, 10.0), (1.0, 20.0), (2.0, 40.0), (3.0, 40.0))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.0, 3.0, 30.0),
        (0.5, 1.5, 15.0),
        (1.0, 2.0, 20.0),
        (0.25, 0.75, 5.0),
        (2.0, 3.0, 0.0),
        (-0.1, 1.0, None),
        (1.0, 3.1, None),
    ],
)
def test_a_counters_growth_in_a_window(start: float, end: float, expected: float | None) -> None:
    assert RAMP.counted(Window(start, end)) == expected


def test_a_reset_spoils_the_windows_that_it_touches_and_no_others() -> None:
    samples = series((0.0, 100.0), (1.0, 110.0), (2.0, 3.0), (3.0, 13.0))
    assert samples.counted(Window(0.2, 0.9)) == pytest.approx(7.0)
    assert samples.counted(Window(0.5, 1.5)) is None
    assert samples.counted(Window(0.5, 2.5)) is None
    assert samples.counted(Window(2.0, 3.0)) == 10.0


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(0.0, 1.0, 15.0), (0.5, 1.5, 17.5 / 2 + 25 / 2), (0.0, 3.0, 85.0), (2.5, 3.5, None)]
)
def test_an_integrated_rate(start: float, end: float, expected: float | None) -> None:
    assert RAMP.integrated(Window(start, end)) == expected


@given(
    st.lists(st.integers(0, 1000), min_size=3, max_size=30, unique=True),
    st.lists(st.integers(0, 100), min_size=30, max_size=30),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_windows_side_by_side_add_up(moments: list[int], steps: list[int], cuts: list[float]) -> None:
    times = sorted(map(float, moments))
    samples = series(*((moment, float(sum(steps[: i + 1]))) for i, moment in enumerate(times)))
    a, b, c = sorted(times[0] + cut * (times[-1] - times[0]) for cut in cuts)
    for measure in (Series.counted, Series.integrated):
        parts = [measure(samples, Window(a, b)), measure(samples, Window(b, c))]
        whole = measure(samples, Window(a, c))
        assert whole is not None
        assert None not in parts
        assert sum(parts) == pytest.approx(whole, abs=1e-6)  # type: ignore[arg-type]


def test_nothing_is_made_of_nothing() -> None:
    assert series().counted(Window(0, 1)) is None
    assert series().integrated(Window(0, 1)) is None
    assert series().longest_gap_s(Window(0, 1)) == 0


def row(time: float, device: str | None = "GPU-a", **values: float) -> dict[str, object]:
    return {"run_id": "run", "attempt": 1, "node": "here", "device_uuid": device, "time": time, **values}


def samples_of(folder: Path, rows: list[dict[str, object]]) -> Samples:
    return Samples(recorded(folder / f"{uuid.uuid4()}.bin", rows))


def rank(start: float, end: float, *, uuid: str = "GPU-a", attempt: int = 1) -> dict[str, object]:
    edges = {"training_started_at": start, "training_ended_at": end}
    return {"attempt": attempt, "node": "here", "device_uuid": uuid, **edges}


def test_without_a_counter_the_power_is_integrated_and_that_is_said(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [row(float(t), power_w=100.0 + 10 * t) for t in range(6)])
    found = columns([rank(1, 4)], samples)
    assert found["gpu_energy_j"] == pytest.approx(3 * 125)
    assert found["gpu_power_mean_w"] == pytest.approx(125)
    assert found["telemetry_flags"] == "from_power"


def test_a_reset_is_null_even_where_there_is_power(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [row(float(t), power_w=100.0, energy_j=e) for t, e in enumerate((10, 20, 30, 4, 5))])
    found = columns([rank(1, 3.5)], samples)
    assert found["gpu_energy_j"] is None
    assert found["gpu_power_mean_w"] == pytest.approx(100)
    assert found["telemetry_flags"] == "reset"


def test_one_gpu_that_is_lost_makes_the_sum_null(tmp_path: Path) -> None:
    both = [row(float(t), uuid, energy_j=float(t)) for t in range(6) for uuid in ("GPU-a", "GPU-b")]
    samples = samples_of(tmp_path, [r for r in both if r["device_uuid"] == "GPU-a" or r["time"] < 3])  # type: ignore[operator]
    ranks = [rank(1, 4), rank(1, 4, uuid="GPU-b")]
    assert columns(ranks[:1], samples)["gpu_energy_j"] == 3.0
    found = columns(ranks, samples)
    assert found["gpu_energy_j"] is None
    assert found["telemetry_flags"] == "incomplete"


def test_what_was_sampled_for_a_part_of_the_window_is_null(tmp_path: Path) -> None:
    rows = [row(float(t), energy_j=float(t), utilization=1.0, clock_hz=1e9, temperature_c=50.0) for t in range(3)]
    rows += [row(float(t), energy_j=float(t), clock_hz=2e9) for t in range(3, 60)]
    found = columns([rank(0.5, 58.5)], samples_of(tmp_path, rows))
    assert found["gpu_energy_j"] == pytest.approx(58)
    assert found["gpu_clock_mean_hz"] == pytest.approx((2 * 1e9 + 56 * 2e9) / 58)
    assert (found["gpu_utilization_mean"], found["gpu_temperature_max_c"]) == (None, None)
    died = columns([rank(0.5, 100.0)], samples_of(tmp_path, rows))
    assert set(died.values()) == {None, "incomplete"}


def test_each_nodes_samples_are_cut_by_its_own_clock(tmp_path: Path) -> None:
    """The other node's clock is a hundred seconds ahead; its ranks are done a second before the first one's."""
    here = [row(float(t), energy_j=10.0 * t, power_w=10.0) for t in range(10)]
    there = [row(100.0 + t, "GPU-b", energy_j=20.0 * t, power_w=20.0) | {"node": "there"} for t in range(10)]
    found = columns([rank(2, 6), rank(102, 105, uuid="GPU-b") | {"node": "there"}], samples_of(tmp_path, here + there))
    assert found["gpu_energy_j"] == pytest.approx(4 * (10 + 20))
    assert found["gpu_power_mean_w"] == pytest.approx(10 + 20)
    assert found["telemetry_flags"] is None


def test_gaps_in_anything_are_flagged(tmp_path: Path) -> None:
    rows = [row(float(t), energy_j=float(t)) for t in range(7)] + [row(t, utilization=1.0) for t in (0.0, 3.0, 6.0)]
    assert columns([rank(1, 5)], samples_of(tmp_path, rows))["telemetry_flags"] == "sparse"
    no_energy = [row(t, None, memory_used_bytes=1) for t in (0.0, 9.0, 20.0)]
    assert columns([rank(2, 15, uuid="cores 0")], samples_of(tmp_path, no_energy))["telemetry_flags"] == "sparse"


def test_short_windows_and_wide_gaps_are_flagged(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [row(t, energy_j=t) for t in (0.0, 1.0, 2.5, 5.0)])
    assert columns([rank(0.2, 0.9)], samples)["telemetry_flags"] == "short"
    assert columns([rank(0.0, 2.0)], samples)["telemetry_flags"] == "sparse"
    assert columns([rank(2.6, 4.0)], samples)["telemetry_flags"] == "short sparse"


def test_the_hosts_counter_is_the_processors_energy(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [row(float(t), None, energy_j=50.0 * t) for t in range(6)])
    found = columns([rank(1, 4, uuid="cores 0,1")], samples)
    assert found == NOTHING | {"cpu_energy_j": 150.0, "suspended_s": 0.0}


def test_samples_of_another_attempt_do_not_count(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [row(float(t), energy_j=float(t)) for t in range(6)])
    assert columns([rank(1, 4, attempt=2)], samples) == NOTHING
