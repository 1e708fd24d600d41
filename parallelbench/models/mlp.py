"""A multilayer perceptron."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import (
    Kind,
    Model,
    Split,
)
from parallelbench.models.options import Counts, dense_plan

if TYPE_CHECKING:
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

    def tensor_plan(self) -> dict[str, Split]:
        """Layers in pairs, the first of each by outputs; without the last where their number is odd."""
        return dense_plan(self.layer_names)

    @property
    def tensor_units(self) -> int:
        """Every other hidden layer is split."""
        return math.gcd(*self.hidden[::2])

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """Build the layers; takes images of any size."""
        from parallelbench.models.modules import dense_stack, sequence

        widths = [in_channels * image_size**2, *self.hidden, num_classes]
        return sequence(self.layer_names, dense_stack(widths))
