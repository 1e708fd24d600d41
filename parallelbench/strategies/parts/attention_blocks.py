"""Attention in blocks: of some queries to some keys, with what joins the results of several blocks exactly.

With each block comes the logarithm of its softmax's denominator (log-sum-exp, Dao et al. 2022, arXiv 2205.14135). So
results of the same queries are merged as if all keys had been there at once (Liu et al. 2023, arXiv 2310.01889), and
each block's gradients follow from the merged result alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    Three = tuple[Tensor, Tensor, Tensor]

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
