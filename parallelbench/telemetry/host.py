"""A host's energy, memory, network traffic and clock, as Linux reports them. What can't be read is null."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

Reading = dict[str, Any]


class Host:
    """The machine whose /proc and /sys are below `root`.

    Reading the clocks may interrupt the cores, so they are read only at every `clock_every`-th reading and on request.
    """

    def __init__(self, root: Path = Path("/"), *, clock_every: int = 10) -> None:
        self._proc, self._cpus = root / "proc", root / "sys/devices/system/cpu"
        self._interfaces = root / "sys/class/net"
        packages = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._packages = [Package(path) for path in packages if _is_package(path)]
        self._clock_every, self._readings = clock_every, 0

    def read(self, *, clock: bool = False) -> Reading:
        """Columns of `telemetry`."""
        clock_hz = self._clock_hz() if clock or self._readings % self._clock_every == 0 else None
        self._readings += 1
        sent, received = self._network()
        return {
            "energy_j": self._energy_j(),
            "memory_used_bytes": self._memory_used_bytes(),
            "clock_hz": clock_hz,
            "network_sent_bytes": sent,
            "network_received_bytes": received,
        }

    def _energy_j(self) -> float | None:
        energies = [package.energy_j() for package in self._packages]
        known = [energy_j for energy_j in energies if energy_j is not None]
        return sum(known) if known and len(known) == len(energies) else None

    def _memory_used_bytes(self) -> int | None:
        lines = _lines(self._proc / "meminfo")
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
        if not {"MemTotal", "MemAvailable"} <= sizes.keys():
            return None
        return sizes["MemTotal"] - sizes["MemAvailable"]

    def _network(self) -> tuple[int | None, int | None]:
        """Bytes sent and received through all hardware (proc(5): /proc/net/dev).

        Interfaces without a device (a bond, a bridge, a container's pair) forward the traffic of others, which would
        count twice. Where no interface has a device, as in a container, all but the loopback interface count.
        """
        lines = [line.partition(":") for line in _lines(self._proc / "net/dev")[2:]]
        counters = {name.strip(): values.split() for name, _, values in lines if name.strip() != "lo"}
        hardware = {name: values for name, values in counters.items() if self._is_hardware(name)}
        counted = (hardware or counters).values()
        if not counted:
            return None, None
        return sum(int(fields[8]) for fields in counted), sum(int(fields[0]) for fields in counted)

    def _is_hardware(self, name: str) -> bool:
        """Exclude parts of another device, which counts for both (a virtual function below its synthetic one)."""
        interface = self._interfaces / name
        return (interface / "device").exists() and not (interface / "master/device").exists()

    def _clock_hz(self) -> float | None:
        """The mean over all cores."""
        clocks_khz = [_number(path) for path in self._cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
        khz = [value for value in clocks_khz if value is not None]
        if khz:
            return statistics.fmean(khz) * 1e3
        lines = [line for line in _lines(self._proc / "cpuinfo") if line.startswith("cpu MHz")]
        return statistics.fmean(float(line.partition(":")[2]) for line in lines) * 1e6 if lines else None


class Package:
    """One processor's RAPL counter, with wrap-arounds added up (Linux: power/powercap/powercap)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._range_uj = _number(path / "max_energy_range_uj")
        self._last_uj: int | None = None
        self._wrapped_uj = 0
        self._lost = False

    def energy_j(self) -> float | None:
        """Joules since a fixed moment; null where the counter can't be read, which most systems forbid. Null from then
        on where the counter has wrapped around and its range can't be read.
        """
        now_uj = _number(self._path / "energy_uj")
        if now_uj is None:
            return None
        if self._lost:
            return None
        if self._last_uj is not None and now_uj < self._last_uj:
            if self._range_uj is None:  # its value before it began anew is unknown
                self._lost = True
                return None
            self._wrapped_uj += self._range_uj
        self._last_uj = now_uj
        return (now_uj + self._wrapped_uj) / 1e6


def _is_package(path: Path) -> bool:
    """The cores and the memory controller of a package are domains of their own, which must not count twice."""
    return any(line.startswith("package") for line in _lines(path / "name"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
