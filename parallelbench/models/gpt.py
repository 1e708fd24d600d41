"""Decoder-only transformers in the shape of GPT-2 (Radford et al. 2019) or of Llama (arXiv 2302.13971)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from parallelbench.config.components import Anatomy, Kind, Linears, Model, Split, Vocabulary
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


Positions = Literal["learned", "rope"]
Mlp = Literal["gelu", "swiglu"]


class Gpt(Model, frozen=True, kw_only=True):
    """Pre-norm blocks of causal attention and a perceptron, over tokens; no dropout.

    One linear layer gives queries, keys and values, head by head, so that it can be sharded by heads. With
    `positions=learned` norms are LayerNorm and linear layers have biases (the gate of swiglu and the head have none),
    as in GPT-2; with `positions=rope` norms are RMSNorm and there are no biases, as in Llama. The number of parameters
    is the advisor's formula for the same options.
    """

    takes: ClassVar[tuple[Kind, ...]] = ("tokens",)
    predicts_positions: ClassVar[bool] = True

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

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`embed`, `block1` …, `head`."""
        return ("embed", *(f"block{i + 1}" for i in range(self.layers)), "head")

    def anatomy(self) -> Anatomy:
        """Attention by heads, the perceptrons by hidden units; embedding and head may share their weights."""
        columns = ["attention.qkv", "fc1"]
        if self.mlp == "swiglu":
            columns.append("gate")
        plan: dict[str, Split] = {f"block*.{name}": "column" for name in columns}
        plan |= {"block*.attention.out": "row", "block*.fc2": "row"}
        return Anatomy(
            Linears(
                plan,
                units=math.gcd(self.key_heads, self.hidden_units),  # heads of keys and values divide those of queries
                limits=f"{self._heads}, {self.hidden_units} hidden units",
            ),
            Vocabulary(self.vocabulary, {"embed.tokens": "row", "head.linear": "column"}),
            tied=("embed", "head") if self.tied else (),
            attention="block*.attention",
            token_heads=(self.heads, self.key_heads),
            sequence_norms=("block*.norm1", "block*.norm2", "head.norm"),
        )

    @property
    def _heads(self) -> str:
        return f"model.heads={self.heads}, model.kv_heads={self.key_heads}"

    @property
    def token_weights(self) -> int:
        """Weights of a block's perceptron that each token is multiplied by."""
        return (3 if self.mlp == "swiglu" else 2) * self.width * self.hidden_units

    def mlp_parameters(self, hidden_units: int) -> int:
        """Of a perceptron with so many hidden units."""
        matrices = (3 if self.mlp == "swiglu" else 2) * self.width * hidden_units
        return matrices + (hidden_units + self.width if self.positions == "learned" else 0)

    @property
    def block_mlp_parameters(self) -> int:
        """Of what a block has besides attention and norms: here of its perceptron."""
        return self.mlp_parameters(self.hidden_units)

    @property
    def parameters(self) -> int:
        """Of the whole model, by formula."""
        learned = self.positions == "learned"
        norm = self.width * (2 if learned else 1)
        key_width = self.width // self.heads * self.key_heads
        attention = 2 * (self.width + key_width) * (self.width + (1 if learned else 0))
        ends = self.vocabulary * self.width * (1 if self.tied else 2) + (self.sequence * self.width if learned else 0)
        return ends + norm + self.layers * (2 * norm + attention + self.block_mlp_parameters)

    def check(self, *, in_channels: int, image_size: int) -> None:
        """Refuse data with more different tokens than the embedding has, and samples beyond the positions."""
        if in_channels > self.vocabulary:
            raise ConfigError(
                f"model.vocabulary={self.vocabulary} is smaller than that of the data, {in_channels}: choose "
                f"model.vocabulary={in_channels} or more"
            )
        if image_size > self.sequence:
            raise ConfigError(
                f"samples of {image_size} tokens reach beyond the positions of model={self.name}, "
                f"model.sequence={self.sequence}: choose model.sequence={image_size}, or "
                f"data.sequence={self.sequence} or fewer"
            )

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """Build the layers, with a logit for each entry of the vocabulary; raises `ConfigError` where `check` does."""
        self.check(in_channels=in_channels, image_size=image_size)
        from parallelbench.models.gpt_layers import DecoderBlock, new_layers
        from parallelbench.models.modules import sequence

        layers = new_layers(self, lambda _, rotary: DecoderBlock(self, rotary))
        return sequence(self.layer_names, layers)


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
