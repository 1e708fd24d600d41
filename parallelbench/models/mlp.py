"""Multilayer perceptrons, and the one without hidden layers: multinomial logistic regression."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Anatomy, Kind, Linears, Model, Split
from parallelbench.config.structure import Count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class Mlp(Model, frozen=True, kw_only=True):
    """Dense layers with ReLU after all but the last.

    With `hidden: [512, 256, 128]` and images of 32×32×1 it is the 1024-512-256-128-10 network of the tutorial
    "Model Parallelism vs Data Parallelism: Examples", which puts fc1 and fc4 on one
    device, fc2 and fc3 on another.
    """

    takes: ClassVar[tuple[Kind, ...]] = ("images", "vectors")

    hidden: Counts
    """Widths of the hidden layers, first to last."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`fc1`, `fc2`, …: one more than there are hidden layers; the first one flattens."""
        return tuple(f"fc{i + 1}" for i in range(len(self.hidden) + 1))

    def anatomy(self) -> Anatomy:
        """Layers in pairs, the first of each by outputs; without the last where their number is odd."""
        return Anatomy(Linears(dense_plan(self.layer_names), units=math.gcd(*self.hidden[::2])))

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """Build the layers; takes images of any size."""
        from parallelbench.models.modules import dense_stack, sequence

        widths = [in_channels * image_size**2, *self.hidden, num_classes]
        return sequence(self.layer_names, dense_stack(widths))


class LogisticRegression(Model, frozen=True, kw_only=True):
    """One linear layer over the pixels, or features; the softmax is in the loss."""

    takes: ClassVar[tuple[Kind, ...]] = ("images", "vectors")

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The one layer, `fc1`: no layer-wise strategy can cut it."""
        return ("fc1",)

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """Build the layer; takes images of any size."""
        from parallelbench.models.modules import dense_stack, sequence

        return sequence(self.layer_names, dense_stack([in_channels * image_size**2, num_classes]))


Counts = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=1000)]
"""One or more whole numbers of at least 1, in the order of the layers."""


def dense_plan(names: Sequence[str]) -> dict[str, Split]:
    """Tensor plan of consecutive `Dense` layers: in pairs, by outputs and then by inputs; an odd one stays whole."""
    plan: dict[str, Split] = {}
    for first, second in zip(names[::2], names[1::2], strict=False):
        plan[f"{first}.linear"], plan[f"{second}.linear"] = "column", "row"
    return plan
