"""The suite's models in TensorFlow: the same layers under torch's names, from the same initial values.

Images are channels last. `TensorLayout` says how each of torch's tensors lies in memory here, and back. `TwinState`
is a twin with its run's numbers; layers are functions of images and of the values of one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from parallelbench.frameworks.tensorflow.updates import Update
from parallelbench.models.cnn import Cnn, CnnLarge, CnnSmall
from parallelbench.models.mlp import LogisticRegression, Mlp
from parallelbench.models.resnet import ResNet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from parallelbench.config.components import Model
    from parallelbench.config.run import RunConfig
    from parallelbench.training.exchange import State

    Forward = Callable[["Pass", Any], Any]


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names of what is no parameter."""


class TwinState:
    """What all replicas of a run share; it holds no variables."""

    def __init__(self, initial: State, run: RunConfig) -> None:
        """`initial`: the state under torch's names, in torch's layout."""
        self._twin, self.update = twin_of(run.model, run.data.shape), Update(run)
        self._shapes = {name: array.shape for name, array in initial.items()}
        flattens, depthwise = self._twin.flattens, self._twin.depthwise
        self._layouts = {
            name: layout_of(array.shape, image=flattens.get(name), channels=depthwise.get(name, 0))
            for name, array in initial.items()
        }
        self._kept = [key for key in run.optimizer.kept() or () if key != "step"]  # type: ignore[attr-defined]
        wide = np.float64 if run.precision == "fp64" else np.float32
        values = {name: self._layouts[name].to_tensorflow(array) for name, array in initial.items()}
        self.initial = {k: v.astype(wide) if np.issubdtype(v.dtype, np.floating) else v for k, v in values.items()}
        """Name → initial value, in TensorFlow's layout and the run's precision."""
        self.parameters = [name for name in self.initial if not name.endswith(BUFFERS)]
        self.nbytes = sum(self.initial[name].nbytes for name in self.parameters)
        """Bytes of all parameters."""
        synced = getattr(run.model, "norm", None) == "sync"
        means = [value for name, value in self.initial.items() if synced and name.endswith("running_mean")]
        self.moments_bytes = sum(2 * (2 * mean.nbytes + mean.itemsize) for mean in means)
        """Bytes of what norms over all replicas sum: moments and a count of each, and their gradients."""

    def differentiated(
        self,
        values: Mapping[str, Any],
        batch: tuple[Any, Any],
        *,
        size: int,
        merge: Callable[[Any, Any, int], tuple[Any, Any, Any]] | None = None,
    ) -> Any:
        """Sums, gradients of the summed loss ÷ `size`, and buffers: a function of tensors, for XLA.

        Sums: loss, correct predictions and samples, which are the rows of logits.
        `batch`: images and labels. `merge`: of a replica's moments, as in `Pass`.
        """
        images, labels = batch
        trained = {name: values[name] for name in self.parameters}
        with tf.GradientTape() as tape:
            tape.watch(trained)
            forward = Pass({**values, **trained}, training=True, moments=merge)
            logits = self._twin.forward(forward, images)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            mean = loss / size
        samples = tf.cast(tf.shape(logits)[:1], tf.float64)
        return tf.concat([_sums(loss, logits, labels), samples], axis=0), tape.gradient(mean, trained), forward.buffers

    def evaluated(self, values: Mapping[str, Any], images: Any, labels: Any) -> Any:
        """Summed loss and correct predictions, in evaluation mode."""
        logits = self._twin.forward(Pass(values, training=False), images)
        return _sums(tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)), logits, labels)

    def in_torchs_layout(self, tensors: Mapping[str, Any]) -> State:
        """Tensors or variables as arrays under torch's names, in torch's layout."""
        return {name: self._layouts[name].to_torch(each.numpy(), self._shapes[name]) for name, each in tensors.items()}

    def optimizer_state(self, key: str, slots: Mapping[str, list[Any]], step: Any) -> State:
        """What the optimizer keeps of each parameter under torch's `key`; `step`: updates so far."""
        if key == "step":
            return {name: np.full(self._shapes[name], step.numpy()) for name in self.parameters}
        slot = self._kept.index(key)
        return self.in_torchs_layout({name: each[slot] for name, each in slots.items()})


def _sums(loss: Any, logits: Any, labels: Any) -> Any:
    correct = tf.argmax(logits, axis=1, output_type=labels.dtype) == labels
    return tf.stack([tf.cast(loss, tf.float64), tf.reduce_sum(tf.cast(correct, tf.float64))])


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


def twin_of(model: Model, shape: tuple[int, ...]) -> Twin:
    """The twin of a model for images of this shape: channels, height, width."""
    size = shape[1]
    if isinstance(model, (LogisticRegression, Mlp)):
        return Twin(
            lambda run, x: dense_stack(run, x, model.layer_names),
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
    return Twin(lambda run, x: resnet(run, x, model), {}, {})


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
            x = conv_block(run, x, name, pool=name in pooled, norm=norm, depthwise=f"{name}.conv.weight" in grouped)
        return dense_stack(run, x, dense)

    return Twin(forward, {f"{dense[0]}.linear.weight": flattens}, grouped)


_EPS, _MOMENTUM = 1e-5, 0.1
"""torch's defaults of its norms."""


@dataclass
class Pass:
    """One forward pass: the values of parameters and buffers, and what it makes of the buffers."""

    values: Mapping[str, Any]
    training: bool
    moments: Callable[[Any, Any, int], tuple[Any, Any, Any]] | None = None
    """Merges a replica's mean and sum of centred squares per channel, of so many values, over all replicas."""
    buffers: dict[str, Any] = field(default_factory=dict)
    """Buffer → its value after the pass."""


def dense_stack(run: Pass, x: Any, names: Sequence[str]) -> Any:
    """Dense layers, the first of which flattens, with ReLU after all but the last."""
    x = tf.reshape(x, [-1, run.values[f"{names[0]}.linear.weight"].shape[0]])
    for name in names:
        x = tf.nn.bias_add(x @ run.values[f"{name}.linear.weight"], run.values[f"{name}.linear.bias"])
        x = tf.nn.relu(x) if name != names[-1] else x
    return x


def conv_block(run: Pass, x: Any, name: str, *, pool: bool, norm: str | None, depthwise: bool) -> Any:
    """3×3 convolution of padding 1, norm if any, ReLU, and 2×2 max pooling where `pool`."""
    x = convolve(run, x, f"{name}.conv", depthwise=depthwise)
    if norm is not None:
        x = normalise(run, x, f"{name}.norm", norm)
    x = tf.nn.relu(x)
    return tf.nn.max_pool2d(x, 2, 2, "VALID") if pool else x


def convolve(run: Pass, x: Any, name: str, *, stride: int = 1, depthwise: bool = False) -> Any:
    """A convolution that pads by half its kernel on each side, as torch's layers here do; with its bias, if any."""
    kernel = run.values[f"{name}.weight"]
    border = kernel.shape[0] // 2
    padding: Any = [[0, 0], [border, border], [border, border], [0, 0]]
    if stride == 1 or not border:
        padding = "SAME"  # the same numbers, by faster kernels than TensorFlow has for an explicit padding
    if depthwise:
        x = tf.nn.depthwise_conv2d(x, kernel, [1, stride, stride, 1], padding)
    else:
        x = tf.nn.conv2d(x, kernel, stride, padding)
    bias = run.values.get(f"{name}.bias")
    return x if bias is None else tf.nn.bias_add(x, bias)


def normalise(run: Pass, x: Any, name: str, kind: str) -> Any:
    """BatchNorm, with the statistics of all replicas where `kind` is sync; or GroupNorm."""
    weight, bias = run.values[f"{name}.weight"], run.values[f"{name}.bias"]
    if kind == "group":
        return _group_norm(x, weight, bias)
    mean_name, var_name, count_name = (
        f"{name}.{what}" for what in ("running_mean", "running_var", "num_batches_tracked")
    )
    if not run.training:
        mean, var = run.values[mean_name], run.values[var_name]
        return (x - mean) * (tf.math.rsqrt(var + _EPS) * weight) + bias
    mean, var = tf.nn.moments(x, [0, 1, 2])
    count = tf.cast(tf.size(x) // x.shape[3], x.dtype)
    squares = var * count
    if kind == "sync" and run.moments is not None:
        mean, squares, count = run.moments(mean, squares, count)
    unbiased = squares / tf.maximum(count - 1, 1)
    for buffer, now in ((mean_name, mean), (var_name, unbiased)):
        run.buffers[buffer] = (1 - _MOMENTUM) * run.values[buffer] + _MOMENTUM * tf.stop_gradient(now)
    run.buffers[count_name] = run.values[count_name] + 1
    return (x - mean) * (tf.math.rsqrt(squares / count + _EPS) * weight) + bias


def _group_norm(x: Any, weight: Any, bias: Any) -> Any:
    """GroupNorm with as many groups as `parallelbench.models.norms.group_norm` chooses."""
    channels = x.shape[3]
    most = max(1, min(32, channels // 2))
    groups = max(n for n in range(1, most + 1) if channels % n == 0)
    parts = tf.reshape(x, [-1, x.shape[1] * x.shape[2], groups, channels // groups])
    mean, var = tf.nn.moments(parts, [1, 3], keepdims=True)
    normal = tf.reshape((parts - mean) * tf.math.rsqrt(var + _EPS), [-1, *x.shape[1:]])
    return normal * weight + bias


def resnet(run: Pass, x: Any, model: ResNet) -> Any:
    """torchvision's ResNet."""
    small = model.stem == "cifar"
    x = convolve(run, x, "stem.conv", stride=1 if small else 2)
    x = tf.nn.relu(normalise(run, x, "stem.norm", model.norm))
    if not small:
        lowest = x.dtype.min
        x = tf.nn.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], constant_values=lowest), 3, 2, "VALID")
    for name in model.layer_names[1:-1]:
        stride = 2 if name.endswith("_block1") and not name.startswith("stage1_") else 1
        x = _residual(run, x, name, model=model, stride=stride)
    x = tf.reduce_mean(x, [1, 2])
    return tf.nn.bias_add(x @ run.values["head.linear.weight"], run.values["head.linear.bias"])


def _residual(run: Pass, x: Any, name: str, *, model: ResNet, stride: int) -> Any:
    """A block: two or three convolutions beside a shortcut; the first 3×3 convolution has the stride."""
    strides = (1, stride, 1) if model.block == "bottleneck" else (stride, 1)
    y = x
    for index, step in enumerate(strides, start=1):
        y = normalise(run, convolve(run, y, f"{name}.conv{index}", stride=step), f"{name}.bn{index}", model.norm)
        y = tf.nn.relu(y) if index < len(strides) else y
    if f"{name}.downsample.0.weight" in run.values:
        x = normalise(run, convolve(run, x, f"{name}.downsample.0", stride=stride), f"{name}.downsample.1", model.norm)
    return tf.nn.relu(x + y)
