"""Convolutional networks without shortcuts: two published for MNIST, and the suite's own for CIFAR."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from parallelbench.config.components import Anatomy, Linears, Model
from parallelbench.errors import ConfigError
from parallelbench.models.mlp import Counts, dense_plan

if TYPE_CHECKING:
    from torch import nn


class CnnSmall(Model, frozen=True, kw_only=True):
    """One convolution and two dense layers: 402,442 parameters for 28×28×1 and 10 classes.

    The small CNN of Ramkeesoon, "Benchmarking data parallel distributed training of deep learning models on
    PyTorch and TensorFlow".
    """

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`conv1` (with its pooling), `fc1`, `fc2`."""
        return ("conv1", "fc1", "fc2")

    def anatomy(self) -> Anatomy:
        """The dense layers, by the outputs of `fc1`."""
        return Anatomy(Linears(dense_plan(("fc1", "fc2")), units=64))

    def check(self, *, in_channels: int, image_size: int) -> None:
        halved(image_size, times=1, model=self.name)

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        side = halved(image_size, times=1, model=self.name)
        from parallelbench.models.modules import ConvBlock, dense_stack, sequence

        conv = ConvBlock(in_channels, 32, pool=True)
        return sequence(self.layer_names, [conv, *dense_stack([32 * side**2, 64, num_classes])])


class CnnLarge(Model, frozen=True, kw_only=True):
    """Three convolutions and three dense layers.

    The large CNN of Ramkeesoon, "Benchmarking data parallel distributed training of deep learning models on
    PyTorch and TensorFlow". For 28×28×1 and 10 classes its layers as printed have 4,104,202 parameters; the
    number it publishes, 2,636,554, is exactly that of the same layers with the second and third convolution
    grouped. Hence the option.
    """

    grouped: bool
    """Give conv2 and conv3 as many groups as input channels (128 and 256), as the published count implies."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`conv1` … `conv3` (each with its pooling), `fc1` … `fc3`."""
        return ("conv1", "conv2", "conv3", "fc1", "fc2", "fc3")

    def anatomy(self) -> Anatomy:
        """The dense layers but for the last, by the outputs of `fc1`."""
        return Anatomy(Linears(dense_plan(("fc1", "fc2", "fc3")), units=512))

    def check(self, *, in_channels: int, image_size: int) -> None:
        halved(image_size, times=3, model=self.name)

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        side = halved(image_size, times=3, model=self.name)
        from parallelbench.models.modules import ConvBlock, dense_stack, sequence

        convs = [
            ConvBlock(in_channels, 128, pool=True),
            ConvBlock(128, 256, pool=True, groups=128 if self.grouped else 1),
            ConvBlock(256, 512, pool=True, groups=256 if self.grouped else 1),
        ]
        return sequence(self.layer_names, [*convs, *dense_stack([512 * side**2, 512, 512, num_classes])])


class Cnn(Model, frozen=True, kw_only=True):
    """A plain CNN for CIFAR: blocks of two 3×3 convolutions with norm and ReLU, then pooling; a linear head.

    Its layers are the suite's own: Ganesan et al. (Arizona State University) train a CNN on CIFAR but don't publish
    its layers.
    """

    widths: Counts
    """Channels of each block; every block halves the image."""
    norm: Norm
    """Normalisation after each convolution."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """`conv1` … `conv2n` for n blocks (the second of each block pools), `head`."""
        return (*(f"conv{i + 1}" for i in range(2 * len(self.widths))), "head")

    def check(self, *, in_channels: int, image_size: int) -> None:
        halved(image_size, times=len(self.widths), model=self.name)

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        side = halved(image_size, times=len(self.widths), model=self.name)
        from parallelbench.models.modules import ConvBlock, Dense, sequence
        from parallelbench.models.norms import norm_layer

        new_norm = norm_layer(self.norm)
        layers: list[nn.Module] = []
        inputs = in_channels
        for width in self.widths:
            layers.append(ConvBlock(inputs, width, pool=False, norm=new_norm(width)))
            layers.append(ConvBlock(width, width, pool=True, norm=new_norm(width)))
            inputs = width
        layers.append(Dense(inputs * side**2, num_classes, relu=False))
        return sequence(self.layer_names, layers)


Norm = Literal["batch", "sync", "group"]
"""batch: BatchNorm over the samples of one process. sync: over those of all replicas. group: GroupNorm."""


def halved(image_size: int, *, times: int, model: str) -> int:
    """Return the side of an image after `times` poolings by 2; raises `ConfigError` if nothing is left."""
    needed = 1 << times
    if image_size < needed:
        raise ConfigError(
            f"image_size={image_size} is too small for model={model}, which halves images {times} times: "
            f"choose data with image_size={needed} or more, or model=mlp"
        )
    return image_size // needed
