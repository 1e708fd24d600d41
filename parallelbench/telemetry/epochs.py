"""Which energy and load belong to which epoch: columns of `epochs` from rows of `ranks` and `telemetry`.

An epoch's window lasts from the first rank's start of training to the last rank's end. Each GPU counts once, however
many ranks use it, and from start to end: a GPU that waits for the slowest rank needs energy for that epoch too.
"""

from __future__ import annotations

import operator
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from parallelbench.telemetry.series import (
    Sample,
    Window,
    counted,
    enclosing,
    has_reset,
    inside,
    integrated,
    longest_gap_s,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Row = dict[str, Any]

SHORT_S = 2.0
"""The counters are refreshed about ten times a second: the energy of shorter windows may be off by many percent."""
SPARSE_S = 1.0
"""Samples further apart than this say little about what was between them."""
COLUMNS = (
    "gpu_energy_j",
    "gpu_power_mean_w",
    "gpu_power_max_w",
    "gpu_utilization_mean",
    "gpu_memory_used_max_bytes",
    "gpu_throttle_reasons",
    "cpu_energy_j",
    "telemetry_flags",
)
NOTHING: Row = dict.fromkeys(COLUMNS)
"""The columns where nothing was sampled."""


@dataclass
class Series:
    """One sensor's samples in the order of time, 16 bytes each."""

    times: array[float]
    values: array[Any]

    def add(self, time: float, value: float) -> None:
        """Append a sample; rarely, where a clock was set back, it belongs further to the front."""
        place = len(self.times) if not self.times or self.times[-1] <= time else bisect_right(self.times, time)
        self.times.insert(place, time)
        self.values.insert(place, value)

    def around(self, window: Window) -> list[Sample]:
        """The samples in a window, and their neighbours, if any, on both sides."""
        first = max(0, bisect_right(self.times, window.start) - 1)
        last = bisect_left(self.times, window.end) + 1
        # Without a sample on one side, that the series is not empty must still show.
        first = min(first, max(0, len(self.times) - 1))
        return list(zip(self.times[first:last], self.values[first:last], strict=True))


class Samples:
    """All samples of a run, found by attempt and device; a host's device is its name."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._series: dict[tuple[int, str], dict[str, Series]] = defaultdict(dict)
        for row in rows:
            series = self._series[row["attempt"], row["device_uuid"] or row["node"]]
            for column, kind in _SAMPLED.items():
                value = row.get(column)
                if value is None:
                    continue
                if column not in series:
                    series[column] = Series(array("d"), array(kind))
                series[column].add(row["time"], value)

    def of(self, attempt: int, device: str, window: Window) -> dict[str, list[Sample]]:
        """Samples by column, of a window and its neighbours; of what could not be read there are none."""
        found = self._series.get((attempt, device), {})
        return {column: series.around(window) for column, series in found.items()}


_SAMPLED = {"energy_j": "d", "power_w": "d", "utilization": "d", "memory_used_bytes": "q", "throttle_reasons": "q"}
"""What epochs are told of: column → its array's type code."""


def columns(ranks: Sequence[Row], samples: Samples) -> Row:
    """The columns of one epoch, from its rows of `ranks`."""
    window = Window(min(row["training_started_at"] for row in ranks), max(row["training_ended_at"] for row in ranks))
    attempt = ranks[0]["attempt"]
    uuids = {uuid for row in ranks for uuid in (row["device_uuid"] or "").split(",") if uuid.startswith("GPU-")}
    gpus = [Device(samples.of(attempt, uuid, window), window) for uuid in sorted(uuids)]
    hosts = [Device(samples.of(attempt, node, window), window) for node in sorted({row["node"] for row in ranks})]
    found = _gpu_columns(gpus, window) | {"cpu_energy_j": _together(hosts, Device.counted_j, sum)}
    flags = sorted(set().union(*(device.flags() for device in [*gpus, *hosts])))
    return found | {"telemetry_flags": " ".join(flags) or None}


@dataclass(frozen=True)
class Device:
    """What a GPU's or a host's samples say of one window."""

    samples: dict[str, list[Sample]]
    window: Window

    def energy_j(self) -> float | None:
        """By the energy counter; where there is none, by integrating the power."""
        return self.counted_j() if self.samples.get("energy_j") else self._integrated_j()

    def counted_j(self) -> float | None:
        """By the energy counter."""
        return counted(self.samples.get("energy_j", ()), self.window)

    def mean_power_w(self) -> float | None:
        """The integral of the sampled power over the window ÷ its length."""
        energy_j = self._integrated_j()
        return None if energy_j is None or not self.window.length_s else energy_j / self.window.length_s

    def values(self, column: str) -> list[float] | None:
        """What was sampled in the window; null where nothing was."""
        return [value for _, value in inside(self.samples.get(column, ()), self.window)] or None

    def flags(self) -> set[str]:
        """What to know of the energy."""
        source = "energy_j" if self.samples.get("energy_j") else "power_w"
        series = self.samples.get(source, [])
        if not series:
            return set()
        around = enclosing(series, self.window)
        true = {
            "short": self.window.length_s < SHORT_S,
            "reset": source == "energy_j" and has_reset(around),
            "incomplete": not around,
            "sparse": longest_gap_s(series, self.window) > SPARSE_S,
            "from_power": source == "power_w",
        }
        return {name for name, holds in true.items() if holds}

    def _integrated_j(self) -> float | None:
        return integrated(self.samples.get("power_w", ()), self.window)


def _gpu_columns(gpus: Sequence[Device], window: Window) -> Row:
    def of(column: str, how: Callable[[Iterable[Any]], Any]) -> Any:
        """From all GPUs' values in the window."""
        return _together(gpus, lambda gpu: gpu.values(column), lambda values: how(v for some in values for v in some))

    return {
        "gpu_energy_j": _together(gpus, Device.energy_j, sum),
        "gpu_power_mean_w": _together(gpus, Device.mean_power_w, sum),
        "gpu_power_max_w": of("power_w", max),
        "gpu_utilization_mean": _together(gpus, _mean_utilization, statistics.fmean),
        "gpu_memory_used_max_bytes": of("memory_used_bytes", max),
        "gpu_throttle_reasons": of("throttle_reasons", lambda values: reduce(operator.or_, values)),
    }


def _mean_utilization(gpu: Device) -> float | None:
    values = gpu.values("utilization")
    return None if values is None else statistics.fmean(values)


def _together(devices: Sequence[Device], of: Callable[[Device], Any], how: Callable[[list[Any]], Any]) -> Any:
    """One value for all devices; null where one of them lacks it, since a part would pass for the whole."""
    values = [of(device) for device in devices]
    return None if not values or None in values else how(values)
