"""How a speed-up is computed of two runs, and which one is not believed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from analysis.comparison.policy import Differences
    from analysis.stats import Ratio

ABOVE_IDEAL = 1.05
"""Times the number of devices: a speed-up whose whole interval lies above is not believed."""


class Timed(Protocol):
    """A run, as far as its speed goes."""

    @property
    def epoch_samples(self) -> int | None:
        """Samples that it trains on in an epoch."""

    def value(self, metric: str) -> float | None:
        """A number of the run."""


def faster(one: Timed, other: Timed, *, time: str, rate: str) -> tuple[float | None, float | None]:
    """Numerator and denominator of a speed-up: by time, or per sample where epochs hold unequally many."""
    if one.epoch_samples is not None and one.epoch_samples == other.epoch_samples:
        return one.value(time), other.value(time)
    return other.value(rate), one.value(rate)


PER_EPOCH = partial(faster, time="steady_epoch_time_s", rate="throughput_samples_per_s")
WITH_STARTUP = partial(faster, time="total_time_s", rate="throughput_with_startup_samples_per_s")


def beyond_ideal(speed_up: Ratio | None, devices: int) -> Differences:
    """By how much so many devices are faster than one, and their number, where that is not believed; else empty."""
    least = None if speed_up is None else speed_up.low or speed_up.median
    return {"speed-up": (least, devices)} if least is not None and least > ABOVE_IDEAL * devices else {}
