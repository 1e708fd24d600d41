"""Multinomial logistic regression: the smallest model there is, for communication-bound runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import (
    Kind,
    Model,
)

if TYPE_CHECKING:
    from torch import nn


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
