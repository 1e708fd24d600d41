"""A host's energy, memory, network traffic and clock, of /sys and psutil. What can't be read is null."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from parallelbench.world.machine import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

Reading = dict[str, Any]


class Host:
    """This machine; `root`: where its /sys is.

    Reading the clocks may interrupt the cores, so they are read only at every `clock_every`-th reading and on request.
    """

    def __init__(self, root: Path = Path("/"), *, clock_every: int = 10) -> None:
        self._interfaces, self._cpus = root / "sys/class/net", root / "sys/devices/system/cpu"
        packages = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._packages = [Package(path) for path in packages if _is_package(path)]
        self._clock_every, self._readings = clock_every, 0

    def read(self, *, clock: bool = False) -> Reading:
        """Columns of `telemetry`."""
        clock_hz = _or_null(self._clock_hz) if clock or self._readings % self._clock_every == 0 else None
        self._readings += 1
        sent, received = _or_null(self._network) or (None, None)
        return {
            "energy_j": self._energy_j(),
            "memory_used_bytes": _or_null(_memory_used_bytes),
            "clock_hz": clock_hz,
            "network_sent_bytes": sent,
            "network_received_bytes": received,
        }

    def _energy_j(self) -> float | None:
        energies = [package.energy_j() for package in self._packages]
        known = [energy_j for energy_j in energies if energy_j is not None]
        return sum(known) if known and len(known) == len(energies) else None

    def _network(self) -> tuple[int | None, int | None]:
        """Bytes sent and received through all hardware.

        Interfaces without a device (a bond, a bridge, a container's pair) forward the traffic of others, which would
        count twice. Where no interface has a device, as in a container, all but the loopback interface count.
        """
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        counters.pop("lo", None)
        counted = [each for name, each in counters.items() if self._is_hardware(name)] or [*counters.values()]
        if not counted:
            return None, None
        return sum(each.bytes_sent for each in counted), sum(each.bytes_recv for each in counted)

    def _is_hardware(self, name: str) -> bool:
        """Exclude parts of another device, which counts for both (a virtual function below its synthetic one)."""
        interface = self._interfaces / name
        return (interface / "device").exists() and not (interface / "master/device").exists()

    def _clock_hz(self) -> float | None:
        """The mean over all cores that run. psutil's clocks are of groups of cores where /proc/cpuinfo has none."""
        clocks_khz = [_number(path) or 0.0 for path in self._cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
        if not any(clocks_khz):
            clocks_khz = [each.current * 1e3 for each in psutil.cpu_freq(percpu=True)]
        running = [khz for khz in clocks_khz if khz > 0]
        return statistics.fmean(running) * 1e3 if running else None


class Package:
    """One processor's RAPL counter, with wrap-arounds added up (Linux: power/powercap/powercap)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._range_uj = _number(path / "max_energy_range_uj")
        self._last_uj: int | None = None
        self._wrapped_uj = 0

    def energy_j(self) -> float | None:
        """Joules since a fixed moment; null where the counter or its range can't be read: most systems forbid it."""
        now_uj = _number(self._path / "energy_uj")
        if now_uj is None or self._range_uj is None:
            return None
        if self._last_uj is not None and now_uj < self._last_uj:
            self._wrapped_uj += self._range_uj
        self._last_uj = now_uj
        return (now_uj + self._wrapped_uj) / 1e6


def _is_package(path: Path) -> bool:
    """The cores and the memory controller of a package are domains of their own, which must not count twice."""
    return (text_of(path / "name") or "").startswith("package")


def _memory_used_bytes() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def _or_null(read: Callable[[], Any]) -> Any:
    """What is read, if it can be: psutil raises errors of many kinds where a system hides files or writes others."""
    try:
        return read()
    except Exception:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
