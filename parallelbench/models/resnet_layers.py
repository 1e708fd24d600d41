"""The layers of residual networks: torchvision's blocks between a stem and a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, conv1x1

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Stem(nn.Module):
    """(batch, channels, n, n) → (batch, width, n / 4, n / 4), rounded up; for `small_images` n stays n."""

    def __init__(self, in_channels: int, width: int, *, small_images: bool, norm: nn.Module) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv = nn.Conv2d(in_channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = norm
        self.activation = nn.ReLU()
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, normalise, activate, pool."""
        y: Tensor = self.pool(self.activation(self.norm(self.conv(x))))
        return y


class PooledHead(nn.Module):
    """Mean over the image, then a linear layer: (batch, features, n, n) → (batch, classes)."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Average and multiply."""
        logits: Tensor = self.linear(self.pool(x).flatten(1))
        return logits


def residual_blocks(
    *, bottleneck: bool, blocks: Sequence[int], width: int, norm_layer: Callable[[int], nn.Module]
) -> tuple[list[nn.Module], int]:
    """Return the blocks of all stages in order, and the last block's number of output channels."""
    block = Bottleneck if bottleneck else BasicBlock
    layers: list[nn.Module] = []
    inputs = width
    for stage, count in enumerate(blocks):
        planes = width * 2**stage
        outputs = planes * block.expansion
        for index in range(count):
            stride = 2 if stage and not index else 1
            shortcut = None
            if stride != 1 or inputs != outputs:
                shortcut = nn.Sequential(conv1x1(inputs, outputs, stride), norm_layer(outputs))
            layers.append(block(inputs, planes, stride, shortcut, norm_layer=norm_layer))
            inputs = outputs
    return layers, inputs


def initialise(model: nn.Module) -> None:
    """Draw the convolutions as torchvision does (He et al. 2015, by fan-out); norms start as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
