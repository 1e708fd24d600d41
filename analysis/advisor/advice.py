"""What the advisor answers with: one row per layout, what is impossible and why, and one sentence."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from analysis.advisor.suite_step import Phases

if TYPE_CHECKING:
    from collections.abc import Sequence

Objective = Literal["time", "energy", "gpu_hours", "memory"]
"""What the best layout has least of: time per epoch, energy, devices × hours, or memory per device."""


class Fit(StrEnum):
    """Whether a layout fits into a device's memory."""

    FITS = "fits"
    UNKNOWN = "not known"
    TOO_CLOSE = "too close to call"
    TOO_LARGE = "does not fit"


MEMORY_MARGIN = 0.15
"""How far predicted peaks may be off, an assumption that holds torchtitan's six figures; within it nobody can say."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout on so many devices, predicted, or measured where there was a measurement."""

    strategy: str
    options: tuple[str, ...]
    """Overrides that make it: `strategy.tensor=2`."""
    devices: int
    nodes: int
    phases: Phases
    low_s: float
    high_s: float
    """Ends of the 90 % interval of a step."""
    samples_per_step: int
    steps_per_epoch: int | None
    """None: the size of the data is not known."""
    memory_bytes: float | None
    """Predicted peak of the fullest device."""
    capacity_bytes: float | None
    """Memory of a device, less what libraries take."""
    mfu: float | None
    """Model FLOPs ÷ what the devices can do by the data sheet; None: no peak is known."""
    power_w: float | None
    """Of one device while it trains; None: never measured."""
    measured: bool
    """Whether the step was measured instead of predicted."""
    extrapolates: tuple[str, ...]
    """In which respects nothing measured is like it."""
    trains_alike: bool = True
    """Whether it computes the same as one device; others are never advised."""

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.phases.step_s

    @property
    def epoch_s(self) -> float | None:
        """Time of an epoch."""
        return None if self.steps_per_epoch is None else self.step_s * self.steps_per_epoch

    @property
    def samples_per_s(self) -> float:
        """Throughput of all devices."""
        return self.samples_per_step / self.step_s

    @property
    def device_s(self) -> float:
        """Devices × seconds per sample."""
        return self.devices / self.samples_per_s

    @property
    def energy_j(self) -> float | None:
        """Per sample."""
        return None if self.power_w is None else self.power_w * self.device_s

    @property
    def fit(self) -> Fit:
        """Whether it fits into memory."""
        if self.memory_bytes is None or self.capacity_bytes is None:
            return Fit.UNKNOWN
        share = self.memory_bytes / self.capacity_bytes
        if abs(share - 1.0) <= MEMORY_MARGIN:
            return Fit.TOO_CLOSE
        return Fit.FITS if share < 1.0 else Fit.TOO_LARGE

    def cost(self, objective: Objective) -> float:
        """What an objective minimises, per sample; a number that isn't known is infinite."""
        found = {
            "time": 1.0 / self.samples_per_s,
            "gpu_hours": self.device_s,
            "energy": self.energy_j,
            "memory": self.memory_bytes,
        }[objective]
        return float("inf") if found is None else found

    def as_dict(self) -> dict[str, Any]:
        """For programs: seconds, bytes, joules, shares; null where not known."""
        per_epoch = None if self.steps_per_epoch is None else self.steps_per_epoch * self.samples_per_step
        stretch = None if self.steps_per_epoch is None else float(self.steps_per_epoch)
        hours = None if per_epoch is None else self.device_s * per_epoch / 3600.0
        energy_j = None if per_epoch is None or self.energy_j is None else self.energy_j * per_epoch
        slower, faster = self.high_s / self.step_s, self.low_s / self.step_s
        return {
            "strategy": self.strategy,
            "options": list(self.options),
            "devices": self.devices,
            "nodes": self.nodes,
            "step_s": self.step_s,
            "step_low_s": self.low_s,
            "step_high_s": self.high_s,
            "epoch_s": self.epoch_s,
            "epoch_low_s": None if stretch is None else stretch * self.low_s,
            "epoch_high_s": None if stretch is None else stretch * self.high_s,
            **_with_ends("samples_per_s", self.samples_per_s, 1.0 / slower, 1.0 / faster),
            **_with_ends("mfu", self.mfu, 1.0 / slower, 1.0 / faster),
            "memory_bytes": self.memory_bytes,
            "memory_low_bytes": None if self.memory_bytes is None else (1.0 - MEMORY_MARGIN) * self.memory_bytes,
            "memory_high_bytes": None if self.memory_bytes is None else (1.0 + MEMORY_MARGIN) * self.memory_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fit,
            **_with_ends("device_hours_per_epoch", hours, faster, slower),
            **_with_ends("energy_per_epoch_j", energy_j, faster, slower),
            "phases": {each.name: getattr(self.phases, each.name) for each in fields(Phases)},
            "measured": self.measured,
            "extrapolates": list(self.extrapolates),
            "trains_alike": self.trains_alike,
        }


def _with_ends(name: str, value: float | None, low: float, high: float) -> dict[str, float | None]:
    """A figure that follows from the step's time, with the ends of its interval, which are factors of it."""
    ends = (None, None) if value is None else (low * value, high * value)
    return {name: value, f"{name}_low": ends[0], f"{name}_high": ends[1]}


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A layout that can't be, and why."""

    strategy: str
    options: tuple[str, ...]
    devices: int
    why: str

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def ranked(rows: Sequence[Row], objective: Objective) -> list[Row]:
    """Best first; what fits goes before what may, what may before what doesn't; who trains otherwise stands last."""
    behind = {Fit.FITS: 0, Fit.TOO_CLOSE: 1, Fit.UNKNOWN: 2, Fit.TOO_LARGE: 3}
    return sorted(rows, key=lambda row: (not row.trains_alike, behind[row.fit], row.cost(objective)))
