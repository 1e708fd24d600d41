"""The sampler's pace."""

from __future__ import annotations

from typing import Any

from parallelbench.telemetry.sampler import sample_until


class Clock:
    """Time that passes while sampling and waiting only."""

    def __init__(self, *, takes_s: list[float], samples: int) -> None:
        self.now, self._takes_s, self._samples = 0.0, takes_s, samples
        self.taken: list[float] = []

    def sample(self, *, last: bool = False) -> None:
        self.taken.append(round(self.now, 6))
        self.now += self._takes_s.pop(0) if self._takes_s else 0.0

    def stopped(self, timeout_s: float) -> bool:
        self.now += timeout_s
        return len(self.taken) >= self._samples


def taken(**options: Any) -> list[float]:
    clock = Clock(**options)
    sample_until(clock.stopped, clock, hz=10.0, clock=lambda: clock.now)  # type: ignore[arg-type]
    return clock.taken


def test_ten_samples_a_second_and_one_at_the_end() -> None:
    assert taken(takes_s=[], samples=3) == [0.0, 0.1, 0.2, 0.3]


def test_sampling_time_is_not_added_to_the_interval() -> None:
    assert taken(takes_s=[0.03, 0.05], samples=3) == [0.0, 0.1, 0.2, 0.3]


def test_samples_that_are_late_are_not_made_up_for() -> None:
    assert taken(takes_s=[0.35], samples=3) == [0.0, 0.35, 0.45, 0.55]
