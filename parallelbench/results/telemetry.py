"""From samples of sensors to columns of epochs: journals read in batches, and what falls into a window."""

from __future__ import annotations

import operator
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import msgspec

from parallelbench.results.files import open_regular
from parallelbench.results.tables import GPU_AND_HOST, TABLES, WARNING, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa


Row = dict[str, Any]

BATCH_ROWS = 65_536
"""Rows held as Python objects at once: about 80 MB."""
_KINDS: dict[str, Any] = {
    "string": str,
    "int32": Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)],
    "int64": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "float64": float,
}
_Row: Any = TypedDict(  # type: ignore[misc]
    "_Row",
    {
        column.name: _KINDS[column.type] | None if column.nullable else _KINDS[column.type]
        for column in TABLES["telemetry"]
    },
)


class _Line(TypedDict):
    table: Literal["telemetry"]
    row: _Row


class _Event(TypedDict):
    event: str


_LINE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Line)
_EVENT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Event)


class Journals:
    """The samplers' journals up to their present size; later lines are not read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = [(path, path.stat().st_size) for path in sorted(paths)]

    def rows(self, events: list[Row] | None = None) -> Iterator[Row]:
        """Rows of `telemetry`, one at a time, in the order of the files; events are appended to `events`."""
        for path, size_bytes in self._files:
            for entry in _entries(path, size_bytes):
                if "event" not in entry:
                    yield entry["row"]
                elif events is not None:
                    events.append(entry)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as Arrow, `BATCH_ROWS` at a time."""
        rows: list[Row] = []
        for row in self.rows():
            rows.append(row)
            if len(rows) == BATCH_ROWS:
                yield _batch(rows)
                rows = []
        if rows:
            yield _batch(rows)


def _entries(path: Path, size_bytes: int) -> Iterator[Row]:
    """Whole lines, up to the first that no sampler writes; that becomes a warning."""
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            size_bytes -= len(line)
            if size_bytes < 0 or not line.endswith(b"\n"):
                return  # torn, or written since
            try:
                if line.startswith(b'{"event":'):
                    _EVENT.decode(line)
                    yield msgspec.json.decode(line)
                else:
                    yield _LINE.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                reason = f"its journal is damaged from line {number} on"
                yield {"event": WARNING, "reason": reason, "device": path.name}
                return


def _batch(rows: list[Row]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = schema("telemetry")
    arrays = [pa.array([row[field.name] for row in rows], type=field.type) for field in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


Sample = tuple[float, float]
"""Unix time in s, and a value."""


@dataclass(frozen=True)
class Window:
    """A stretch of time, Unix times in s."""

    start: float
    end: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end - self.start


def inside(samples: Sequence[Sample], window: Window) -> Sequence[Sample]:
    """The samples that were taken in the window."""
    return samples[bisect_left(samples, window.start, key=_time) : bisect_right(samples, window.end, key=_time)]


def enclosing(samples: Sequence[Sample], window: Window) -> Sequence[Sample]:
    """The samples in the window and the nearest one on each side; empty where one of those two is missing."""
    first = bisect_right(samples, window.start, key=_time) - 1
    last = bisect_left(samples, window.end, key=_time)
    return samples[first : last + 1] if first >= 0 and last < len(samples) else ()


def has_reset(samples: Sequence[Sample]) -> bool:
    """Whether a growing counter began anew, as the driver's does when it is reloaded."""
    return any(later[1] < earlier[1] for earlier, later in pairwise(samples))


def counted(samples: Sequence[Sample], window: Window) -> float | None:
    """How much a counter has grown in a window: E(end) − E(start).

    E is the counter on the straight line between the two samples around each edge. NVML's counts "since the driver was
    last reloaded" (nvmlDeviceGetTotalEnergyConsumption). Null where no sample lies on both sides of the window, or the
    counter was reset between them.
    """
    around = enclosing(samples, window)
    if not around or has_reset(around):
        return None
    return _at(around, window.end) - _at(around, window.start)


def integrated(samples: Sequence[Sample], window: Window) -> float | None:
    """The integral of a rate over a window, by the trapezoid rule ∑ (tᵢ₊₁ − tᵢ)(pᵢ + pᵢ₊₁)/2.

    The rate at the edges is interpolated. Null where no sample lies on both sides of the window.
    """
    around = enclosing(samples, window)
    if not around:
        return None
    edges = [(window.start, _at(around, window.start)), (window.end, _at(around, window.end))]
    within = [sample for sample in around if window.start < sample[0] < window.end]
    points = [edges[0], *within, edges[1]]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))


def longest_gap_s(samples: Sequence[Sample], window: Window) -> float:
    """The longest time between two samples in or around a window."""
    return max((b[0] - a[0] for a, b in pairwise(enclosing(samples, window))), default=0.0)


def _at(samples: Sequence[Sample], moment: float) -> float:
    """The value at a moment that the samples enclose, on the straight line between its neighbours."""
    right = bisect_left(samples, moment, key=_time)
    after = samples[right]
    if after[0] == moment or right == 0:
        return after[1]
    before = samples[right - 1]
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])


def _time(sample: Sample) -> float:
    return sample[0]


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
