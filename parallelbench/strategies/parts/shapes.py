"""Shapes and dtypes of what flows between layers, found without computing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from parallelbench.rank.numerics import Numerics

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig


def values_between(model: nn.Sequential, run: RunConfig, device: torch.device, batch_size: int) -> list[Tensor]:
    """The input of each layer for so many images, and the last one's output, as empty contiguous meta tensors.

    Under autocast some layers give half precision and others don't, by rules that depend on the device: so the forward
    pass is run as it would be there, on tensors without contents. `model` may be anywhere and stays as it is.
    """
    numerics = Numerics(run.precision, device.type)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), numerics.autocast():
        value = torch.empty(batch_size, *run.data.shape, dtype=numerics.dtype, device=device)
        values = [value]
        for layer in model:
            value = functional_call(layer, _empty_state(layer, numerics.dtype, device), (value,))
            values.append(value)
    return [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values]


def _empty_state(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    trained = dict(layer.named_parameters())
    return {
        name: torch.empty(
            tensor.shape,
            dtype=dtype if tensor.is_floating_point() else tensor.dtype,
            device=device,
            requires_grad=name in trained,
        )
        for name, tensor in layer.state_dict().items()
    }


def size_bytes(value: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return value.numel() * value.element_size()
