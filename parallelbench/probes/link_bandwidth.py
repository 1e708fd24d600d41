"""Bandwidth between the ranks of a process group: all-reduces of growing size, each timed over several rounds.

As a program, `python -m parallelbench.probes.link_bandwidth tcp://HOST:PORT RANK SIZE cpu|cuda`; rank 0 prints JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from parallelbench import cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES_BYTES = tuple(4**power * 1024 for power in range(9))
"""1 KiB to 64 MiB."""
ROUNDS = 10
WARM_UP = 3
TIMEOUT_S = 60.0


class AllReduce(msgspec.Struct, frozen=True, kw_only=True):
    """One size's measurement."""

    size_bytes: int
    """Bytes that each rank contributes."""
    time_s: float
    """Median over the rounds of the slowest rank's time."""
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends: a ring sends 2(n−1)/n of what is reduced (Patarasuk & Yuan 2009)."""
        return 2 * (self.ranks - 1) / self.ranks * self.size_bytes

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes per second that each rank sends."""
        return self.sent_bytes / self.time_s


def all_reduces(
    device: torch.device, sizes_bytes: Sequence[int] = SIZES_BYTES, rounds: int = ROUNDS
) -> list[AllReduce]:
    """Time all-reduces of fp32 tensors on `device` over the default group; a collective, equal on every rank."""
    measured = []
    for size_bytes in sizes_bytes:
        tensor = torch.zeros(max(1, size_bytes // 4), dtype=torch.float32, device=device)
        times_s = [_timed(tensor) for _ in range(WARM_UP + rounds)][WARM_UP:]
        slowest = torch.tensor(times_s, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        median_s = statistics.median(slowest.tolist())
        measured.append(AllReduce(size_bytes=4 * tensor.numel(), time_s=median_s, ranks=dist.get_world_size()))
    return measured


def _timed(tensor: torch.Tensor) -> float:
    dist.all_reduce(torch.zeros(1))  # a barrier on the host
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def main(arguments: Sequence[str]) -> int:
    """One rank, on one device."""
    url, rank, size, device_type = arguments[0], int(arguments[1]), int(arguments[2]), arguments[3]
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    measured = all_reduces(torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu"))
    dist.all_reduce(torch.zeros(1))  # no rank leaves before the last has finished
    dist.destroy_process_group()
    if rank == 0:
        print(msgspec.json.encode(measured).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
