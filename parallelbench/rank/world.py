"""One rank's place among the processes and devices of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist


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

    def synchronize(self) -> None:
        """Wait until this rank's devices are idle."""
        if self.device_type == "cuda":
            for device in self.devices:
                torch.cuda.synchronize(device)

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""
        if self.size > 1:
            self.sum(torch.zeros(1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def leave(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def join(device_type: str, *, devices: int, timeout_s: float) -> World:
    """Join the process group, at the rank that torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK) gives.

    `devices`: how many the whole run has. `timeout_s`: how long a collective may wait. The process group carries CPU
    tensors by gloo and CUDA tensors by NCCL.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own = _devices(device_type, local_rank, per_process=devices // size)
    if device_type == "cuda":
        torch.cuda.set_device(own[0])
    if size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
        )
    return World(rank=rank, size=size, local_rank=local_rank, device_type=device_type, devices=own)


def _devices(device_type: str, local_rank: int, *, per_process: int) -> tuple[torch.device, ...]:
    if device_type == "cpu":
        return (torch.device("cpu"),)
    return tuple(torch.device("cuda", local_rank * per_process + i) for i in range(per_process))
