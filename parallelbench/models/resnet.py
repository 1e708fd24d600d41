"""Residual networks, cut into their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from parallelbench.config.components import Model
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.models.cnn import Norm  # noqa: TC001 - msgspec reads the annotations
from parallelbench.models.mlp import Counts  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from torch import nn


class ResNet(Model, frozen=True, kw_only=True):
    """torchvision's ResNet (He et al. 2016; v1.5: the stride is in the 3×3 convolution), block by block.

    With bottleneck blocks [3, 4, 6, 3], width 64 and the ImageNet stem it is `torchvision.models.resnet50`:
    the same parameters in the same order, drawn alike from the same seed (23,528,522 for 10 classes).
    """

    block: Literal["basic", "bottleneck"]
    """basic: two 3×3 convolutions (ResNet-18, 34). bottleneck: 1×1, 3×3, 1×1 (ResNet-50 and deeper)."""
    blocks: Counts
    """Blocks per stage; every stage but the first halves the image and doubles the channels."""
    width: Count
    """Channels of the stem and of the first stage's 3×3 convolutions."""
    stem: Literal["imagenet", "cifar"]
    """imagenet: 7×7 convolution of stride 2 and max pooling. cifar: 3×3 convolution, no pooling."""
    norm: Norm
    """Normalisation after each convolution."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`stem`, `stage1_block1` …, `head`."""
        blocks = (f"stage{s + 1}_block{b + 1}" for s, count in enumerate(self.blocks) for b in range(count))
        return ("stem", *blocks, "head")

    def least_normalised(self, *, image_size: int) -> int | None:
        """The last stage's map: the ImageNet stem halves images twice, and every stage but the first once."""
        if self.norm == "group":
            return None
        halvings = 2 * (self.stem == "imagenet") + len(self.blocks) - 1
        side = -(-image_size // (1 << halvings))  # every halving rounds up
        return side * side

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """Build the layers; takes images of any size, since every halving rounds up."""
        from parallelbench.models import resnet_layers as layers
        from parallelbench.models.modules import sequence
        from parallelbench.models.norms import norm_layer

        new_norm = norm_layer(self.norm)
        stem = layers.Stem(in_channels, self.width, small_images=self.stem == "cifar", norm=new_norm(self.width))
        blocks, features = layers.residual_blocks(
            bottleneck=self.block == "bottleneck", blocks=self.blocks, width=self.width, norm_layer=new_norm
        )
        model = sequence(self.layer_names, [stem, *blocks, layers.PooledHead(features, num_classes)])
        layers.initialise(model)
        return model
