"""Counts what passes through torch.distributed, whatever a strategy says about it.

Collectives of libraries (DDP's reducer, `fully_shard`, DTensor, pipelines) all go through torch's dispatcher, which
this listens to. It costs time, so it listens only where nothing is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTROL_BYTES = 1024
"""Smaller messages are statistics of norms, shapes and scalars, which the columns of bytes leave out."""


class CountedBytes(TorchDispatchMode):
    """Bytes that this rank sends within the context, by the formulas of `parallelbench.probes.traffic`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0.0
        """In messages of 1 KiB or more."""
        self.control_bytes = 0.0
        """In smaller ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and count it where it is one of torch.distributed."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.namespace, func._schema.name.partition("::")[2].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, namespace: str, name: str, args: Any) -> None:
        shares = _SHARES.get(name)
        if shares is None:
            return
        ranks, rank = _group(namespace, args)
        message = args[shares.argument]
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(message))
        root = args[shares.root] if shares.root is not None else None
        sent_bytes = size_bytes * shares.of(ranks) if root is None or root == rank else 0.0
        if size_bytes < _CONTROL_BYTES:
            self.control_bytes += sent_bytes
        else:
            self.sent_bytes += sent_bytes


class _Share:
    """What share of a message each rank sends, and which argument of the operation is the message."""

    def __init__(self, of: Callable[[int], float], *, argument: int = 0, root: int | None = None) -> None:
        self.of, self.argument, self.root = of, argument, root


def _twice(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _once(ranks: int) -> float:
    return (ranks - 1) / ranks


def _others(ranks: int) -> float:
    return float(ranks - 1)


def _one(ranks: int) -> float:
    return 1.0


_SHARES = {
    "allreduce": _Share(_twice),
    "allreduce_coalesced": _Share(_twice),
    "all_reduce": _Share(_twice),
    "all_reduce_coalesced": _Share(_twice),
    "allgather_base": _Share(_once),
    "allgather": _Share(_others, argument=1),
    "allgather_into_tensor_coalesced": _Share(_others, argument=1),
    "all_gather_into_tensor": _Share(_others),
    "all_gather_into_tensor_out": _Share(_others),
    "all_gather_into_tensor_coalesced": _Share(_others),
    "reduce_scatter": _Share(_once, argument=1),
    "reduce_scatter_base": _Share(_once, argument=1),
    "reduce_scatter_tensor_coalesced": _Share(_once, argument=1),
    "reduce_scatter_tensor": _Share(_once),
    "reduce_scatter_tensor_out": _Share(_once),
    "broadcast": _Share(_others, root=2),
    "send": _Share(_one),
    "alltoall_base": _Share(_once, argument=1),
    "all_to_all_single": _Share(_once),
}
"""Operation of either namespace, without underscores at its ends → the bytes that each rank sends."""


def _tensors(message: Any) -> list[torch.Tensor]:
    if isinstance(message, torch.Tensor):
        return [message]
    return [tensor for part in message for tensor in _tensors(part)]


def _group(namespace: str, args: Any) -> tuple[int, int]:
    """The number of ranks of the operation's group, and this rank among them."""
    if namespace == "_c10d_functional":
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    else:
        boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
    return group.size(), group.rank()
