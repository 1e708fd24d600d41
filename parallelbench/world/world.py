"""One rank's place among the processes and devices of a run."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist

from parallelbench.errors import ConfigError
from parallelbench.world import cuda
from parallelbench.world.generators import Generators
from parallelbench.world.machine import DeviceMemory
from parallelbench.world.numerics import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from parallelbench.config.run import Nccl


SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""By 1 NCCL lets several ranks use one GPU, from 2.30 on; earlier ones refuse it. Only gpu-check sets it."""


@dataclass(frozen=True)
class World:
    """One rank's place. With one process there is no process group and every collective is the identity."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device_type: str = "cpu"
    devices: tuple[torch.device, ...] = field(default=(torch.device("cpu"),))
    """The devices this rank drives; one, except where one process drives several."""

    @property
    def device(self) -> torch.device:
        """The device that batches arrive on."""
        return self.devices[0]

    def wake(self) -> None:
        """Load the libraries that this rank's devices compute with (cuDNN, cuBLAS, oneDNN).

        Otherwise their loading would count as part of the parity check or, without one, of the first step.
        """
        for device in self.devices:
            images, weights = (torch.zeros(1, 1, 3, 3, device=device, requires_grad=True) for _ in range(2))
            features = torch.nn.functional.conv2d(images, weights).flatten(1)
            (features @ features).sum().backward()
        self.synchronize()

    @property
    def _gpus(self) -> tuple[torch.device, ...]:
        return self.devices if self.device_type == "cuda" else ()

    def gpus(self) -> list[tuple[str, str]]:
        gpus = map(torch.cuda.get_device_properties, self._gpus)
        return [(gpu.name, f"GPU-{gpu.uuid}") for gpu in gpus]

    def reset_peaks(self) -> None:
        for device in self._gpus:
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)  # retries

    def peaks(self) -> list[DeviceMemory]:
        found = []
        for device in self._gpus:
            free, total = torch.cuda.mem_get_info(device)
            held, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
            found.append(DeviceMemory(held, reserved, total - free, retries))
        return found

    def memory_bytes(self) -> list[int | None]:
        return [torch.cuda.get_device_properties(device).total_memory for device in self._gpus]

    def synchronize(self) -> None:
        for device in self._gpus:
            torch.cuda.synchronize(device)

    def barrier(self) -> None:
        if self.size > 1:
            self.sum(torch.zeros(1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def total(self, values: Sequence[float]) -> list[float]:
        totals: list[float] = self.sum(torch.tensor(values, dtype=torch.float64)).tolist()
        return totals

    def gather(self, value: Any) -> list[Any]:
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def checksum(self, copied: Iterable[torch.Tensor]) -> int:
        """A number that depends on all bits of these tensors."""
        return checksum(copied)

    def exchange_counter(self) -> Callable[[], int]:
        """Says how many collectives, sends and receives this rank has begun in the gloo groups that there are now.

        torch numbers them, whoever begins them. Always 0 on GPUs, where NCCL may number messages otherwise.
        """
        if self.size == 1 or self.device_type != "cpu":
            return int
        groups: Iterable[tuple[Any, tuple[str, Any]]] = dist.distributed_c10d._world.pg_map.items()
        numbers = [group._get_sequence_number_for_group for group, (backend, _) in groups if backend == "gloo"]
        return lambda: sum(number() for number in numbers)

    def draw_from(self, stream: str) -> None:
        """Begin the stream of random numbers of this name; each of this rank's GPUs has one of its own."""
        self._generators.seed(_seed_of(stream))
        for index, device in enumerate(self._gpus):
            cuda.seed(_seed_of(f"{stream} {index}"), device)

    def random_state(self) -> dict[str, Any]:
        """States of all generators: the suite's models draw nothing while they train, a user's may (dropout)."""
        return self._generators.state()

    def set_random_state(self, states: dict[str, Any] | list[torch.Tensor]) -> None:
        """Go on with that; earlier releases saved a list of torch's."""
        self._generators.restore({"torch": states} if isinstance(states, list) else states)

    @property
    def _generators(self) -> Generators:
        return Generators(self._gpus)

    def write_state(self, state: dict[str, Any], file: BinaryIO) -> None:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # on a full disk torch's writer raises this while it handles the OSError
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def read_state(self, path: Path) -> dict[str, Any]:
        """Read it, to the host; raises where the file is damaged, or of another version of torch."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join(device_type: str, *, devices: int, timeout_s: float, nccl: Nccl | None = None) -> World:
    """Join the process group, at the rank that torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK) gives.

    `devices`: how many the whole run has. `timeout_s`: how long a collective may wait. The process group carries CPU
    tensors by gloo and CUDA tensors by NCCL, as `nccl` says. Where NCCL is told that ranks share GPUs, they take turns
    in taking one.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own = _devices(device_type, local_rank, per_process=devices // size)
    if device_type == "cuda":
        torch.cuda.set_device(own[0])
    if size > 1:
        dist.init_process_group(backends(device_type, nccl), timeout=timedelta(seconds=timeout_s))
    return World(rank=rank, size=size, local_rank=local_rank, device_type=device_type, devices=own)


def backends(device_type: str, nccl: Nccl | None = None) -> str:
    """torch's name of the process group for these devices; raises `ConfigError` where this torch lacks a choice."""
    if device_type == "cpu":
        return "gloo"
    if (
        nccl is not None
        and nccl.per_edge
        and not getattr(getattr(dist, "config", None), "pipeline_per_edge_p2p", False)
    ):
        raise ConfigError(f"nccl.per_edge=true: torch {torch.__version__} can't do it; choose nccl.per_edge=false")
    if nccl is None or nccl.backend != "lazy":
        return "cpu:gloo,cuda:nccl"
    if not hasattr(dist.distributed_c10d, "ProcessGroupNCCLLazy"):
        raise ConfigError(f"nccl.backend=lazy: torch {torch.__version__} has no nccl-lazy; choose nccl.backend=default")
    return "cpu:gloo,cuda:nccl-lazy"


def group_kinds() -> dict[str, str] | None:
    """Type of device → torch's class that carries its messages, e.g. ProcessGroupNCCL2; None without a group."""
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD
    assert group is not None
    return {device.type: type(group._get_backend(device)).__name__ for device in group._device_types}


def _devices(device_type: str, local_rank: int, *, per_process: int) -> tuple[torch.device, ...]:
    if device_type == "cpu":
        return (torch.device("cpu"),)
    indices = range(local_rank * per_process, (local_rank + 1) * per_process)
    if os.environ.get(SHARING) == "1":
        return tuple(torch.device("cuda", index % torch.cuda.device_count()) for index in indices)
    return tuple(torch.device("cuda", index) for index in indices)


def _seed_of(stream: str) -> int:
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4], "big")  # NumPy takes no more
