"""Attention of some queries to some keys, by the kernel that one device's attention takes.

With each block comes the logarithm of its softmax's denominator (log-sum-exp, Dao et al. 2022, arXiv 2205.14135). So
results of the same queries are merged as if all keys had been there at once, in fp32 or better, and each block's
gradients follow from the merged result alone.

torch's fused kernels return the log-sum-exp, and their backward passes take a merged one. Plain products do the same
where there is none for the tensors: of fp64 on GPUs, and of devices without kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Three = tuple[Tensor, Tensor, Tensor]

_ROWS = 256
"""Queries whose scores are in memory at a time, in plain products."""
_FLASH_WIDTH = 8
"""What the width of a head must be a multiple of, for flash attention."""
_EFFICIENT_ROWS = 32
"""What efficient attention fills up the queries' log-sum-exp to a multiple of."""


def block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Results, like `q`, and their log-sum-exp of shape (batch, heads, queries), in fp32 or better.

    (batch, heads, tokens, head_width) three times; keys and values may have fewer heads. `causal`: as many queries as
    keys, of which each sees those up to its own.
    """
    k, v = (_for_each(q, heads) for heads in (k, v))
    return kernel_for(q, k, v, causal=causal).block(q, k, v, causal=causal)


def block_gradients(gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], *, causal: bool) -> Three:
    """Of a block's queries, keys and values: `gradient` and `merged` are those of its queries' whole results."""
    q, *of_fewer = inputs
    k, v = (_for_each(q, heads) for heads in of_fewer)
    kernel = kernel_for(q, k, v, causal=causal)
    of_queries, *of_heads = kernel.gradients(gradient, (q, k, v), merged, causal=causal)
    of_keys, of_values = (_summed(each, like) for each, like in zip(of_heads, of_fewer, strict=True))
    return of_queries, of_keys, of_values


def _for_each(q: Tensor, heads: Tensor) -> Tensor:
    """Keys or values, a head for each of the queries'."""
    times = q.shape[1] // heads.shape[1]
    each: Tensor = heads.repeat_interleave(times, dim=1) if times > 1 else heads
    return each


def _summed(of_each: Tensor, heads: Tensor) -> Tensor:
    """The opposite, of gradients."""
    if of_each.shape[1] == heads.shape[1]:
        return of_each
    summed: Tensor = of_each.unflatten(1, (heads.shape[1], -1)).sum(2)
    return summed


class Kernel(NamedTuple):
    """Attention that returns its log-sum-exp; keys and values have as many heads as queries."""

    name: str
    block: Callable[..., tuple[Tensor, Tensor]]
    """As `block`."""
    gradients: Callable[..., Three]
    """As `block_gradients`."""


def kernel_for(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Kernel:
    """The kernel that `scaled_dot_product_attention` takes for such tensors, or plain products.

    So ranks that exchange keys and values differ from one device in what they exchange, not in how they compute.
    """
    if q.device.type == "cpu":
        return CPU
    if not q.numel():  # a rank's part of the last test samples may be empty
        return PLAIN
    found = _OF_TORCH.get(torch._fused_sdp_choice(q, k, v, is_causal=causal), PLAIN)
    return PLAIN if found is FLASH and q.shape[-1] % _FLASH_WIDTH else found


def _flash_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p=0.0, is_causal=causal)
    return found[0], found[1]


def _flash_gradients(gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], *, causal: bool) -> Three:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return _gradients_by(kernel, gradient, inputs, merged, is_causal=causal)


def _efficient_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal
    )
    return found[0], found[1][:, :, : q.shape[2]]


def _efficient_gradients(gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], *, causal: bool) -> Three:
    q, k, v = inputs
    result, normaliser = merged
    # As its forward pass leaves them: results of a token's heads side by side, infinity for queries that are none.
    filled = F.pad(normaliser, (0, -q.shape[2] % _EFFICIENT_ROWS), value=math.inf)
    *found, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        gradient,
        *(q, k, v),
        attn_bias=None,
        out=result.transpose(1, 2).contiguous().transpose(1, 2),
        logsumexp=filled.contiguous(),
        dropout_p=0.0,
        grad_input_mask=[True, True, True, False],
        is_causal=causal,
        **_no_dropout(q),
    )
    of_queries, of_keys, of_values = found
    return of_queries, of_keys, of_values


def _cudnn_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal
    )
    return found[0], found[1].flatten(2)


def _cudnn_gradients(gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], *, causal: bool) -> Three:
    kernel, (result, normaliser) = torch.ops.aten._scaled_dot_product_cudnn_attention_backward, merged
    return _gradients_by(kernel, gradient, inputs, (result, normaliser.unsqueeze(-1)), attn_bias=None, is_causal=causal)


def _gradients_by(kernel: Any, gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], **options: Any) -> Three:
    """What flash attention's and cuDNN's backward passes have in common."""
    q, k, _ = inputs
    result, normaliser = merged
    found: Three = kernel(
        gradient,
        *inputs,
        *(result, normaliser.contiguous()),  # which is read by its address alone
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        **_no_dropout(q),
        **options,
    )
    return found


def _no_dropout(q: Tensor) -> dict[str, Tensor]:
    """The state of random numbers, which kernels read only where there is dropout."""
    return {name: q.new_empty((), dtype=torch.int64) for name in ("philox_seed", "philox_offset")}


def _cpu_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return found


def _cpu_gradients(gradient: Tensor, inputs: Three, merged: tuple[Tensor, Tensor], *, causal: bool) -> Three:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: Three = kernel(gradient, *inputs, *merged, 0.0, causal)
    return found


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


FLASH = Kernel("flash", _flash_block, _flash_gradients)
EFFICIENT = Kernel("efficient", _efficient_block, _efficient_gradients)
CUDNN = Kernel("cuDNN", _cudnn_block, _cudnn_gradients)
CPU = Kernel("of CPUs", _cpu_block, _cpu_gradients)
PLAIN = Kernel("plain products", plain_block, plain_gradients)
_OF_TORCH = {
    SDPBackend.FLASH_ATTENTION.value: FLASH,
    SDPBackend.EFFICIENT_ATTENTION.value: EFFICIENT,
    SDPBackend.CUDNN_ATTENTION.value: CUDNN,
}
