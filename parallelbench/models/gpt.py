"""Decoder-only transformers in the shape of GPT-2 (Radford et al. 2019) or of Llama (arXiv 2302.13971)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import (
    Kind,  # noqa: TC001 - msgspec reads the annotations
    Split,  # noqa: TC001 - msgspec reads the annotations
)
from parallelbench.errors import ConfigError
from parallelbench.models.gpt_options import GptOptions

if TYPE_CHECKING:
    from torch import nn


class Gpt(GptOptions, frozen=True, kw_only=True):
    """Pre-norm blocks of causal attention and a perceptron, over tokens; no dropout.

    Query, key and value are separate linear layers, so that they can be sharded by heads. With `positions=learned`
    norms are LayerNorm and linear layers have biases (the gate of swiglu and the head have none), as in GPT-2; with
    `positions=rope` norms are RMSNorm and there are no biases, as in Llama. The number of parameters is the advisor's
    formula for the same options.
    """

    takes: ClassVar[tuple[Kind, ...]] = ("tokens",)
    predicts_positions: ClassVar[bool] = True
    attention: ClassVar[str] = "block*.attention"

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`embed`, `block1` …, `head`."""
        return ("embed", *(f"block{i + 1}" for i in range(self.layers)), "head")

    @property
    def tied_layers(self) -> tuple[str, ...]:
        """Embedding and head, if they share their weights."""
        return ("embed", "head") if self.tied else ()

    @property
    def token_heads(self) -> tuple[int, int]:
        """Of the attention, the only part in which tokens meet."""
        return self.heads, self.key_heads

    def tensor_plan(self) -> dict[str, Split]:
        """Attention by heads, the perceptrons by hidden units."""
        inner = ["attention.query", "attention.key", "attention.value", "fc1"]
        columns: dict[str, Split] = {f"block*.{name}": "column" for name in inner}
        if self.mlp == "swiglu":
            columns["block*.gate"] = "column"
        return {**columns, "block*.attention.out": "row", "block*.fc2": "row"}

    @property
    def tensor_units(self) -> int:
        """Heads of keys and values, which divide those of queries; they have to divide the hidden units too."""
        return math.gcd(self.key_heads, self.hidden_units)

    @property
    def token_weights(self) -> int:
        """Weights of a block's perceptron that each token is multiplied by."""
        return (3 if self.mlp == "swiglu" else 2) * self.width * self.hidden_units

    @property
    def vocabulary_entries(self) -> int:
        """As the option says."""
        return self.vocabulary

    def vocabulary_plan(self) -> dict[str, Split]:
        """Rows of the embedding and of the head."""
        return {"embed.tokens": "row", "head.linear": "column"}

    @property
    def sequence_norms(self) -> tuple[str, ...]:
        """Those before attention, perceptron and head."""
        return ("block*.norm1", "block*.norm2", "head.norm")

    def flop_per_sample(self, tokens: int) -> float:
        """Floating-point operations of training on a sample, by formula: what model FLOPs utilisation counts.

        Six per parameter of a matrix and token, and attention in full, as in appendix B of PaLM (Chowdhery et al. 2022,
        arXiv 2204.02311); looking up embeddings, norms and biases count nothing.
        """
        attention = 2 * (1 + self.key_heads / self.heads) * self.width**2
        products = 2 * (attention + self.token_weights) + 4 * tokens * self.width
        return 3.0 * tokens * (self.layers * products + 2 * self.width * self.vocabulary)

    @property
    def tensor_limits(self) -> str:
        """What has to be divided."""
        return f"model.heads={self.heads}, model.kv_heads={self.key_heads}, {self.hidden_units} hidden units"

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
        from parallelbench.models.gpt_layers import new_layers
        from parallelbench.models.modules import sequence

        return sequence(self.layer_names, new_layers(self))
