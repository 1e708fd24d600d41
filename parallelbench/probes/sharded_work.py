"""What it costs to shard a layer: passes through torch's `fully_shard`, less passes through the same layers whole.

Sharding gathers a layer's parameters before each pass, frees them, and scatters its gradients. Besides the messages
that takes hooks and copies, which no formula of messages knows: milliseconds per layer on CPUs.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from parallelbench import cuda

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTHS = {"cpu": (16, 64, 256, 1024, 2048), "cuda": (256, 1024, 4096, 8192)}
"""Of square linear layers in fp32: parameters of 1 KiB to 16 MiB; of 256 KiB to 256 MiB."""
LAYERS, SAMPLES = 4, 16
"""A step waits for the first layer's parameters; a stack shows what each further one costs, too."""
ROUNDS, WARM_UP = 10, 3
LONG_S = 0.25
"""Larger sizes are left out once a layer takes longer than this."""


class ShardedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """What sharding adds to a layer of one size."""

    size_bytes: int
    """Of its whole parameters."""
    time_s: float
    """What a sharded layer's forward and backward take longer than a whole one's, on the slowest rank: the median."""


def sharded_layers(device: torch.device, group: dist.ProcessGroup) -> Iterator[ShardedLayer]:
    """Measure stacks of growing layers, sharded over a group; a collective, equal on every rank of the group.

    Sizes at which sharding is too cheap to be told from nothing are left out.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    for width in WIDTHS[device.type]:
        whole, sharded = _stack(width, device), _stack(width, device)
        for module in (*sharded, sharded):
            fully_shard(module, mesh=mesh)
        sample = torch.ones(SAMPLES, width, device=device)
        rounds = [[_pass_s(stack, sample, group) for stack in (whole, sharded)] for _ in range(WARM_UP + ROUNDS)]
        times = torch.tensor(rounds[WARM_UP:], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
        whole_s, sharded_s = (statistics.median(column) for column in times.T.tolist())
        time_s = (sharded_s - whole_s) / LAYERS
        if time_s > 0:
            yield ShardedLayer(size_bytes=4 * width**2, time_s=time_s)
        if time_s > LONG_S:
            return


def _stack(width: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)))


def _pass_s(stack: nn.Module, sample: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one forward and backward pass."""
    dist.all_reduce(torch.zeros(1), group=group)  # a barrier on the host
    began_s = time.perf_counter()
    stack(sample).sum().backward()
    if sample.is_cuda:
        cuda.synchronize(sample.device)
    taken_s = time.perf_counter() - began_s
    stack.zero_grad(set_to_none=True)
    return taken_s
