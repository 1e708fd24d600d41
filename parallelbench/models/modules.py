"""The layers of the plain models, and how named layers make a model."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm

from parallelbench.errors import ConfigError, count_of, place_of
from parallelbench.world.numerics import in_arithmetic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from parallelbench.config.components import Data, Model
    from parallelbench.config.run import RunConfig


def built(run: RunConfig, dtype: torch.dtype | None = None) -> nn.Sequential:
    """A run's model as torch's current seed gives it, on the CPU; moved to an arithmetic where `dtype` is given.

    It is in training mode, so that a `train` of its own has kept frozen what it keeps frozen. A default type that its
    code sets is not left to the process. Raises `ConfigError` unless layers have their names, and parameters that can
    be counted and copied.
    """
    before = torch.get_default_dtype()
    try:
        model = run.model.build(**run.data.model_input, num_classes=run.data.num_classes)
    finally:
        torch.set_default_dtype(before)
    _require_names(model, run.model)
    _require_values(model, run.model)
    model.train()
    if dtype is not None:
        in_arithmetic(model, dtype)
    return model


def _require_names(model: object, options: Model) -> None:
    """Strategies cut a model, and share its layers, by their names."""
    found = tuple(model._modules) if isinstance(model, nn.Sequential) else type(model).__name__
    if found != tuple(options.layer_names):
        raise ConfigError(
            f"model={options.name}: build returns {found}, not the layers {options.layer_names}: return "
            "sequence(self.layer_names, [...]) of parallelbench.models.modules, with a module for each name "
            f"({place_of(type(options).build)})"
        )


def _require_values(model: nn.Module, options: Model) -> None:
    """Parameters must be there before the first batch, and modules as they can be copied: checks train copies."""
    for name, module in model.named_modules():
        who = f"model={options.name}: {name} is {type(module).__name__}"
        place = place_of(type(options).build)
        if any(is_lazy(each) for each in (*module._parameters.values(), *module._buffers.values())):
            raise ConfigError(
                f"{who}, whose sizes follow from its first batch; give sizes, as of nn.Linear(in_features, "
                f"out_features): strategies share parameters out before there is a batch ({place})"
            )
        if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
            raise ConfigError(
                f"{who} under torch.nn.utils.weight_norm, which torch can't copy, and checks train copies; take "
                f"torch.nn.utils.parametrizations.weight_norm ({place})"
            )


def sequence(names: Iterable[str], layers: Iterable[nn.Module]) -> nn.Sequential:
    """Return the layers in order under their names; `ConfigError` unless each layer has one of its own."""
    names, layers = tuple(names), tuple(layers)
    if not len(set(names)) == len(names) == len(layers):
        raise ConfigError(
            f"{count_of(len(layers), 'layer')} for the names {names}: let layer_names give each layer that build makes "
            "one name of its own, in order"
        )
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def parameters_by_layer(model: nn.Sequential) -> list[list[nn.Parameter]]:
    """Parameters of each layer, every one once: what layers share belongs to the first of them."""
    seen: set[nn.Parameter] = set()
    owned = []
    for layer in model:
        owned.append([parameter for parameter in layer.parameters() if parameter not in seen])
        seen.update(owned[-1])
    return owned


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers (running statistics) at the end."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


class Dense(nn.Module):
    """A linear layer that flattens its input first: (batch, …) → (batch, outputs), with ReLU where `relu`."""

    def __init__(self, inputs: int, outputs: int, *, relu: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.activation = nn.ReLU() if relu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Flatten, multiply, activate."""
        y: Tensor = self.activation(self.linear(x.flatten(1)))
        return y


class ConvBlock(nn.Module):
    """3×3 convolution of padding 1, norm if any, ReLU, and 2×2 max pooling where `pool`.

    Maps (batch, inputs, n, n) to (batch, outputs, n, n), or to (batch, outputs, n // 2, n // 2) with pooling.
    The convolution has a bias only where no `norm` follows, which would cancel it.
    """

    def __init__(
        self, inputs: int, outputs: int, *, pool: bool, groups: int = 1, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=norm is None)
        self.norm = norm or nn.Identity()
        self.activation = nn.ReLU()
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, normalise, activate, pool."""
        y: Tensor = self.pool(self.activation(self.norm(self.conv(x))))
        return y


def dense_stack(widths: Iterable[int]) -> list[nn.Module]:
    """Return dense layers from each width to the next, with ReLU after all but the last."""
    sizes = list(widths)
    last = len(sizes) - 2
    return [Dense(sizes[i], sizes[i + 1], relu=i < last) for i in range(last + 1)]


def blank(
    data: Data, samples: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """Zeros of the shape of so many samples; tokens are int64 whatever `dtype` is."""
    kind = torch.int64 if data.kind == "tokens" else dtype
    return torch.zeros(samples, *data.shape, dtype=kind, device=device)
