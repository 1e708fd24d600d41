"""The devices of this machine: CUDA devices or processor cores. Never imports torch."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError
from parallelbench.rank.cuda_driver import driver_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOPOLOGY = Path("/sys/devices/system/cpu")


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
                f"{others} other process(es) kept the machine's {cores} core(s) busy when this run started: they "
                "may have slowed it down"
            )
        if device_type == "cuda":
            caveats += [
                f"{gpu.other_processes} other process(es) used GPU {index} ({gpu.name}) when this run started: they "
                "may have slowed it down"
                for index, gpu in enumerate(self.gpus[:devices])
                if gpu.other_processes
            ]
        return caveats

    def suffices(self, *, devices: int, device_type: str, cores_per_device: int) -> bool:
        """Whether each of `devices` devices has its own cores, or its own GPU."""
        if device_type == "cuda":
            return devices <= len(self.gpus)
        return devices * cores_per_device <= len(self.cores)

    def require(self, *, devices: int, device_type: str, cores_per_device: int, oversubscribe: bool) -> bool:
        """Refuse more devices than there are, and GPUs that can't be used; returns whether cores are oversubscribed
        (allowed only when asked).
        """
        if device_type == "cuda":
            _require_usable(self.gpus[:devices])
        if self.suffices(devices=devices, device_type=device_type, cores_per_device=cores_per_device):
            return False
        if device_type == "cuda":
            raise ConfigError(
                f"devices={devices}, but this machine has {len(self.gpus)} CUDA device(s): "
                f"choose devices={len(self.gpus)} or fewer"
            )
        if oversubscribe:
            return True
        most = len(self.cores) // cores_per_device
        advice = f"choose devices={most} or fewer" if most else f"choose cores_per_device={len(self.cores)} or fewer"
        raise ConfigError(
            f"devices={devices} with cores_per_device={cores_per_device}, but this machine has {len(self.cores)} "
            f"core(s): {advice} (or launcher.oversubscribe=true, which keeps the run out of timing figures)"
        )


def _require_usable(gpus: Sequence[Gpu]) -> None:
    """Refuse a driver that is too old for torch, and a GPU that fell off the bus; GPUs of other jobs may."""
    if gpus and (problem := driver_problem()):
        raise ConfigError(problem)
    for index, gpu in enumerate(gpus):
        if gpu.failure is not None:
            raise ConfigError(
                f"GPU {index} can't be used ({gpu.failure}): hide it with CUDA_VISIBLE_DEVICES, or ask for another node"
            )


def this_machine() -> Machine:
    """Look at this machine."""
    allowed = sorted(os.sched_getaffinity(0))
    siblings = [_siblings(core) for core in allowed]
    order = sorted(allowed, key=lambda core: (sorted(_siblings(core)).index(core), core))
    return Machine(
        cores=tuple(order), physical_cores=len(set(siblings)), gpus=visible_gpus(), node_cores=os.cpu_count() or 0
    )


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


def visible_gpus() -> tuple[Gpu, ...]:
    """The CUDA devices this process may use, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        count = pynvml.nvmlDeviceGetCount()
        gpus = [_gpu(pynvml, index) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()
    return select_visible(tuple(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _gpu(pynvml: Any, index: int) -> Gpu:
    """One GPU. One that can't be read keeps its place: CUDA counts it, and it may be another job's."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        return Gpu(name="unreadable GPU", uuid="", memory_bytes=None, failure=str(error))
    memory, processes = None, 0
    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    with suppress(pynvml.NVMLError):
        processes = len(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    return Gpu(name=name, uuid=uuid, memory_bytes=memory, other_processes=processes)


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
            # CUDA shows a process one slice of a GPU, and NVML lists whole ones.
            return (*chosen, Gpu(name="MIG slice", uuid=token, memory_bytes=None))
        named = [gpu for gpu in gpus if token and gpu.uuid.startswith(token)]
        if len(named) != 1:
            break
        chosen.append(named[0])
    return tuple(chosen)


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
