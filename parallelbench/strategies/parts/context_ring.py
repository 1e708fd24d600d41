"""Ring attention: keys and values go round the ranks, each of which attends to what it holds at the moment.

Liu et al. 2023 (arXiv 2310.01889). Of 2n pieces of the sequence rank r holds those numbered r and 2n − 1 − r (zig-zag):
so all ranks have equally much to do below the diagonal, and no block needs a mask besides the one of a rank's own keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallelbench.strategies.parts.attention_blocks import Merged, block, block_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.parts.context_group import ContextGroup


class Ring:
    """The ranks of a sequence, each of which sends to the next one."""

    def __init__(self, context: ContextGroup, traffic: Traffic) -> None:
        self.rank, self.ranks, self._group, self._traffic = context.rank, context.size, context.group, traffic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, own tokens, head_width) three times → the first one's shape."""
        result: Tensor = _RingAttention.apply(q, torch.stack([k, v]), self)
        return result

    def pass_on(self, values: Tensor) -> Callable[[], Tensor]:
        """Start to send `values` to the next rank; returns what waits for those of the rank before."""
        arriving = torch.empty_like(values)
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        operations = [
            dist.P2POp(dist.isend, values, group=self._group, group_peer=after),
            dist.P2POp(dist.irecv, arriving, group=self._group, group_peer=before),
        ]
        works = dist.batch_isend_irecv(operations)
        self._traffic.send("activation", values.nbytes)

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return arriving

        return arrived

    def seen(self, source: int, half: int) -> tuple[slice, slice]:
        """Queries of this rank, and keys of another one, that see each other: all of those to all of these."""
        if source < self.rank:
            return slice(None), slice(0, half)
        return slice(half, None), slice(None)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, own: Tensor, ring: Ring) -> Tensor:
        """`own`: this rank's keys and values."""
        arrived = ring.pass_on(own)
        merged = Merged(*block(q, *own, causal=True))
        for step in range(1, ring.ranks):
            held = arrived()
            if step < ring.ranks - 1:
                arrived = ring.pass_on(held)
            queries, keys = ring.seen((ring.rank - step) % ring.ranks, q.shape[2] // 2)
            merged.add(queries, *block(q[:, :, queries], *held[:, :, :, keys], causal=False))
        result, normaliser = merged.taken(q.dtype)
        ctx.save_for_backward(q, own, result, normaliser)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient of each rank's keys and values follows them, and comes home when all have added to it."""
        q, held, result, normaliser = ctx.saved_tensors
        ring, gradient = ctx.ring, gradients[0].contiguous()
        arrived = ring.pass_on(held)
        first, *of_own = block_gradients(gradient, (q, *held), (result, normaliser), causal=True)
        of_queries = first.to(torch.promote_types(q.dtype, torch.float32))
        followed: Callable[[], Tensor] | None = None
        for step in range(1, ring.ranks):
            held = arrived()
            if step < ring.ranks - 1:
                arrived = ring.pass_on(held)
            queries, keys = ring.seen((ring.rank - step) % ring.ranks, q.shape[2] // 2)
            merged = result[:, :, queries], normaliser[:, :, queries]
            inputs = (q[:, :, queries], *held[:, :, :, keys])
            more, *of_held = block_gradients(gradient[:, :, queries], inputs, merged, causal=False)
            of_queries[:, :, queries] += more
            following = torch.zeros_like(held) if followed is None else followed()
            following[:, :, :, keys] += torch.stack(of_held)
            followed = ring.pass_on(following)
        assert followed is not None, "a ring has two ranks or more"
        return of_queries.to(q.dtype), torch.stack(of_own) + followed(), None
