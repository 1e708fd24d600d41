"""Collectives and messages between the ranks of a process group, of growing size, each timed over several rounds."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import torch
import torch.distributed as dist

from parallelbench.world import cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


SIZES_BYTES = tuple(4**power * 1024 for power in range(9))
"""1 KiB to 64 MiB."""
ROUNDS = 10
WARM_UP = 3


Operation = Literal["all_reduce", "all_gather", "all_to_all", "send"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
"""send: from each of the first `apart` ranks to the one that many further, and back, of which half counts; the others
wait."""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One size's measurement."""

    operation: Operation = "all_reduce"
    size_bytes: int
    """Bytes that are reduced or sent, that each rank has in the end (all_gather), or that it begins with (all_to_all).
    """
    time_s: float
    """Median over the rounds of the slowest rank's time."""
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends: a ring sends 2(n−1)/n of what is reduced, (n−1)/n of what is gathered
        (Patarasuk & Yuan 2009).
        """
        if self.operation == "send":
            return self.size_bytes
        return (2 if self.operation == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.size_bytes


def collectives(
    operation: Operation,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    rounds: int = ROUNDS,
    group: dist.ProcessGroup | None = None,
    apart: int = 1,
) -> list[Collective]:
    """Time messages of fp32 tensors on `device` over a group; a collective, equal on every rank of the group.

    With `apart` devices per node, each device of the first node sends to one of the second, all at once.
    """
    measured, ranks = [], dist.get_world_size(group)
    for size_bytes in sizes_bytes:
        count = ranks * max(1, size_bytes // 4 // ranks)
        piece = _piece(operation, torch.zeros(count, dtype=torch.float32, device=device), group, apart)
        share = 0.5 if operation == "send" else 1.0
        times_s = [share * _timed(piece, device, group) for _ in range(WARM_UP + rounds)][WARM_UP:]
        slowest = torch.tensor(times_s, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        median_s = statistics.median(slowest.tolist())
        measured.append(Collective(operation=operation, size_bytes=4 * count, time_s=median_s, ranks=ranks))
    return measured


def _piece(
    operation: Operation, tensor: torch.Tensor, group: dist.ProcessGroup | None, apart: int
) -> Callable[[], object]:
    ranks = dist.get_world_size(group)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(tensor, group=group)
    if operation == "all_gather":
        part = tensor.new_zeros(len(tensor) // ranks)
        return lambda: dist.all_gather_into_tensor(tensor, part, group=group)
    if operation == "all_to_all":
        other = torch.empty_like(tensor)
        return lambda: dist.all_to_all_single(other, tensor, group=group)
    return lambda: _there_and_back(tensor, group, apart)


def _there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup | None, apart: int) -> None:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    own = ranks.index(dist.get_rank())
    if own < apart:
        dist.send(tensor, ranks[own + apart], group=group)
        dist.recv(tensor, ranks[own + apart], group=group)
    elif own < 2 * apart:
        dist.recv(tensor, ranks[own - apart], group=group)
        dist.send(tensor, ranks[own - apart], group=group)


def _timed(piece: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Seconds: of a GPU between two events of its own, which neither the host's time nor other ranks' delay is in.

    A first piece lets the devices begin the second together; all is launched while they are kept busy.
    """
    dist.all_reduce(torch.zeros(1), group=group)  # a barrier on the host
    if device.type == "cuda":
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cuda.occupy(device)
        piece()
        before.record()
        piece()
        after.record()
        torch.cuda.synchronize(device)
        return float(before.elapsed_time(after)) / 1000.0
    start = time.perf_counter()
    piece()
    return time.perf_counter() - start
