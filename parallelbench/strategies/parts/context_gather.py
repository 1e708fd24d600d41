"""Attention to gathered keys and values, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2).

Every rank gathers all keys and values, and attends from its own tokens; their gradients are summed by a reduce-scatter.
Backward gathers keys and values again: kept, they would be those of the whole sequence, of each layer, on every rank.
Ranks hold the pieces of the sequence that they hold in a ring (`parallelbench/strategies/parts/context_ring.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallelbench.strategies.parts.attention_blocks import Merged, block, block_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.parts.context_group import ContextGroup


class Gathering:
    """The ranks of a sequence, which hold its pieces in zig-zag order."""

    def __init__(self, context: ContextGroup, traffic: Traffic) -> None:
        self._rank, self._ranks, self._group, self._traffic = context.rank, context.size, context.group, traffic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, own tokens, head_width) three times → the first one's shape."""
        result: Tensor = _GatheredAttention.apply(q, torch.stack([k, v]), self)
        return result

    def gathered(self, own: Tensor) -> Tensor:
        """Keys and values, (2, batch, heads, tokens, head_width), of all ranks in the order of the sequence."""
        parts = own.new_empty(self._ranks, *own.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=self._group)
        self._traffic.all_gather("activation", parts.nbytes, self._ranks)
        first, second = parts.chunk(2, dim=4)
        return torch.cat([*first, *second.flip(0)], dim=3)

    def summed(self, whole: Tensor) -> Tensor:
        """The opposite: of what each rank has of the whole sequence, the sum of this rank's pieces."""
        pieces = whole.chunk(2 * self._ranks, dim=3)
        pairs = zip(pieces[: self._ranks], pieces[: self._ranks - 1 : -1], strict=True)
        parts = torch.stack([torch.cat(pair, dim=3) for pair in pairs])
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=self._group)
        self._traffic.reduce_scatter("activation", parts.nbytes, self._ranks)
        return own

    def seen(self, half: int) -> Iterator[tuple[slice, slice]]:
        """Own queries, and others' keys in the sequence's order, that see each other: all of those to all of these."""
        first, second = self._rank * half, (2 * self._ranks - 1 - self._rank) * half
        if first:
            yield slice(None), slice(0, first)
        if first + half < second:
            yield slice(half, None), slice(first + half, second)


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, own: Tensor, ranks: Gathering) -> Tensor:
        """`own`: this rank's keys and values."""
        whole = ranks.gathered(own)
        merged = Merged(*block(q, *own, causal=True))
        for queries, keys in ranks.seen(q.shape[2] // 2):
            merged.add(queries, *block(q[:, :, queries], *whole[:, :, :, keys], causal=False))
        result, normaliser = merged.taken(q.dtype)
        ctx.save_for_backward(q, own, result, normaliser)
        ctx.ranks = ranks
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        q, own, result, normaliser = ctx.saved_tensors
        gradient, whole = gradients[0].contiguous(), ctx.ranks.gathered(own)
        first, *of_own = block_gradients(gradient, (q, *own), (result, normaliser), causal=True)
        of_queries = first.to(torch.promote_types(q.dtype, torch.float32))
        of_whole = torch.zeros_like(whole)
        for queries, keys in ctx.ranks.seen(q.shape[2] // 2):
            merged = result[:, :, queries], normaliser[:, :, queries]
            inputs = (q[:, :, queries], *whole[:, :, :, keys])
            more, *of_seen = block_gradients(gradient[:, :, queries], inputs, merged, causal=False)
            of_queries[:, :, queries] += more
            of_whole[:, :, :, keys] += torch.stack(of_seen)
        return of_queries.to(q.dtype), torch.stack(of_own) + ctx.ranks.summed(of_whole), None
