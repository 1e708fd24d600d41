"""A host's energy, memory, network traffic and clock, by psutil but for the energy. What can't be read is null."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

Reading = dict[str, Any]


class Host:
    """This machine; `root`: where its /sys is.

    Reading the clocks may interrupt the cores, so they are read only at every `clock_every`-th reading and on request.
    """

    def __init__(self, root: Path = Path("/"), *, clock_every: int = 10) -> None:
        self._interfaces = root / "sys/class/net"
        packages = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._packages = [Package(path) for path in packages if _is_package(path)]
        self._clock_every, self._readings = clock_every, 0

    def read(self, *, clock: bool = False) -> Reading:
        """Columns of `telemetry`."""
        frequency = psutil.cpu_freq() if clock or self._readings % self._clock_every == 0 else None
        self._readings += 1
        memory = psutil.virtual_memory()
        sent, received = self._network()
        return {
            "energy_j": self._energy_j(),
            "memory_used_bytes": memory.total - memory.available,
            "clock_hz": frequency.current * 1e6 if frequency is not None else None,
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
        if now_uj is None or self._lost:
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
    try:
        return (path / "name").read_text().startswith("package")
    except OSError:
        return False


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
