"""The layers of decoder-only transformers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.models.gpt import Gpt

_BASE = 10_000.0
"""Of the rotary positions' wavelengths."""
STD = 0.02
"""Of GPT-2's initial weights."""


class TokenEmbed(nn.Module):
    """Tokens as vectors, with learned positions where there are: (batch, tokens) → (batch, tokens, width)."""

    def __init__(self, options: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        if options.positions == "learned":
            self.positions = nn.Parameter(torch.empty(options.sequence, options.width).normal_(std=STD))
        else:
            self.register_parameter("positions", None)
        self.places: Tensor | None = None
        """Where in the sequence the tokens stand, for who holds only a part of it; None: from 0 on."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Look the tokens up, add the positions."""
        values: Tensor = self.tokens(tokens)
        if self.positions is None:
            return values
        return values + (self.positions[: tokens.shape[1]] if self.places is None else self.positions[self.places])


class CausalAttention(nn.Module):
    """Multi-head attention to earlier tokens: (batch, tokens, width) → (batch, tokens, width).

    One linear layer gives queries, keys and values, as in nanoGPT: of each head of keys its queries, its keys and its
    values, one behind the other. So a shard of its rows holds whole heads (Shoeybi et al. 2019, arXiv 1909.08053), for
    only their width is fixed, and not their number.
    """

    def __init__(self, options: Gpt, rotary: Rotary | None) -> None:
        """`rotary`: one for all layers of a model; None: positions are learned."""
        super().__init__()
        width, biases = options.width, options.positions == "learned"
        self.head_width, self.rotary = width // options.heads, rotary
        self.sharing = options.heads // options.key_heads
        """Heads of queries for each head of keys and values."""
        self.qkv = nn.Linear(width, width + 2 * self.head_width * options.key_heads, bias=biases)
        self.out = nn.Linear(width, width, bias=biases)
        self.join: Callable[[Tensor, Tensor, Tensor], Tensor] = attended
        """What joins the tokens, of queries, keys and values; others take its place where ranks hold parts of them."""
        self.places: Tensor | None = None
        """As in `TokenEmbed`."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every token to itself and those before it."""
        y: Tensor = self.out(self.attend(self.qkv(x)))
        return y

    def attend(self, qkv: Tensor) -> Tensor:
        """What lies between the linear layers: (batch, tokens, all heads × head_width) → the same of queries alone."""
        batch, tokens, width = qkv.shape  # a rank's part of the last test samples may be empty
        of_each = self.sharing + 2
        heads = qkv.view(batch, tokens, width // (of_each * self.head_width), of_each, self.head_width)
        q, k, v = (part.flatten(2, 3) for part in heads.split([self.sharing, 1, 1], dim=3))
        if self.rotary is None and self.sharing > 1:
            q = q.contiguous()  # or backward would keep keys and values beside those that are repeated
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.rotary is not None:
            tables = self.rotary.tables(q, self.places)
            q, k = turned(q, *tables), turned(k, *tables)
            v = v.contiguous()  # or backward would keep the queries and keys as they were, too
        return self.join(q, k, v).transpose(1, 2).flatten(2)


class DecoderBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, options: Gpt, rotary: Rotary | None) -> None:
        super().__init__()
        width, hidden, biases = options.width, options.hidden_units, options.positions == "learned"
        self.norm1, self.attention = new_norm(options), CausalAttention(options, rotary)
        self.norm2 = new_norm(options)
        self.fc1 = nn.Linear(width, hidden, bias=biases)
        self.gate = nn.Linear(width, hidden, bias=False) if options.mlp == "swiglu" else None
        self.fc2 = nn.Linear(hidden, width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → (batch, tokens, width)."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        hidden = F.gelu(self.fc1(y)) if self.gate is None else F.silu(self.gate(y)) * self.fc1(y)
        result: Tensor = x + self.fc2(hidden)
        return result


class VocabularyHead(nn.Module):
    """The next token's logits for every token: (batch, tokens, width) → (batch, tokens, vocabulary)."""

    def __init__(self, options: Gpt) -> None:
        super().__init__()
        self.norm = new_norm(options)
        self.linear = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and classify every token."""
        logits: Tensor = self.linear(self.norm(x))
        return logits


def new_norm(options: Gpt) -> nn.Module:
    """GPT-2's norm, or Llama's."""
    if options.positions == "learned":
        return nn.LayerNorm(options.width, eps=1e-5)
    return nn.RMSNorm(options.width, eps=1e-5)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: (batch, heads, tokens, head_width) three times; keys and values may have fewer heads."""
    if (times := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


Tables = tuple[Tensor, Tensor]
"""Cosines, and sines that are negative in the first half: (tokens, head_width) each."""


class Rotary:
    """The tables of rotary positions, which the layers of a model share and compute in their first pass only.

    No buffers: nothing has to be sent, stored or converted. They are computed in the dtype in which they are used.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tables] = {}
        """One process may drive several devices, and evaluate in another dtype."""

    def tables(self, x: Tensor, places: Tensor | None) -> Tables:
        """Those of (batch, heads, tokens, head_width); `places`: the tokens' positions, None: from 0 on.

        A compiler merges the layers' tables itself; tensors without values are gone after their pass.
        """
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return rotary_tables(x, places)
        key = (x.device, _wide(x), *x.shape[-2:], places)
        if (found := self._kept.get(key)) is None:
            with torch.inference_mode(False):
                found = self._kept[key] = rotary_tables(x, places)
        return found


def rotary_tables(x: Tensor, places: Tensor | None = None) -> Tables:
    """Of the angles position × 10000^(−i ÷ half), computed in fp32 or better."""
    half, wide = x.shape[-1] // 2, _wide(x)
    wavelengths = torch.arange(half, device=x.device, dtype=wide).mul_(-math.log(_BASE) / half).exp_()
    positions = torch.arange(x.shape[-2], device=x.device, dtype=wide) if places is None else places.to(wide)
    angles = positions[:, None] * wavelengths
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pairs (x[i], x[i + half]) of each head turned by their positions' angles, in fp32 or better.

    Maps (batch, heads, tokens, head_width) to the same shape.
    """
    values = x.to(cosine.dtype)
    first, second = values.chunk(2, dim=-1)
    return (torch.cat([second, first], dim=-1) * sine + values * cosine).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def new_layers(options: Gpt, new_block: Callable[[int, Rotary | None], nn.Module]) -> list[nn.Module]:
    """Embedding, blocks and head, as GPT-2 draws them. `new_block` gets the block's number and the positions."""
    embed, head = TokenEmbed(options), VocabularyHead(options)
    rotary = Rotary() if options.positions == "rope" else None
    layers = [embed, *(new_block(index, rotary) for index in range(options.layers)), head]
    for layer in layers:
        initialise(layer, options)
    if options.tied:
        head.linear.weight = embed.tokens.weight
    return layers


def initialise(layer: nn.Module, options: Gpt) -> None:
    """Normal weights, narrower by √(2 · layers) where they add to the residual stream; biases start at zero."""
    for name, module in layer.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            adds = name.endswith(("attention.out", "fc2"))
            nn.init.normal_(module.weight, std=STD / math.sqrt(2 * options.layers) if adds else STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
