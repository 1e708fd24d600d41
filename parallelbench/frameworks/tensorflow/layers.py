"""The layers of the twins: functions of images, channels last, and of the values of one pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from parallelbench.models.resnet import ResNet

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
    padding = [[0, 0], [border, border], [border, border], [0, 0]]
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
