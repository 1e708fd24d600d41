"""Options of decoder-only transformers, and the sizes that follow from them; loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from parallelbench.config.components import Model
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError

Positions = Literal["learned", "rope"]
Mlp = Literal["gelu", "swiglu"]


class GptOptions(Model, frozen=True, kw_only=True):
    """What a decoder-only transformer is made of."""

    layers: Annotated[int, Meta(ge=1, le=1000)]
    """Blocks of attention and perceptron."""
    width: Count
    """Width of the residual stream; a multiple of `heads`."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None
    """Heads of keys and values; divides `heads` (Ainslie et al. 2023, arXiv 2305.13245). null: as many."""
    sequence: Count
    """Most tokens of a sample: positions that there are."""
    vocabulary: Count
    """Entries of the embedding, and logits of each token; at least those of the data."""
    positions: Positions
    """learned: an embedding of positions. rope: rotary ones (Su et al. 2021, arXiv 2104.09864)."""
    mlp: Mlp
    """gelu: two matrices. swiglu: three, with a gate (Shazeer 2020, arXiv 2002.05202)."""
    mlp_width: Count | None
    """Hidden units; null: 4 × width, under swiglu two thirds of that in multiples of 256."""
    tied: bool
    """Whether the last layer shares the embedding's weights (Press & Wolf 2017, arXiv 1608.05859)."""

    def __post_init__(self) -> None:
        """Check what single fields can't say."""
        check_heads(self.width, heads=self.heads, kv_heads=self.kv_heads)
        if self.positions == "rope" and self.width // self.heads % 2:
            raise ConfigError(
                f"model.positions=rope turns pairs of values, but model.width={self.width} gives each of "
                f"model.heads={self.heads} an odd width of {self.width // self.heads}: choose "
                f"model.width={self.width + self.heads}, or model.positions=learned"
            )

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def hidden_units(self) -> int:
        """Of a perceptron."""
        return hidden_units(self.width, mlp=self.mlp, mlp_width=self.mlp_width)


def check_heads(width: int, *, heads: int, kv_heads: int | None) -> None:
    """Refuse heads of unequal width, and heads of keys and values that can't be shared evenly."""
    if width % heads:
        near = -(-width // heads) * heads
        raise ConfigError(
            f"model.width={width} can't be split into model.heads={heads} of equal width: choose a "
            f"multiple of {heads}, e.g. model.width={near}"
        )
    if kv_heads is not None and heads % kv_heads:
        valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(f"model.kv_heads={kv_heads} does not divide model.heads={heads}: choose {valid}")


def hidden_units(width: int, *, mlp: Mlp, mlp_width: int | None) -> int:
    """Hidden units of a perceptron, as asked for or as usual."""
    if mlp_width is not None:
        return mlp_width
    return 4 * width if mlp == "gelu" else -(-8 * width // 3 // 256) * 256
