"""Counts what passes through torch.distributed, whatever a strategy says about it.

Collectives of libraries (DDP's reducer, `fully_shard`, DTensor, pipelines) all go through torch's dispatcher, which
this listens to. It costs time, so it listens only where nothing is timed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable


_CALLED_BY_THREADS = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "reduce_scatter_tensor",
    "send",
)
"""Of torch.distributed, what threads call that are not autograd's. `isend` must stay itself: `P2POp` compares it."""
_CONTROL_BYTES = 1024
"""Smaller messages are shapes and scalars, which the columns of bytes leave out, and statistics and biases, which they
have."""


class CountedBytes:
    """Within its context, the bytes that this rank sends, by the formulas of `parallelbench.measure.traffic`.

    `gloo_bytes` are those that gloo sends for the same operations: what the kernel's counters of the loopback interface
    see (tests/test_counted_bytes.py).
    """

    def __init__(self) -> None:
        self.sent_bytes = 0.0
        """In messages of 1 KiB or more."""
        self.control_bytes = 0.0
        """In smaller ones."""
        self.by_format: dict[torch.dtype, float] = defaultdict(float)
        """In messages of all sizes, by the type of their values."""
        self.unknown: set[str] = set()
        """Operations whose bytes are not known, so that the counts are too small."""
        self.gloo_bytes: float | None = 0.0
        """Of all sizes, as gloo sends them; None once another library was asked, or for what is unknown."""
        self._undo = ExitStack()

    def __enter__(self) -> CountedBytes:
        """Listen to this thread and those that autograd starts for it, and to what other threads call."""
        for name in _CALLED_BY_THREADS:
            genuine = getattr(dist, name)
            setattr(dist, name, self._heard(genuine))
            self._undo.callback(setattr, dist, name, genuine)
        self._undo.enter_context(_Listener(self))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self._undo.close()

    def narrow_bytes(self, dtype: torch.dtype) -> float:
        """In floating-point types of fewer bits than this one."""
        return sum(
            sent_bytes
            for kind, sent_bytes in self.by_format.items()
            if kind.is_floating_point and kind.itemsize < dtype.itemsize
        )

    def add(self, namespace: str, name: str, args: Any) -> None:
        """Count an operation of torch.distributed."""
        share = _SHARES.get(name)
        if share is None:
            if name not in _SENDS_NOTHING:
                self.unknown.add(f"{namespace}::{name}")
                self.gloo_bytes = None
            return
        ranks, rank = _group(namespace, args)
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args[share.argument]))
        # c10d::broadcast_(tensors, group, root, …) and _c10d_functional::broadcast(tensor, root, group)
        root = 1 if share.root is not None and namespace == "_c10d_functional" else share.root
        sends = root is None or args[root] == rank
        sent_bytes = size_bytes * share.of(ranks) if sends else 0.0
        if name == "alltoall_base" and args[4]:  # unequal parts: all but the rank's own
            sent_bytes = size_bytes * (1 - args[4][rank] / max(1, sum(args[4])))
        for tensor in _tensors(args[share.argument]):
            self.by_format[tensor.dtype] += sent_bytes * tensor.nbytes / max(1, size_bytes)
        if size_bytes < _CONTROL_BYTES:
            self.control_bytes += sent_bytes
        else:
            self.sent_bytes += sent_bytes
        on_gloo = all(tensor.device.type == "cpu" for tensor in _tensors(args[share.argument]))
        if self.gloo_bytes is not None:
            self.gloo_bytes = self.gloo_bytes + sent_bytes * (_ON_GLOO.get(name, 1.0)) if on_gloo else None

    def _heard(self, genuine: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(genuine)
        def heard(*args: Any, **kwargs: Any) -> Any:
            # torch gives the modes of this thread to those in which autograd works for it: one for each GPU.
            if any(isinstance(mode, _Listener) for mode in _get_current_dispatch_mode_stack()):
                return genuine(*args, **kwargs)
            with _Listener(self):
                return genuine(*args, **kwargs)

        return heard


class _Listener(TorchDispatchMode):
    """Hears the operations of one thread."""

    def __init__(self, counted: CountedBytes) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and count it where it is one of torch.distributed."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._counted.add(func.namespace, func._schema.name.partition("::")[2].strip("_"), args)
        return func(*args, **(kwargs or {}))


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

_SENDS_NOTHING = {
    *("barrier", "monitored_barrier", "check_for_nan", "wait_tensor", "wait_tensors", "wrap_tensor_autograd"),
    *("recv", "recv_any_source", "irecv"),
}
"""Likewise. What is in neither list is unknown: a result that lacks its bytes would look like a strategy's fault."""


_ON_GLOO = {name: 2.0 for name in _SHARES if name.startswith("reduce_scatter")}
"""How many times the bytes above gloo sends: it carries a reduce-scatter out as an all-reduce."""


def _tensors(message: Any) -> list[torch.Tensor]:
    if isinstance(message, torch.Tensor):
        return [message]
    return [tensor for part in message for tensor in _tensors(part)]


def _group(namespace: str, args: Any) -> tuple[int, int]:
    """The number of ranks of the operation's group, and this rank among them."""
    if namespace == "_c10d_functional":
        group = dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
    else:
        boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
    return group.size(), group.rank()
