"""The devices of this machine: GPUs, as the driver's own library (NVML) shows them, or cores. Never imports torch."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelbench.errors import ConfigError, choices, count_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from parallelbench.frameworks import RankWorld


_WORD_BITS = 64
"""NVML returns sets of cores as machine words."""


@dataclass(frozen=True)
class Gpu:
    """One visible CUDA device."""

    name: str
    uuid: str
    memory_bytes: int | None
    """None: the driver does not say."""
    failure: str | None = None
    """Why the driver can't read it, e.g. since it is lost; None: it can."""
    other_processes: int = 0
    """Processes that compute on it at this moment."""
    cores: frozenset[int] = frozenset()
    """Logical cores of the NUMA node that it is attached to; empty: not known."""
    is_sliced: bool = False
    """Whether MIG cuts it into slices, or this is one."""


class DeviceMemory(NamedTuple):
    """Memory of a GPU, bytes, since its peaks were reset; null where the framework does not say."""

    allocated: int
    """Peak of what tensors held."""
    reserved: int | None = None
    """Peak of what the framework's allocator held."""
    used: int | None = None
    """What all processes use now."""
    retries: int | None = None
    """How often the allocator found no room, gave its cache back and asked again."""


def visible_gpus() -> tuple[Gpu, ...]:
    """The CUDA devices this process may use, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        gpus = [gpu for index in range(pynvml.nvmlDeviceGetCount()) if (gpu := _gpu(pynvml, index)) is not None]
    finally:
        pynvml.nvmlShutdown()
    return select_visible(tuple(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _gpu(pynvml: Any, index: int) -> Gpu | None:
    """One GPU. One that can't be read keeps its place: CUDA counts it, and it may be another job's.

    None: this process may not use it, such as another job's where Slurm confines a job to its own; CUDA does not count
    it.
    """
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            return None
        return Gpu(name="unreadable GPU", uuid="", memory_bytes=None, failure=str(error))
    known: dict[str, Any] = {"memory_bytes": None}
    with suppress(pynvml.NVMLError):
        known["memory_bytes"] = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    with suppress(pynvml.NVMLError):
        known["other_processes"] = len(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    with suppress(pynvml.NVMLError):
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, -(-(os.cpu_count() or 1) // _WORD_BITS))
        cores = range(_WORD_BITS * len(words))
        known["cores"] = frozenset(core for core in cores if words[core // _WORD_BITS] >> core % _WORD_BITS & 1)
    with suppress(pynvml.NVMLError):
        known["is_sliced"] = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    return Gpu(name=name, uuid=uuid, **known)


def select_visible(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Apply `CUDA_VISIBLE_DEVICES`: indices or UUID prefixes; as in CUDA, the first invalid one ends the list."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for token in (part.strip() for part in visible.split(",")):
        if token.isdigit() and int(token) < len(gpus):
            chosen.append(gpus[int(token)])
            continue
        if token.startswith("MIG-"):
            # CUDA shows a process one slice of a GPU, of whatever size, and NVML lists whole ones.
            return (*chosen, Gpu(name="MIG slice", uuid=token, memory_bytes=None, is_sliced=True))
        named = [gpu for gpu in gpus if token and gpu.uuid.startswith(token)]
        if len(named) != 1:
            break
        chosen.append(named[0])
    return tuple(chosen)


def problems(gpus: Sequence[Gpu]) -> Iterator[str]:
    """Why a run can't use these GPUs, each with its remedy."""
    for index, gpu in enumerate(gpus):
        if gpu.failure is not None:
            yield (
                f"GPU {index} can't be used ({gpu.failure}): hide it with CUDA_VISIBLE_DEVICES, or ask for another node"
            )
    if len(gpus) > 1 and (sliced := [str(index) for index, gpu in enumerate(gpus) if gpu.is_sliced]):
        yield (
            f"devices={len(gpus)}, but MIG slices GPU {', '.join(sliced)}: NCCL connects no slices, and their sizes "
            "may differ; choose devices=1, or GPUs without MIG"
        )
    if len(kinds := sorted({gpu.name for gpu in gpus if gpu.failure is None})) > 1:
        yield (
            f"GPUs of several types ({', '.join(kinds)}) would train together, at the slowest one's pace: choose some "
            "with CUDA_VISIBLE_DEVICES, or a type with site.gpu_type"
        )


def gpu_caveats(gpus: Sequence[Gpu]) -> list[str]:
    """What may have slowed a run on these GPUs down."""
    found = [
        f"{count_of(gpu.other_processes, 'other process', 'other processes')} used GPU {index} ({gpu.name}) when this "
        f"run started and may have slowed it down; hide it with CUDA_VISIBLE_DEVICES, or ask for a node of your own"
        for index, gpu in enumerate(gpus)
        if gpu.other_processes
    ]
    if apart := ", ".join(_apart(gpus)):
        found.append(f"no peer access between the GPUs {apart}: messages between them go through the host")
    return found


def _apart(gpus: Sequence[Gpu]) -> list[str]:
    """Pairs of GPUs between which the driver refuses peer access; none where it does not say."""
    import pynvml

    read = 0  # NVML_P2P_CAPS_INDEX_READ, which the package defines as a tuple
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
            return [
                f"{a} and {b}"
                for (a, one), (b, other) in combinations(enumerate(handles), 2)
                if pynvml.nvmlDeviceGetP2PStatus(one, other, read) != pynvml.NVML_P2P_STATUS_OK
            ]
        finally:
            pynvml.nvmlShutdown()
    return []


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
            caveats += gpu_caveats(self.gpus[:devices])
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
        for problem in problems(self.gpus[:devices]) if device_type == "cuda" else ():
            raise ConfigError(problem)
        if self.suffices(devices=devices, device_type=device_type, cores_per_device=cores_per_device):
            return False
        if device_type == "cuda":
            raise ConfigError(
                f"devices={devices}, but this machine has {count_of(len(self.gpus), 'CUDA device')}: "
                f"choose devices={len(self.gpus)} or fewer, or device=cpu"
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


def _siblings(core: int) -> frozenset[int]:
    """Logical cores that share a physical core with `core`, itself included."""
    listed, cores = text_of(_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list"), {core}
    for part in listed.split(",") if listed else ():
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def descendants(pid: int) -> list[int]:
    """Ids of the processes that a process has started, with what the kernel has given it, and of all of theirs."""
    found = [pid]
    for each in found:  # which grows meanwhile
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                found += map(int, (text_of(f"/proc/{each}/task/{thread}/children") or "").split())
    return found[1:]


def text_of(path: str | Path) -> str | None:
    """What a file of the system's says; None where it can't be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def run_delay_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float | None:
    """How long a thread has waited for a core since it began (Linux: scheduler/sched-stats); None: not known."""
    try:
        return int(schedstat.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


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


_ARM_CORES = {
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x46", "0x001"): "A64FX",
}
"""(implementer, part) of ARM's main ID register → name; others are named by their numbers."""
_ARM_CORE = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
_MODEL = ("model name", "cpu", "cpu model", "uarch", "machine")
"""What /proc/cpuinfo calls the model: x86, POWER, MIPS, RISC-V, IBM Z."""


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor. ARM gives no name, but each core's implementer, part, variant and revision."""
    found: dict[str, list[str]] = {}
    for line in (text_of(cpuinfo) or "").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), []).append(value.strip())
    if cores := [*zip(*(found.get(each, ()) for each in _ARM_CORE), strict=False)]:
        return ", ".join(dict.fromkeys(_arm_core(*core) for core in cores))
    return next((found[key][0] for key in _MODEL if key in found), "unknown CPU")


def _arm_core(implementer: str, part: str, variant: str, revision: str) -> str:
    name = _ARM_CORES.get((implementer, part), f"ARM {implementer}:{part}")
    return f"{name} r{int(variant, 0)}p{revision}"


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """How many cores' time the cgroups of this process allow it; None: as much as there is, or not known.

    The least of all its cgroups up to the root counts (cgroup v2: `cpu.max`; v1: `cpu.cfs_quota_us`).
    """
    return min(filter(None, map(_quota, _cgroups("cpu", root))), default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The same of memory (cgroup v2: `memory.max`; v1: `memory.limit_in_bytes`)."""
    return min(filter(None, map(_memory_limit, _cgroups("memory", root))), default=None)


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or what its cgroups allow."""
    return host_memory_limit()[0]


def host_memory_limit(root: Path = Path("/"), *, node_bytes: int | None = None) -> tuple[int, str]:
    """The same, with what limits it: "node" or "cgroup". `node_bytes`: the machine's memory; None: this machine's."""
    there = node_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = memory_limit_bytes(root) or there
    return (allowed, "cgroup") if allowed < there else (there, "node")


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's cgroups that a controller may limit, from the root on."""
    lines = (text_of(root / "proc/self/cgroup") or "").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":
            places = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            places = [root / "sys/fs/cgroup" / name for name in (controller, controllers)]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for place in places:
            yield from (place.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):  # it has the other one, or none: "max"
            continue
    return None


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def device_name(world: RankWorld) -> str:
    """Name of the rank's GPU or processor."""
    gpus = world.gpus()
    return gpus[0][0] if gpus else cpu_name()
