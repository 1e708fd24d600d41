"""The suite's models in TensorFlow: the same layers under torch's names, from the same initial values.

Images are channels last. `TensorLayout` says how each of torch's tensors lies in memory here, and back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallelbench.frameworks.tensorflow import layers
from parallelbench.models.cnn import Cnn, CnnLarge, CnnSmall
from parallelbench.models.linear import LogisticRegression
from parallelbench.models.mlp import Mlp
from parallelbench.models.resnet import ResNet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from parallelbench.config.components import Model
    from parallelbench.frameworks.tensorflow.layers import Pass

    Forward = Callable[[Pass, Any], Any]


class TensorLayout(NamedTuple):
    """How one of torch's tensors lies in memory: reshaped, axes permuted, reshaped."""

    split: tuple[int, ...]
    """Its shape in torch, where axes that are permuted stand by themselves."""
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    """Its shape here."""

    def to_tensorflow(self, array: NDArray[Any]) -> NDArray[Any]:
        """From torch's layout."""
        permuted = np.ascontiguousarray(array.reshape(self.split).transpose(self.axes))
        return permuted.reshape(self.shape)  # last: of a scalar numpy makes a vector

    def to_torch(self, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Back; `shape`: torch's."""
        permuted = array.reshape([self.split[axis] for axis in self.axes])
        return np.ascontiguousarray(permuted.transpose(np.argsort(self.axes))).reshape(shape)


def layout_of(shape: Sequence[int], *, image: tuple[int, int, int] | None = None, channels: int = 0) -> TensorLayout:
    """The layout of a tensor of torch's shape.

    `image`: channels, height and width of what a dense layer flattens. `channels`: inputs of a depthwise convolution.
    """
    shape = tuple(shape)
    if len(shape) == 4 and channels:  # (groups · m, 1, h, w) → (h, w, groups, m)
        outputs, _, height, width = shape
        split = (channels, outputs // channels, height, width)
        return TensorLayout(split, (2, 3, 0, 1), (height, width, *split[:2]))
    if len(shape) == 4:  # (out, in, h, w) → (h, w, in, out)
        return TensorLayout(shape, (2, 3, 1, 0), tuple(shape[axis] for axis in (2, 3, 1, 0)))
    if len(shape) == 2 and image is not None:  # (out, c · h · w) → (h · w · c, out)
        return TensorLayout((shape[0], *image), (2, 3, 1, 0), (math.prod(image), shape[0]))
    if len(shape) == 2:
        return TensorLayout(shape, (1, 0), shape[::-1])
    return TensorLayout(shape, tuple(range(len(shape))), shape)


class Twin(NamedTuple):
    """A model's twin."""

    forward: Forward
    """From images (n, height, width, channels) to logits."""
    flattens: Mapping[str, tuple[int, int, int]]
    """Dense layer's weight → channels, height and width of the image that it flattens."""
    depthwise: Mapping[str, int]
    """Weight of a depthwise convolution → its input channels."""

    def layouts(self, state: Mapping[str, NDArray[Any]]) -> dict[str, TensorLayout]:
        """The layout of each of torch's tensors."""
        return {
            name: layout_of(array.shape, image=self.flattens.get(name), channels=self.depthwise.get(name, 0))
            for name, array in state.items()
        }


def twin_of(model: Model, shape: tuple[int, ...]) -> Twin:
    """The twin of a model for images of this shape: channels, height, width."""
    size = shape[1]
    if isinstance(model, (LogisticRegression, Mlp)):
        return Twin(
            lambda run, x: layers.dense_stack(run, x, model.layer_names),
            {"fc1.linear.weight": (shape[0], size, size)},
            {},
        )
    if isinstance(model, CnnSmall):
        return _plain(("conv1",), model.layer_names[1:], {"conv1"}, flattens=(32, size // 2, size // 2))
    if isinstance(model, CnnLarge):
        depthwise = {"conv2.conv.weight": 128, "conv3.conv.weight": 256} if model.grouped else {}
        convs, side = ("conv1", "conv2", "conv3"), size // 2 // 2 // 2
        return _plain(convs, model.layer_names[3:], set(convs), flattens=(512, side, side), depthwise=depthwise)
    if isinstance(model, Cnn):
        side = size
        for _ in model.widths:
            side //= 2
        names, last = model.layer_names[:-1], (model.widths[-1], side, side)
        return _plain(names, ("head",), set(names[1::2]), flattens=last, norm=model.norm)
    assert isinstance(model, ResNet), f"{model.name} has no twin: the strategy's check refuses it"
    return Twin(lambda run, x: layers.resnet(run, x, model), {}, {})


def _plain(
    convs: Sequence[str],
    dense: Sequence[str],
    pooled: set[str],
    *,
    flattens: tuple[int, int, int],
    depthwise: Mapping[str, int] | None = None,
    norm: str | None = None,
) -> Twin:
    """Convolutions, some of them with pooling, then dense layers."""
    grouped = depthwise or {}

    def forward(run: Pass, x: Any) -> Any:
        for name in convs:
            x = layers.conv_block(
                run, x, name, pool=name in pooled, norm=norm, depthwise=f"{name}.conv.weight" in grouped
            )
        return layers.dense_stack(run, x, dense)

    return Twin(forward, {f"{dense[0]}.linear.weight": flattens}, grouped)
