"""The layers of vision transformers: the suite's own, and torchvision's taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from torchvision.models import VisionTransformer


class Embed(nn.Module):
    """Patches as tokens behind a class token: (batch, channels, n, n) → (batch, 1 + patches, dim)."""

    def __init__(self, patches: nn.Conv2d, *, class_token: nn.Parameter, positions: nn.Parameter) -> None:
        super().__init__()
        self.patches = patches
        self.class_token = class_token
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        """Project the patches, add the class token and the positions."""
        tokens: Tensor = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(x), -1, -1), tokens], dim=1) + self.positions


class Attention(nn.Module):
    """Multi-head self-attention: (batch, tokens, dim) → (batch, tokens, dim).

    Only the width of a head is fixed, not their number: a shard of `query`, `key`, `value` holds whole heads.
    """

    def __init__(self, dim: int, *, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every token to every token."""
        y: Tensor = self.out(self.attend(self.query(x), self.key(x), self.value(x)))
        return y

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What lies between the linear layers: (batch, tokens, heads × head_dim) each, the same back."""
        q, k, v = self._split(query), self._split(key), self._split(value)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def _split(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads × head_dim) → (batch, heads, tokens, head_dim)."""
        return x.reshape(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, dim: int, *, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads=heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1 = nn.Linear(dim, mlp_ratio * dim)
        self.fc2 = nn.Linear(mlp_ratio * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) → (batch, tokens, dim)."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return y


class TokenHead(nn.Module):
    """The class token's logits: (batch, tokens, dim) → (batch, classes)."""

    def __init__(self, norm: nn.LayerNorm, linear: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and classify the class token; no other token enters its norm."""
        logits: Tensor = self.linear(self.norm(x[:, 0]))
        return logits


def new_embed(in_channels: int, dim: int, *, patch_size: int, patches: int) -> Embed:
    """Return an embedding of `patches` patches."""
    return Embed(
        nn.Conv2d(in_channels, dim, patch_size, stride=patch_size),
        class_token=nn.Parameter(torch.zeros(1, 1, dim)),
        positions=nn.Parameter(torch.empty(1, 1 + patches, dim).normal_(std=0.02)),
    )


def new_head(dim: int, num_classes: int) -> TokenHead:
    """Return a head for tokens of width `dim`."""
    return TokenHead(nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, num_classes))


def initialise(model: nn.Module) -> None:
    """Draw the linear layers as the original does: Xavier-uniform weights; biases start at zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def cut(whole: VisionTransformer) -> list[nn.Module]:
    """Take torchvision's vision transformer (without dropout) apart into embedding, blocks and head."""
    encoder = whole.encoder
    embed = Embed(whole.conv_proj, class_token=whole.class_token, positions=encoder.pos_embedding)
    return [embed, *encoder.layers, TokenHead(encoder.ln, whole.heads.head)]
