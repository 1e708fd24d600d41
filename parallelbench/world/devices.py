"""The devices of this machine: CUDA devices or processor cores. Never imports torch."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError, choices, count_of
from parallelbench.world import gpus
from parallelbench.world.gpus import Gpu, require_usable, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Iterable

_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Machine:
    """This machine's devices, as far as this process may use them."""

    cores: tuple[int, ...]
    """Logical cores this process may run on; the first of every physical core comes before any second."""
    physical_cores: int
    """Number of physical cores that they belong to."""
    gpus: tuple[Gpu, ...]
    node_cores: int = 0
    """Logical cores of the whole machine, those of other jobs included; 0: not known."""
    quota_cores: float | None = None
    """How many cores' time the cgroups of this process allow it (a container's limit); None: as many as there are."""

    @property
    def usable_cores(self) -> int:
        """Cores that can compute all the time; 0 where the quota is less than one."""
        return len(self.cores) if self.quota_cores is None else min(len(self.cores), int(self.quota_cores))

    def device_type(self, device: str) -> str:
        """Resolve `auto`; raises `ConfigError` for CUDA where there is none."""
        if device == "auto":
            return "cuda" if self.gpus else "cpu"
        if device == "cuda" and not self.gpus:
            raise ConfigError("device=cuda, but this machine shows no CUDA device: choose device=cpu, or a GPU node")
        return device

    def caveats(self, *, devices: int, device_type: str, cores_per_device: int) -> list[str]:
        """Caveats of times measured on this machine, for a run of `devices` devices."""
        needed = devices * cores_per_device if device_type == "cpu" else devices
        caveats = []
        if device_type == "cpu" and self.physical_cores < needed <= len(self.cores):
            caveats.append(
                f"{needed} cores were used, but there are only {self.physical_cores} physical ones: devices shared them"
            )
        # The system counts the load of the whole machine: on a shared node, other jobs' cores are part of it.
        cores = max(self.node_cores, len(self.cores))
        if (others := others_running()) + needed > cores and needed <= len(self.cores):
            caveats.append(
                f"{count_of(others, 'other process', 'other processes')} kept the machine's {count_of(cores, 'core')} "
                f"busy when this run started: {'it' if others == 1 else 'they'} may have slowed it down"
            )
        if device_type == "cuda":
            caveats += gpus.caveats(self.gpus[:devices])
        return caveats

    def near(self, indices: Iterable[int]) -> set[int]:
        """The usable cores on the NUMA nodes of these GPUs; empty where one of the nodes is not known."""
        gpus = [self.gpus[index] for index in indices if index < len(self.gpus)]
        known = all(gpu.cores for gpu in gpus)
        return set().union(*(gpu.cores for gpu in gpus)) & set(self.cores) if known else set()

    def suffices(self, *, devices: int, device_type: str, cores_per_device: int) -> bool:
        """Whether each of `devices` devices has its own cores, or its own GPU."""
        if device_type == "cuda":
            return devices <= len(self.gpus)
        return devices * cores_per_device <= self.usable_cores

    def require(self, *, devices: int, device_type: str, cores_per_device: int, oversubscribe: bool) -> bool:
        """Refuse more devices than there are, and GPUs that can't be used; returns whether cores are oversubscribed
        (allowed only when asked).
        """
        if device_type == "cuda":
            require_usable(self.gpus[:devices])
        if self.suffices(devices=devices, device_type=device_type, cores_per_device=cores_per_device):
            return False
        if device_type == "cuda":
            raise ConfigError(
                f"devices={devices}, but this machine has {count_of(len(self.gpus), 'CUDA device')}: "
                f"choose devices={len(self.gpus)} or fewer"
            )
        if oversubscribe:
            return True
        here, most = self.usable_cores, self.usable_cores // cores_per_device
        advice = f"choose devices={most} or fewer" if most else f"choose cores_per_device={here} or fewer"
        has = f"this machine has {count_of(len(self.cores), 'core')}"
        if self.quota_cores is not None and self.quota_cores < len(self.cores):
            has += f", of which a quota (cgroup) allows {self.quota_cores:g}"
            advice = f"raise it (--cpus of a container), or {advice}" if here else "raise it (--cpus of a container)"
        raise ConfigError(
            f"devices={devices} with cores_per_device={cores_per_device}, but {has}: {advice} (or "
            "launcher.oversubscribe=true, which keeps the run out of timing figures)"
        )


def require_interface(key: str, name: str | None) -> None:
    """Refuse a network interface that this machine lacks; `key` is where it was chosen."""
    here = [interface for _, interface in socket.if_nameindex()]
    if name is not None and name not in here:
        raise ConfigError(f"{key}={name} is not on {node_name()}: {choices(name, here)}")


def this_machine() -> Machine:
    """Look at this machine."""
    allowed = sorted(os.sched_getaffinity(0))
    siblings = [_siblings(core) for core in allowed]
    order = sorted(allowed, key=lambda core: (sorted(_siblings(core)).index(core), core))
    return Machine(
        cores=tuple(order),
        physical_cores=len(set(siblings)),
        gpus=visible_gpus(),
        node_cores=os.cpu_count() or 0,
        quota_cores=cpu_quota_cores(),
    )


def threads_here() -> int:
    """Threads that can compute at the same time in this process: its cores, or those that a quota leaves of them."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(cpu_quota_cores() or cores)))


def _siblings(core: int) -> frozenset[int]:
    """Logical cores that share a physical core with `core`, itself included."""
    try:
        text = (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset({core})
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores | {core})


def others_running(samples: int = 5, interval_s: float = 0.01) -> int:
    """Processes and threads, besides the calling one, that run or wait for a core: the smallest of some samples."""
    running = []
    for _ in range(samples):
        running.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)
        time.sleep(interval_s)
    return max(0, min(running))


def node_name() -> str:
    """Slurm's name of this node, since several nodes of a cluster may be one host; without Slurm the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def cpu_name() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """How many cores' time the cgroups of this process allow it; None: as much as there is, or not known.

    The least of all its cgroups up to the root counts (cgroup v2: `cpu.max`; v1: `cpu.cfs_quota_us`).
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":
            places = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            places = [root / "sys/fs/cgroup" / name for name in ("cpu", controllers)]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        folders = [place.joinpath(*parts[:depth]) for place in places for depth in range(len(parts) + 1)]
        quotas += [quota for folder in folders if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
