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

from parallelbench.store.series import (
    Sample,
    Window,
    counted,
    enclosing,
    has_reset,
    inside,
    integrated,
    longest_gap_s,
)
from parallelbench.store.telemetry_table import GPU_AND_HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Row = dict[str, Any]

SHORT_S = 2.0
"""The counters are refreshed about ten times a second: the energy of shorter windows may be off by many percent."""
SPARSE_S = 1.0
"""Samples further apart than this say little about what was between them."""
NOTHING: Row = dict.fromkeys(column.name for column in GPU_AND_HOST)
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
        # Keep one sample where one side has none, so that the series does not look empty.
        first = min(first, max(0, len(self.times) - 1))
        return list(zip(self.times[first:last], self.values[first:last], strict=True))


class Samples:
    """All samples of a run by attempt and device; a host's device is its name."""

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
        """Samples by column, in a window and next to it; columns that could not be read are absent."""
        series_of = self._series.get((attempt, device), {})
        return {column: series.around(window) for column, series in series_of.items()}


_SAMPLED = {
    **dict.fromkeys(("energy_j", "power_w", "utilization", "clock_hz", "temperature_c"), "d"),
    **dict.fromkeys(
        ("memory_used_bytes", "throttle_reasons", "processes", "network_sent_bytes", "network_received_bytes"), "q"
    ),
}
"""Column → its array's type code."""
_SLOW = ("clock_hz",)
"""Columns that are sampled more rarely from hosts, by design."""


def columns(ranks: Sequence[Row], samples: Samples) -> Row:
    """The columns of one epoch, from its rows of `ranks`."""
    window = Window(min(row["training_started_at"] for row in ranks), max(row["training_ended_at"] for row in ranks))
    attempt = ranks[0]["attempt"]
    uuids = {uuid for row in ranks for uuid in (row["device_uuid"] or "").split(",") if uuid.startswith("GPU-")}
    gpus = [Device(samples.of(attempt, uuid, window), window) for uuid in sorted(uuids)]
    hosts = [Device(samples.of(attempt, node, window), window) for node in sorted({row["node"] for row in ranks})]
    flags = sorted(set().union(*(device.flags() for device in [*gpus, *hosts])))
    return _gpu_columns(gpus) | _host_columns(hosts) | {"telemetry_flags": " ".join(flags) or None}


@dataclass(frozen=True)
class Device:
    """Samples of a GPU or a host in one window."""

    samples: dict[str, list[Sample]]
    window: Window

    def energy_j(self) -> float | None:
        """By the energy counter; where there is none, by integrating the power."""
        return self.counted("energy_j") if self.samples.get("energy_j") else self._integrated_j()

    def counted(self, column: str) -> float | None:
        """How much a counter has grown."""
        return counted(self.samples.get(column, ()), self.window)

    def mean_power_w(self) -> float | None:
        """The integral of the sampled power over the window ÷ its length."""
        energy_j = self._integrated_j()
        return None if energy_j is None or not self.window.length_s else energy_j / self.window.length_s

    def values(self, column: str) -> list[float] | None:
        """Values sampled in the window; null where there are none, or where they don't cover the whole window."""
        samples = self.samples.get(column, ())
        return [value for _, value in inside(samples, self.window)] or None if enclosing(samples, self.window) else None

    def mean(self, column: str) -> float | None:
        """Mean of the values sampled in the window."""
        values = self.values(column)
        return None if values is None else statistics.fmean(values)

    def flags(self) -> set[str]:
        """Flags about the energy and about gaps in any series."""
        gaps_s = [longest_gap_s(samples, self.window) for name, samples in self.samples.items() if name not in _SLOW]
        sparse = {"sparse"} if max(gaps_s, default=0.0) > SPARSE_S else set()
        source = "energy_j" if self.samples.get("energy_j") else "power_w"
        series = self.samples.get(source, [])
        if not series:
            return sparse
        around = enclosing(series, self.window)
        true = {
            "short": self.window.length_s < SHORT_S,
            "reset": source == "energy_j" and has_reset(around),
            "incomplete": not around,
            "from_power": source == "power_w",
        }
        return sparse | {name for name, holds in true.items() if holds}

    def _integrated_j(self) -> float | None:
        return integrated(self.samples.get("power_w", ()), self.window)


def _gpu_columns(gpus: Sequence[Device]) -> Row:
    return {
        "gpu_energy_j": _together(gpus, Device.energy_j, sum),
        "gpu_power_mean_w": _together(gpus, Device.mean_power_w, sum),
        "gpu_power_max_w": _of_all(gpus, "power_w", max),
        "gpu_utilization_mean": _together(gpus, lambda gpu: gpu.mean("utilization"), statistics.fmean),
        "gpu_memory_used_max_bytes": _of_all(gpus, "memory_used_bytes", max),
        "gpu_processes_max": _of_all(gpus, "processes", max),
        "gpu_throttle_reasons": _of_all(gpus, "throttle_reasons", lambda values: reduce(operator.or_, values)),
        "gpu_clock_mean_hz": _together(gpus, lambda gpu: gpu.mean("clock_hz"), statistics.fmean),
        "gpu_temperature_max_c": _of_all(gpus, "temperature_c", max),
    }


def _host_columns(hosts: Sequence[Device]) -> Row:
    return {
        "cpu_energy_j": _together(hosts, lambda host: host.counted("energy_j"), sum),
        "cpu_clock_mean_hz": _together(hosts, lambda host: host.mean("clock_hz"), statistics.fmean),
        "host_memory_used_max_bytes": _of_all(hosts, "memory_used_bytes", max),
        "network_sent_bytes": _together(hosts, lambda host: _whole(host.counted("network_sent_bytes")), sum),
        "network_received_bytes": _together(hosts, lambda host: _whole(host.counted("network_received_bytes")), sum),
    }


def _whole(count: float | None) -> int | None:
    """Round a count, which was interpolated at the window's edges."""
    return None if count is None else round(count)


def _of_all(devices: Sequence[Device], column: str, how: Callable[[Iterable[Any]], Any]) -> Any:
    """One value from all devices' samples in the window."""
    return _together(
        devices, lambda device: device.values(column), lambda lists: how(v for some in lists for v in some)
    )


def _together(devices: Sequence[Device], of: Callable[[Device], Any], how: Callable[[list[Any]], Any]) -> Any:
    """One value for all devices; null where one of them lacks it."""
    values = [of(device) for device in devices]
    return None if not values or None in values else how(values)
