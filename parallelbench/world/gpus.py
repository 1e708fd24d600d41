"""The GPUs of this machine, as the driver's own library (NVML) shows them. Never imports torch."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError, count_of
from parallelbench.world.cuda_driver import driver_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WORD_BITS = 64
"""NVML returns sets of cores as machine words."""
_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which the package defines as a tuple."""


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
    takes_processes: int | None = None
    """How many processes may use it at once, by its compute mode: 0 or 1; None: any number."""
    is_sliced: bool = False
    """Whether MIG cuts it into slices, or this is one."""
    unreachable: frozenset[str] = frozenset()
    """UUIDs of the GPUs whose memory it can't read directly."""


def visible_gpus() -> tuple[Gpu, ...]:
    """The CUDA devices this process may use, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        count = pynvml.nvmlDeviceGetCount()
        gpus = [_gpu(pynvml, index, count) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()
    return select_visible(tuple(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _gpu(pynvml: Any, index: int, count: int) -> Gpu:
    """One GPU. One that can't be read keeps its place: CUDA counts it, and it may be another job's."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
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
        modes = {pynvml.NVML_COMPUTEMODE_PROHIBITED: 0, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: 1}
        known["takes_processes"] = modes.get(pynvml.nvmlDeviceGetComputeMode(handle))
    with suppress(pynvml.NVMLError):
        known["is_sliced"] = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    known["unreachable"] = frozenset(_unreachable(pynvml, handle, (i for i in range(count) if i != index)))
    return Gpu(name=name, uuid=uuid, **known)


def _unreachable(pynvml: Any, handle: Any, others: Iterator[int]) -> Iterator[str]:
    """UUIDs of GPUs to which the driver refuses peer access."""
    for index in others:
        with suppress(pynvml.NVMLError):
            other = pynvml.nvmlDeviceGetHandleByIndex(index)
            if pynvml.nvmlDeviceGetP2PStatus(handle, other, _READ) != pynvml.NVML_P2P_STATUS_OK:
                yield pynvml.nvmlDeviceGetUUID(other)


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


def require_usable(gpus: Sequence[Gpu]) -> None:
    """Refuse what ends every run on these GPUs, or makes its times mean nothing. Other jobs' GPUs don't count."""
    if gpus and (problem := driver_problem()):
        raise ConfigError(problem)
    for problem in problems(gpus):
        raise ConfigError(problem)


def problems(gpus: Sequence[Gpu]) -> Iterator[str]:
    """Why a run can't use these GPUs, each with its remedy."""
    elsewhere = "hide it with CUDA_VISIBLE_DEVICES, or ask for another node"
    for index, gpu in enumerate(gpus):
        if gpu.failure is not None:
            yield f"GPU {index} can't be used ({gpu.failure}): {elsewhere}"
        if gpu.takes_processes == 0:
            yield f"GPU {index} ({gpu.name}) is in the compute mode Prohibited, which lets nobody use it: {elsewhere}"
        if gpu.takes_processes == 1 and gpu.other_processes:
            yield (
                f"GPU {index} ({gpu.name}) is in the compute mode Exclusive_Process, and another process uses it: wait "
                f"for that, {elsewhere}"
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


def caveats(gpus: Sequence[Gpu]) -> list[str]:
    """What may have slowed a run on these GPUs down."""
    found = [
        f"{count_of(gpu.other_processes, 'other process', 'other processes')} used GPU {index} ({gpu.name}) when this "
        f"run started and may have slowed it down; hide it with CUDA_VISIBLE_DEVICES, or ask for a node of your own"
        for index, gpu in enumerate(gpus)
        if gpu.other_processes
    ]
    apart = [
        f"{a} and {b}"
        for (a, one), (b, other) in combinations(enumerate(gpus), 2)
        if other.uuid in one.unreachable or one.uuid in other.unreachable
    ]
    if apart:
        found.append(f"no peer access between the GPUs {', '.join(apart)}: messages between them go through the host")
    return found
