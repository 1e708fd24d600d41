"""A decoder-only transformer as options describe it: model=gpt model.layers=… model.width=….

The advisor predicts it by formula, on machines and layouts beyond the suite's strategies, experts included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from parallelbench.config.structure import Count, Node, structure
from parallelbench.errors import ConfigError
from parallelbench.models.gpt import check_heads, hidden_units

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "gpt"


class GptShape(Node, frozen=True, kw_only=True):
    """Its options; the defaults are GPT-2's smallest model."""

    layers: Count = 12
    """Blocks of attention and MLP."""
    width: Count = 768
    """Width of the residual stream; a multiple of `heads`."""
    heads: Count = 12
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values; divides `heads`. null: as many."""
    sequence: Count = 1024
    """Tokens of a sample."""
    vocabulary: Count = 50_257
    """Entries of the embedding."""
    positions: Literal["learned", "rope"] = "learned"
    """learned: an embedding, and biases in all linear layers; rope: rotary, no biases."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """gelu: two matrices; swiglu: three, with a gate."""
    mlp_width: Count | None = None
    """Hidden units; null: 4 × width, under swiglu two thirds of that in multiples of 256."""
    tied: bool = True
    """Whether the last layer shares the embedding's weights."""
    experts: Count = 1
    """MLPs of every layer, of which a router chooses; 1: a dense model."""
    top_k: Count = 1
    """Experts that each token visits; at most `experts`."""
    capacity: float = 1.25
    """Tokens that an expert has room for ÷ its even share, from 1 on; without experts it says nothing."""

    def __post_init__(self) -> None:
        """Check what single fields can't say."""
        if self.top_k > self.experts:
            raise ConfigError(f"model.top_k={self.top_k} is more than model.experts={self.experts}: choose fewer")
        if not 1.0 <= self.capacity <= self.experts / self.top_k and self.experts > 1:
            raise ConfigError(
                f"model.capacity={self.capacity:g} is no room for tokens: choose from 1 to "
                f"{self.experts / self.top_k:g}, where every expert has room for all"
            )
        check_heads(self.width, heads=self.heads, kv_heads=self.kv_heads)

    @property
    def hidden_units(self) -> int:
        """Of an MLP."""
        return hidden_units(self.width, mlp=self.mlp, mlp_width=self.mlp_width)

    def columns(self) -> dict[str, float]:
        """As the formulas name it."""
        return {
            "hidden": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads or self.heads,
            "mlp_width": self.hidden_units,
            "gated": float(self.mlp == "swiglu"),
            "tied": float(self.tied),
            "learned": float(self.positions == "learned"),
            "vocabulary": self.vocabulary,
            "sequence": self.sequence,
            "experts": self.experts,
            "top_k": self.top_k,
            "capacity": self.capacity,
            "fused_attention": 1.0,
            "fp8": 0.0,
        }


def gpt_shape(options: Mapping[str, object]) -> GptShape:
    """From `model.…` overrides; raises `ConfigError` that names the key, its value and what is valid."""
    shape: GptShape = structure(dict(options), GptShape, "model")
    return shape
