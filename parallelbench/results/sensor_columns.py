"""From samples of sensors to columns of epochs: recordings decoded in bulk, and what falls into a window."""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelbench.results.journal import Row, Tables, read_entries
from parallelbench.results.recording import COLUMNS, FIELDS, MARK, journal_of
from parallelbench.results.tables import GPU_AND_HOST, SUSPENDED, WARNING, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray


BATCH_ROWS = 65_536
"""Records that are decoded at a time: 20 MB."""
RECORD = np.dtype([("start", "<u8"), *((c.name, FIELDS[c.type].dtype) for c in COLUMNS), ("end", "<u8")])


class Recordings:
    """The samplers' recordings up to their present size; later records are not read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = [(path, path.stat().st_size // RECORD.itemsize) for path in sorted(paths)]

    def records(self) -> Iterator[NDArray[Any]]:
        """Rows of `telemetry` as arrays of `RECORD`, at most `BATCH_ROWS` at a time, in the order of the files."""
        for path, count in self._files:
            yield from _records(path, count)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The same as Arrow."""
        return map(_batch, self.records())

    def events(self) -> Iterator[Row]:
        """What the samplers say of their samples, and which recordings are damaged."""
        for path, count in self._files:
            yield from (entry for entry in read_entries(journal_of(path)) if "event" in entry)
            whole = sum(map(len, _records(path, count)))
            if whole < count:
                reason = f"its recording is damaged from record {whole + 1} on"
                yield {"event": WARNING, "reason": reason, "device": path.name}


def _records(path: Path, count: int) -> Iterator[NDArray[Any]]:
    """The first `count` records, up to the first that no sampler writes."""
    with path.open("rb") as file:
        for first in range(0, count, BATCH_ROWS):
            content = file.read(min(BATCH_ROWS, count - first) * RECORD.itemsize)
            records = np.frombuffer(content, RECORD, len(content) // RECORD.itemsize)
            (foreign,) = np.nonzero((records["start"] != MARK) | (records["end"] != MARK))
            yield records[: foreign[0]] if foreign.size else records
            if foreign.size:
                return


def _nulls(values: NDArray[Any], kind: str) -> NDArray[Any]:
    nulls: NDArray[Any] = np.isnan(values) if kind == "float64" else values == FIELDS[kind].null
    return nulls


def _batch(records: NDArray[Any]) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [pa.array(records[c.name], mask=_nulls(records[c.name], c.type)) for c in COLUMNS]
    columns = schema("telemetry")
    return pa.RecordBatch.from_arrays([a.cast(f.type) for a, f in zip(arrays, columns, strict=True)], schema=columns)


def read_telemetry(attempt_dir: Path, ranks: Iterable[Row]) -> Recordings:
    """The samples of an attempt and of those whose epochs it took over; `ranks`: its rows of that table."""
    attempts = {str(row["attempt"]) for row in ranks} | {attempt_dir.name}
    folders = [attempt_dir.with_name(attempt) for attempt in attempts]
    return Recordings(path for folder in folders for path in folder.glob("telemetry-node*.bin"))


def add_telemetry(tables: Tables, events: list[Row], recordings: Recordings) -> None:
    """Add what was sampled in them to the rows of `epochs`, and the samplers' events."""
    of_samplers = list(recordings.events())
    events += of_samplers
    samples = Samples(recordings, of_samplers)
    ranks: dict[int, list[Row]] = defaultdict(list)
    for row in tables["ranks"]:
        ranks[row["epoch"]].append(row)
    for row in tables["epochs"]:
        row |= columns(ranks[row["epoch"]], samples)


@dataclass(frozen=True)
class Window:
    """A stretch of time, Unix times in s."""

    start: float
    end: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end - self.start


@dataclass(frozen=True)
class Series:
    """One sensor's samples in the order of time: Unix times in s, and values."""

    times: NDArray[np.float64]
    values: NDArray[Any]

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, part: slice) -> Series:
        return Series(self.times[part], self.values[part])

    def inside(self, window: Window) -> Series:
        """The samples that were taken in the window."""
        return self[self.times.searchsorted(window.start) : self.times.searchsorted(window.end, "right")]

    def enclosing(self, window: Window) -> Series:
        """The samples in the window and the nearest one on each side; empty where one of those two is missing."""
        first = self.times.searchsorted(window.start, "right") - 1
        last = self.times.searchsorted(window.end)
        return self[first : last + 1] if first >= 0 and last < len(self) else self[:0]

    def has_reset(self) -> bool:
        """Whether a growing counter began anew, as the driver's does when it is reloaded."""
        return bool((np.diff(self.values) < 0).any())

    def counted(self, window: Window) -> float | None:
        """How much a counter has grown in a window: E(end) − E(start).

        E is the counter on the straight line between the two samples around each edge. NVML's counts "since the driver
        was last reloaded" (nvmlDeviceGetTotalEnergyConsumption). Null where no sample lies on both sides of the window,
        or the counter was reset between them.
        """
        around = self.enclosing(window)
        if not around or around.has_reset():
            return None
        start, end = np.interp([window.start, window.end], around.times, around.values)
        return float(end - start)

    def integrated(self, window: Window) -> float | None:
        """The integral of a rate over a window, by the trapezoid rule ∑ (tᵢ₊₁ − tᵢ)(pᵢ + pᵢ₊₁)/2.

        The rate at the edges is interpolated. Null where no sample lies on both sides of the window.
        """
        around = self.enclosing(window)
        if not around:
            return None
        times = np.concatenate([[window.start], around.times[1:-1], [window.end]])
        rates = np.interp(times, around.times, around.values)
        return float(sum((np.diff(times) * (rates[:-1] + rates[1:]) / 2).tolist()))

    def longest_gap_s(self, window: Window) -> float:
        """The longest time between two samples in or around a window."""
        return float(np.diff(self.enclosing(window).times).max(initial=0.0))


_EMPTY = Series(np.empty(0), np.empty(0))
SHORT_S = 2.0
"""The counters are refreshed about ten times a second: the energy of shorter windows may be off by many percent."""
SPARSE_S = 1.0
"""Samples further apart than this say little about what was between them."""
NOTHING: Row = dict.fromkeys(column.name for column in GPU_AND_HOST)
"""The columns where nothing was sampled."""


class Samples:
    """All samples of a run by attempt and device; a host's device is its name."""

    def __init__(self, recordings: Recordings, events: Iterable[Row] = ()) -> None:
        """`events`: of the samplers."""
        self._suspended: dict[tuple[int, str], list[Window]] = defaultdict(list)
        for event in events:
            if event["event"] == SUSPENDED:
                stretch = Window(event["started_at"], event["ended_at"])
                self._suspended[event["attempt"], event["node"]].append(stretch)
        parts: dict[tuple[int, str], dict[str, list[Series]]] = defaultdict(lambda: defaultdict(list))
        for records in recordings.records():
            devices = np.where(records["device_uuid"] == b"", records["node"], records["device_uuid"])
            for attempt, device in {*zip(records["attempt"].tolist(), devices.tolist(), strict=True)}:
                own = records[(records["attempt"] == attempt) & (devices == device)]
                for column in _SAMPLED:
                    known = ~_nulls(own[column.name], column.type)
                    if known.any():
                        part = Series(own["time"][known], own[column.name][known])
                        parts[attempt, device.decode()][column.name].append(part)
        self._series = {key: {name: _joined(some) for name, some in of.items()} for key, of in parts.items()}

    def of(self, attempt: int, device: str) -> dict[str, Series]:
        """Samples by column; columns that could not be read are absent."""
        return self._series.get((attempt, device), {})

    def suspended_s(self, attempt: int, node: str, window: Window) -> float | None:
        """How long processes of a node stood still in a window; null where nobody watched them all the time."""
        if not any(series.enclosing(window) for series in self.of(attempt, node).values()):
            return None
        length_s, until = 0.0, window.start
        for stretch in sorted(self._suspended.get((attempt, node), ()), key=lambda each: each.start):
            length_s += max(0.0, min(stretch.end, window.end) - max(stretch.start, until))
            until = max(until, stretch.end)
        return length_s


def _joined(parts: list[Series]) -> Series:
    times = np.concatenate([part.times for part in parts])
    order = times.argsort(kind="stable")  # rarely, where a clock was set back, a sample belongs further to the front
    return Series(times[order], np.concatenate([part.values for part in parts])[order])


_SAMPLED = [column for column in COLUMNS if column.nullable and column.name != "device_uuid"]
_SLOW = ("clock_hz",)
"""Columns that are sampled more rarely from hosts, by design."""


def columns(ranks: Sequence[Row], samples: Samples) -> Row:
    """The columns of one epoch, from its rows of `ranks`."""
    attempt, windows = ranks[0]["attempt"], _windows(ranks)
    nodes = {uuid: row["node"] for row in ranks for uuid in (row["device_uuid"] or "").split(",")}
    uuids = sorted(uuid for uuid in nodes if uuid.startswith("GPU-"))
    gpus = [Device(samples.of(attempt, uuid), windows[nodes[uuid]]) for uuid in uuids]
    hosts = [Device(samples.of(attempt, node), window) for node, window in sorted(windows.items())]
    flags = sorted(set().union(*(device.flags() for device in [*gpus, *hosts])))
    suspended_s = [samples.suspended_s(attempt, node, window) for node, window in windows.items()]
    of_all = {
        "suspended_s": None if None in suspended_s else max(filter(None, suspended_s), default=0.0),
        "telemetry_flags": " ".join(flags) or None,
    }
    return _gpu_columns(gpus) | _host_columns(hosts) | of_all


def _windows(ranks: Sequence[Row]) -> dict[str, Window]:
    """Node → when the epoch was there, by the node's own clock: all begin it together, and it ends with the last."""
    of_nodes: dict[str, list[Row]] = defaultdict(list)
    for row in ranks:
        of_nodes[row["node"]].append(row)
    began = {node: min(row["training_started_at"] for row in rows) for node, rows in of_nodes.items()}
    length_s = max(row["training_ended_at"] - began[row["node"]] for row in ranks)
    return {node: Window(start, start + length_s) for node, start in began.items()}


@dataclass(frozen=True)
class Device:
    """Samples of a GPU or a host in one window."""

    samples: dict[str, Series]
    window: Window

    def energy_j(self) -> float | None:
        """By the energy counter; where there is none, by integrating the power."""
        return self.counted("energy_j") if "energy_j" in self.samples else self._integrated_j()

    def counted(self, column: str) -> float | None:
        """How much a counter has grown."""
        return self.samples.get(column, _EMPTY).counted(self.window)

    def mean_power_w(self) -> float | None:
        """The integral of the sampled power over the window ÷ its length."""
        energy_j = self._integrated_j()
        return None if energy_j is None or not self.window.length_s else energy_j / self.window.length_s

    def values(self, column: str) -> list[float] | None:
        """Values sampled in the window; null where there are none, or where they don't cover the whole window."""
        samples = self.samples.get(column, _EMPTY)
        return samples.inside(self.window).values.tolist() or None if samples.enclosing(self.window) else None

    def mean(self, column: str) -> float | None:
        """Mean of the values sampled in the window."""
        values = self.values(column)
        return None if values is None else statistics.fmean(values)

    def flags(self) -> set[str]:
        """Flags about the energy and about gaps in any series."""
        gaps_s = [samples.longest_gap_s(self.window) for name, samples in self.samples.items() if name not in _SLOW]
        sparse = {"sparse"} if max(gaps_s, default=0.0) > SPARSE_S else set()
        source = "energy_j" if "energy_j" in self.samples else "power_w"
        if source not in self.samples:
            return sparse
        around = self.samples[source].enclosing(self.window)
        true = {
            "short": self.window.length_s < SHORT_S,
            "reset": source == "energy_j" and around.has_reset(),
            "incomplete": not around,
            "from_power": source == "power_w",
        }
        return sparse | {name for name, holds in true.items() if holds}

    def _integrated_j(self) -> float | None:
        return self.samples.get("power_w", _EMPTY).integrated(self.window)


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
