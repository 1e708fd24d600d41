"""Attention by heads: all-to-alls give each rank all tokens for a share of the heads, and take the results back.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallelbench.models.gpt_layers import attended

if TYPE_CHECKING:
    from torch import Tensor

    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.parts.context_group import ContextGroup


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
