"""Attention to tokens on several ranks: keys and values go round a ring or are gathered, or heads are exchanged.

Ring: keys and values go round the ranks, each of which attends to what it holds at the moment (Liu et al. 2023,
arXiv 2310.01889). Of 2n pieces of the sequence rank r holds those numbered r and 2n − 1 − r (zig-zag): so all ranks
have equally much to do below the diagonal, and no block needs a mask besides the one of a rank's own keys.

Gathering: every rank gathers all keys and values, and attends from its own tokens; their gradients are summed by a
reduce-scatter, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2). Backward gathers keys and values again: kept,
they would be those of the whole sequence, of each layer, on every rank. Ranks hold the pieces that they hold in a ring.

HeadExchange: all-to-alls give each rank all tokens for a share of the heads, and take the results back, as
DeepSpeed-Ulysses does (Jacobs et al. 2023, arXiv 2309.14509).

Blocks are attention of some queries to some keys. With each comes the logarithm of its softmax's denominator
(log-sum-exp, Dao et al. 2022, arXiv 2205.14135). So results of the same queries are merged as if all keys had been
there at once, and each block's gradients follow from the merged result alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallelbench.models.gpt_layers import attended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.context.replica import ContextGroup

    Three = tuple[Tensor, Tensor, Tensor]


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
        """The i-th of `values` goes to rank i; the i-th of the result comes from it."""
        received: Tensor = _AllToAll.apply(values, self)
        return received

    def sent(self, values: Tensor) -> Tensor:
        """The same, as autograd does not see it."""
        values = values.contiguous()
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values, group=self._group)
        self._traffic.send("activation", values.nbytes * (self._ranks - 1) / self._ranks)
        return received


class _AllToAll(torch.autograd.Function):
    """Of gradients too: what came from a rank goes back to it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: HeadExchange) -> Tensor:
        ctx.ranks = ranks
        return ranks.sent(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sent(gradients[0]), None


_ROWS = 256
"""Queries whose scores are in memory at a time, where torch has no kernel that keeps them out of it."""


def block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Results, like `q`, and their log-sum-exp of shape (batch, heads, queries), in fp32 or better.

    (batch, heads, tokens, head_width) three times; keys and values may have fewer heads. `causal`: as many queries as
    keys, of which each sees those up to its own.
    """
    k, v = (_for_each(q, heads) for heads in (k, v))
    if q.device.type != "cpu":
        return plain_block(q, k, v, causal=causal)
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return found


def block_gradients(gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], *, causal: bool) -> Three:
    """Of a block's queries, keys and values: `gradient` and `merged` are those of its queries' whole results."""
    q = inputs[0]
    k, v = (_for_each(q, heads) for heads in inputs[1:])
    if q.device.type != "cpu":
        found: Three = plain_gradients(gradient, (q, k, v), merged, causal=causal)
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(gradient, q, k, v, *merged, 0.0, causal)
    of_keys, of_values = (each.unflatten(1, (inputs[1].shape[1], -1)).sum(2) for each in found[1:])
    return found[0], of_keys, of_values


def _for_each(q: Tensor, heads: Tensor) -> Tensor:
    """Keys or values, a head for each of the queries'."""
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1)


class Merged:
    """Results of the same queries, of more and more keys."""

    def __init__(self, result: Tensor, normaliser: Tensor) -> None:
        """Of the first block, which is changed."""
        self._result = result.to(torch.promote_types(result.dtype, torch.float32))
        self._normaliser = normaliser

    def add(self, queries: slice, result: Tensor, normaliser: Tensor) -> None:
        """Add a block of some of the queries."""
        own, total = self._result[:, :, queries], self._normaliser[:, :, queries]
        share = torch.sigmoid(normaliser - total)  # of the block, in the denominator of both
        own.lerp_(result.to(own.dtype), share.unsqueeze(-1).to(own.dtype))
        total.copy_(torch.logaddexp(total, normaliser))

    def taken(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Results and their log-sum-exp."""
        return self._result.to(dtype), self._normaliser


def plain_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """`block` by plain products, for any device and dtype."""
    results, normalisers = [], []
    with torch.autocast(q.device.type, enabled=False):
        for rows in _pieces(q):
            scores = _scores(q, k, rows, causal=causal)
            normalisers.append(scores.logsumexp(dim=-1))
            results.append((scores - normalisers[-1].unsqueeze(-1)).exp() @ v.to(scores.dtype))
    return torch.cat(results, dim=2).to(q.dtype), torch.cat(normalisers, dim=2)


def plain_gradients(gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], *, causal: bool) -> Three:
    """`block_gradients` likewise; keys and values have as many heads as queries."""
    q, k, v = inputs
    wide = torch.promote_types(q.dtype, torch.float32)
    of_queries, of_keys, of_values = (torch.zeros_like(each, dtype=wide) for each in inputs)
    k_wide, v_wide, scale = k.to(wide), v.to(wide), 1 / math.sqrt(q.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        for rows in _pieces(q):
            own, result = (each[:, :, rows].to(wide) for each in (gradient, merged[0]))
            shares = (_scores(q, k, rows, causal=causal) - merged[1][:, :, rows].unsqueeze(-1)).exp()
            of_values += shares.transpose(-1, -2) @ own
            common = (own * result).sum(-1, keepdim=True)
            of_scores = shares * (own @ v_wide.transpose(-1, -2) - common) * scale
            of_queries[:, :, rows] = of_scores @ k_wide
            of_keys += of_scores.transpose(-1, -2) @ q[:, :, rows].to(wide)
    return of_queries.to(q.dtype), of_keys.to(k.dtype), of_values.to(v.dtype)


def _pieces(q: Tensor) -> list[slice]:
    """Of the queries."""
    return [slice(first, first + _ROWS) for first in range(0, q.shape[2], _ROWS)]


def _scores(q: Tensor, k: Tensor, rows: slice, *, causal: bool) -> Tensor:
    """Of some queries and all keys, in fp32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    some = q[:, :, rows].to(wide)
    scores = some @ k.to(wide).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + rows.start)
        scores = scores.masked_fill(later, -math.inf)
    return scores
