"""Attention to tokens on several ranks: keys and values go round a ring or are gathered, or heads are exchanged.

Ring: keys and values go round the ranks, each of which attends to what it holds at the moment (Liu et al. 2023,
arXiv 2310.01889). Of 2n pieces of the sequence rank r holds those numbered r and 2n − 1 − r (zig-zag): so all ranks
have equally much to do below the diagonal, and no block needs a mask besides the one of a rank's own keys.

Gathering: every rank gathers all keys and values, and attends from its own tokens; their gradients are summed by a
reduce-scatter, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2). Backward gathers keys and values again: kept,
they would be those of the whole sequence, of each layer, on every rank. Ranks hold the pieces that they hold in a ring.

HeadExchange: all-to-alls give each rank all tokens for a share of the heads, and take the results back, as
DeepSpeed-Ulysses does (Jacobs et al. 2023, arXiv 2309.14509).

While a block is computed, the next one's keys and values are on their way (`blocks.py` has the blocks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallelbench.models.gpt_layers import attended
from parallelbench.strategies.autograd import exchanged
from parallelbench.strategies.context.blocks import Merged, block, block_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.context.tokens import ContextGroup


class Ring:
    """The ranks of a sequence, each of which sends to the next one."""

    def __init__(self, context: ContextGroup, traffic: Traffic) -> None:
        self.rank, self.ranks, self._group, self._traffic = context.rank, context.size, context.group, traffic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, own tokens, head_width) three times → the first one's shape."""
        result: Tensor = RingAttention.apply(_by_token(q), torch.stack([k, v]), self)
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


class RingAttention(torch.autograd.Function):
    """Causal attention of a rank's queries to all keys, which come round the ring."""

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
        ring, gradient = ctx.ring, _by_token(gradients[0])
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
            of_queries[:, :, queries].add_(more)  # `+=` would also copy the sum to itself
            following = torch.zeros_like(held) if followed is None else followed()
            following[:, :, :, keys].add_(torch.stack(of_held))
            followed = ring.pass_on(following)
        assert followed is not None, "a ring has two ranks or more"
        return of_queries.to(q.dtype), torch.stack(of_own) + followed(), None


class Gathering:
    """The ranks of a sequence, which hold its pieces in zig-zag order."""

    def __init__(self, context: ContextGroup, traffic: Traffic) -> None:
        self._rank, self._ranks, self._group, self._traffic = context.rank, context.size, context.group, traffic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, own tokens, head_width) three times → the first one's shape."""
        result: Tensor = GatheredAttention.apply(_by_token(q), torch.stack([k, v]), self)
        return result

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        """Start to gather keys and values, (2, batch, heads, tokens, head_width); returns what waits for them.

        They are those of all ranks, in the order of the sequence.
        """
        parts = own.new_empty(self._ranks, *own.shape)
        work = dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=self._group, async_op=True)
        self._traffic.all_gather("activation", parts.nbytes, self._ranks)
        assert work is not None

        def gathered() -> Tensor:
            work.wait()
            first, second = parts.chunk(2, dim=4)
            return torch.cat([*first, *second.flip(0)], dim=3)

        return gathered

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


class GatheredAttention(torch.autograd.Function):
    """Causal attention of a rank's queries to all keys, which it gathers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, own: Tensor, ranks: Gathering) -> Tensor:
        """`own`: this rank's keys and values."""
        gathered = ranks.gather(own)
        merged = Merged(*block(q, *own, causal=True))
        whole = gathered()
        del gathered  # what arrived, in another order
        for queries, keys in ranks.seen(q.shape[2] // 2):
            merged.add(queries, *block(q[:, :, queries], *whole[:, :, :, keys], causal=False))
        result, normaliser = merged.taken(q.dtype)
        ctx.save_for_backward(q, own, result, normaliser)
        ctx.ranks = ranks
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gather keys and values again; each rank sums what all have found for its own."""
        q, own, result, normaliser = ctx.saved_tensors
        gathered, gradient = ctx.ranks.gather(own), _by_token(gradients[0])
        first, *of_own = block_gradients(gradient, (q, *own), (result, normaliser), causal=True)
        whole = gathered()
        del gathered  # what arrived, in another order
        of_queries = first.to(torch.promote_types(q.dtype, torch.float32))
        of_whole = torch.zeros_like(whole)
        for queries, keys in ctx.ranks.seen(q.shape[2] // 2):
            merged = result[:, :, queries], normaliser[:, :, queries]
            inputs = (q[:, :, queries], *whole[:, :, :, keys])
            more, *of_seen = block_gradients(gradient[:, :, queries], inputs, merged, causal=False)
            of_queries[:, :, queries].add_(more)  # `+=` would also copy the sum to itself
            of_whole[:, :, :, keys].add_(torch.stack(of_seen))
        return of_queries.to(q.dtype), torch.stack(of_own) + ctx.ranks.summed(of_whole), None


def _by_token(values: Tensor) -> Tensor:
    """(batch, heads, tokens, head_width) with a token's heads side by side: so kernels take it without a copy, and who
    keeps queries doesn't keep the keys and values beside them.
    """
    return values.transpose(1, 2).contiguous().transpose(1, 2)


class HeadExchange:
    """Causal attention of tokens that ranks hold consecutive parts of, for whole heads on each rank."""

    def __init__(self, context: ContextGroup, traffic: Traffic) -> None:
        """`context`: of as many ranks as divide the heads of queries."""
        self._ranks, self._group, self._traffic = context.size, context.group, traffic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, own tokens, head_width) three times → the first one's shape."""
        if k.shape[1] % self._ranks:  # too few heads of keys and values to share out: one for each of the queries'
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        # One message holds the heads of queries, keys and values that a rank gets.
        shares = [each.unflatten(1, (self._ranks, -1)) for each in (q, k, v)]
        received = self._exchanged(torch.cat(shares, dim=2).transpose(0, 1))
        q, k, v = received.movedim(0, 2).flatten(2, 3).split([share.shape[2] for share in shares], dim=1)
        results = self._exchanged(attended(q, k, v).unflatten(2, (self._ranks, -1)).movedim(2, 0))
        return results.transpose(0, 1).flatten(1, 2)

    def _exchanged(self, values: Tensor) -> Tensor:
        """The i-th of `values` goes to rank i; the i-th of the result comes from it. Gradients go back."""
        return exchanged(values, there=self._sent, back=self._sent)

    def _sent(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values, group=self._group)
        self._traffic.send("activation", values.nbytes * (self._ranks - 1) / self._ranks)
        return received
