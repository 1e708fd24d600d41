"""How a speed-up is computed of two runs, and which one is not believed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from analysis.comparison.policy import COMPARED
from analysis.comparison.work import without
from parallelbench.measure.environment_match import FRAMEWORK

if TYPE_CHECKING:
    from analysis.comparison.compared_run import ComparedRun

ABOVE_IDEAL = 1.05
"""Times the number of devices: a speed-up whose whole interval lies above is not believed."""


def faster(one: ComparedRun, other: ComparedRun, *, time: str, rate: str) -> tuple[float | None, float | None]:
    """Numerator and denominator of a speed-up: by time, or per sample where epochs hold unequally many."""
    if one.epoch_samples is not None and one.epoch_samples == other.epoch_samples:
        return one.value(time), other.value(time)
    return other.value(rate), one.value(rate)


PER_EPOCH = partial(faster, time="steady_epoch_time_s", rate="throughput_samples_per_s")
WITH_STARTUP = partial(faster, time="total_time_s", rate="throughput_with_startup_samples_per_s")


class Scaling(NamedTuple):
    """Two runs of the same work, the second on more devices: how much faster that may make it."""

    fewer: int
    more: int
    """Devices of the one, and of the other."""
    ideal: float
    """Times as fast as the further devices explain."""
    most: float
    """Times as fast as nothing explains. One strategy may be slow on few devices, say for stages of unequal length, so
    that more devices help by more than their number; but it is rarely slower on them than one device is.
    """


def scaling(one: ComparedRun, other: ComparedRun) -> Scaling | None:
    """How much faster the second run may be for its devices; None unless it has more, and nothing else differs.

    Another framework may be faster by any factor, and so may another way to train on one device: the first run is on
    one device, or of the same strategy.
    """
    fewer, more = one.definition["devices"], other.definition["devices"]
    if one.environment.get(FRAMEWORK, "torch") != other.environment.get(FRAMEWORK, "torch"):
        return None
    if fewer >= more or without(one.definition, COMPARED) != without(other.definition, COMPARED):
        return None
    if one.is_baseline:
        return Scaling(fewer, more, ideal=more, most=ABOVE_IDEAL * more)
    if without(one.definition, ("devices", "nodes")) != without(other.definition, ("devices", "nodes")):
        return None
    servers = one.definition.get("strategy.servers", 0)
    return Scaling(fewer, more, ideal=(more - servers) / (fewer - servers), most=ABOVE_IDEAL * more)
