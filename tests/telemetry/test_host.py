"""The host's sensors, on made-up /proc and /sys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from parallelbench.telemetry.host import Host


def put(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def package(root: Path, number: int, energy_uj: int, *, name: str = "package-0") -> Path:
    folder = f"sys/class/powercap/intel-rapl:{number}"
    put(root, f"{folder}/name", f"{name}\n")
    put(root, f"{folder}/max_energy_range_uj", "1000000\n")
    return put(root, f"{folder}/energy_uj", f"{energy_uj}\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What psutil takes for /proc."""
    put(tmp_path, "proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n" + MEMORY)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    return tmp_path / "proc"


MEMORY = "".join(f"{name}: 0 kB\n" for name in ("Buffers", "Cached", "Active", "Inactive", "Shmem", "Slab"))


def test_what_a_machine_without_sensors_has_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda **_: [])
    found = Host(tmp_path).read()
    assert (found["energy_j"], found["clock_hz"]) == (None, None)


@pytest.mark.parametrize("error", [NotImplementedError, ValueError, OSError])
@pytest.mark.parametrize(
    ("function", "columns"),
    [
        ("cpu_freq", {"clock_hz"}),
        ("virtual_memory", {"memory_used_bytes"}),
        ("net_io_counters", {"network_sent_bytes", "network_received_bytes"}),
    ],
)
def test_what_psutil_can_not_read_is_null_alone(
    tmp_path: Path,
    proc: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    columns: set[str],
    error: type[Exception],
) -> None:
    package(tmp_path, 0, 900_000)
    put(proc, "net/dev", "Inter-|\n face |\n eth0: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0")
    monkeypatch.setattr(psutil, "cpu_freq", lambda **_: [SimpleNamespace(current=2000.0)])
    monkeypatch.setattr(psutil, function, Mock(side_effect=error))
    assert {column for column, value in Host(tmp_path).read().items() if value is None} == columns


def test_the_clock_is_the_mean_over_cores_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six cores of one policy and two of another, whose clocks psutil would give once each; one core is offline."""
    for core in range(8):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{(1000 + 1400 * (core > 5))}000")
    (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").unlink()
    assert Host(tmp_path).read()["clock_hz"] == 1.4e9
    of_policies = [SimpleNamespace(current=mhz) for mhz in (0.0, 1000.0, 2400.0)]
    monkeypatch.setattr(psutil, "cpu_freq", lambda **_: of_policies)
    assert Host(tmp_path / "without").read()["clock_hz"] == 1.7e9


def test_packages_are_added_and_wrapping_around_is_made_good(tmp_path: Path) -> None:
    first = package(tmp_path, 0, 900_000)
    package(tmp_path, 1, 500_000, name="package-1")
    package(tmp_path, 2, 111, name="psys")
    host = Host(tmp_path)
    assert host.read()["energy_j"] == 1.4
    first.write_text("100000")
    assert host.read()["energy_j"] == pytest.approx(1.6)
    first.write_text("50000")
    assert host.read()["energy_j"] == pytest.approx(2.55)


def test_a_counter_that_wraps_around_nobody_knows_where_is_null(tmp_path: Path) -> None:
    counter = package(tmp_path, 0, 100_000)
    (counter.parent / "max_energy_range_uj").unlink()
    host, found = Host(tmp_path), []
    for energy_uj in (100_000, 10_000, 50_000, 110_000):
        counter.write_text(str(energy_uj))
        found.append(host.read()["energy_j"])
    assert found == [None] * 4


def test_one_unreadable_package_makes_the_sum_null(tmp_path: Path) -> None:
    package(tmp_path, 0, 900_000)
    package(tmp_path, 1, 900_000).unlink()
    assert Host(tmp_path).read()["energy_j"] is None


def test_memory_and_network(tmp_path: Path, proc: Path) -> None:
    lines = [
        "Inter-| Receive",
        " face |bytes",
        *(f"{name}: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0" for name in ("lo", "eth0", "ib0")),
    ]
    put(proc, "net/dev", "\n".join(lines))
    found = Host(tmp_path).read()
    assert found["memory_used_bytes"] == 600 * 1024
    assert (found["network_sent_bytes"], found["network_received_bytes"]) == (18, 14)


def test_what_passes_on_the_traffic_of_other_interfaces_is_not_counted_again(tmp_path: Path, proc: Path) -> None:
    names = {"lo": 1000, "eth0": 100, "eth1": 100, "bond0": 200, "halo": 7}
    lines = ["Inter-|", " face |", *(f" {name}: {n} 1 0 0 0 0 0 0 {2 * n} 1 0 0 0 0 0 0" for name, n in names.items())]
    put(proc, "net/dev", "\n".join(lines))
    found = Host(tmp_path).read()
    assert found["network_received_bytes"] == 407, "as in a container, where nothing has a device"
    for name in ("eth0", "eth1", "halo"):
        put(tmp_path, f"sys/class/net/{name}/device/vendor", "0x8086")
    found = Host(tmp_path).read()
    assert (found["network_sent_bytes"], found["network_received_bytes"]) == (414, 207)
    put(tmp_path, "sys/class/net/eth1/master/device/vendor", "0x1414")
    assert Host(tmp_path).read()["network_received_bytes"] == 107


def test_the_clock_is_not_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda **_: [SimpleNamespace(current=2000.0)])
    host = Host(tmp_path, clock_every=2)
    assert [host.read()["clock_hz"] for _ in range(4)] == [2e9, None, 2e9, None]
    host.read()
    assert host.read(clock=True)["clock_hz"] == 2e9, "asked for, although not due"


def test_this_machine(tmp_path: Path) -> None:
    found = Host().read()
    assert found["memory_used_bytes"] > 0
    assert found["energy_j"] is None or found["energy_j"] > 0
