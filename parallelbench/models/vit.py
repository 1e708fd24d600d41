"""Vision transformers (Dosovitskiy et al. 2021): one for small images, and torchvision's ViT-B/16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.config.components import Anatomy, Linears, Model, Split
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


class Vit(Model, frozen=True, kw_only=True):
    """A vision transformer whose query, key and value are separate linear layers: they can be sharded.

    Pre-norm blocks, class token, learnt positions, GELU, no dropout.
    """

    patch_size: Count
    """Pixels along one side of a patch; divides the image size."""
    dim: Count
    """Width of a token; a multiple of `heads`."""
    depth: Count
    """Number of blocks."""
    heads: Count
    """Attention heads per block."""
    mlp_ratio: Count
    """Width of a block's hidden layer, in multiples of `dim`."""

    def __post_init__(self) -> None:
        """Check what single fields can't say."""
        if self.dim % self.heads:
            raise ConfigError(
                f"model.dim={self.dim} can't be split into model.heads={self.heads} of equal width: "
                f"choose a multiple of {self.heads}, e.g. model.dim={-(-self.dim // self.heads) * self.heads}"
            )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`embed`, `block1` …, `head`."""
        return _layer_names(self.depth)

    def anatomy(self) -> Anatomy:
        """Attention by heads, the perceptrons by hidden units, which the heads divide, too."""
        plan: dict[str, Split] = {f"block*.attention.{name}": "column" for name in ("query", "key", "value")}
        plan |= {"block*.attention.out": "row", "block*.fc1": "column", "block*.fc2": "row"}
        return Anatomy(Linears(plan, units=self.heads), attention="block*.attention")

    def check(self, *, in_channels: int, image_size: int) -> None:
        patches_per_side(image_size, patch_size=self.patch_size, model=self.name)

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        side = patches_per_side(image_size, patch_size=self.patch_size, model=self.name)
        from parallelbench.models import vit_layers as layers
        from parallelbench.models.modules import sequence

        embed = layers.new_embed(in_channels, self.dim, patch_size=self.patch_size, patches=side**2)
        blocks = [layers.Block(self.dim, heads=self.heads, mlp_ratio=self.mlp_ratio) for _ in range(self.depth)]
        model = sequence(self.layer_names, [embed, *blocks, layers.new_head(self.dim, num_classes)])
        layers.initialise(model)
        return model


class VitB16(Model, frozen=True, kw_only=True):
    """`torchvision.models.vit_b_16`, cut into its blocks; built for the image size of the data.

    The same parameters, drawn alike from the same seed. Its head starts at zero, as torchvision's does.
    """

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`embed`, `block1` … `block12`, `head`."""
        return _layer_names(12)

    def anatomy(self) -> Anatomy:
        """The perceptrons by hidden units; torchvision's attention keeps query, key and value in one matrix."""
        return Anatomy(Linears({"block*.mlp.0": "column", "block*.mlp.3": "row"}, units=3072))

    def check(self, *, in_channels: int, image_size: int) -> None:
        """Refuse images without 3 channels, or with sides other than 16, 32, …."""
        if in_channels != 3:
            raise ConfigError(
                f"in_channels={in_channels} doesn't suit model={self.name}, whose images have 3 channels: "
                "choose data of 3 channels, or model=vit"
            )
        patches_per_side(image_size, patch_size=16, model=self.name)

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        self.check(in_channels=in_channels, image_size=image_size)
        from torchvision.models import vit_b_16

        from parallelbench.models import vit_layers as layers
        from parallelbench.models.modules import sequence

        whole = vit_b_16(weights=None, image_size=image_size, num_classes=num_classes)
        return sequence(self.layer_names, layers.cut(whole))


def _layer_names(depth: int) -> tuple[str, ...]:
    return ("embed", *(f"block{i + 1}" for i in range(depth)), "head")


def patches_per_side(image_size: int, *, patch_size: int, model: str) -> int:
    """Return how many patches fit along one side; raises `ConfigError` where they don't fit exactly."""
    if image_size % patch_size:
        valid = [str(size) for size in range(1, image_size + 1) if image_size % size == 0]
        raise ConfigError(
            f"image_size={image_size} of model={model} is no multiple of patch_size={patch_size}: "
            f"choose data of another image_size, or model=vit with a patch_size of {', '.join(valid)}"
        )
    return image_size // patch_size
