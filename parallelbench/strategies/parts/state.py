"""What one rank needs to go on training, as plain tensors and numbers: each rank saves and loads its own part."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: of a `DTensor` its shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of all parameters and buffers, by name; writing to them changes the module."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: local(tensor.detach()) for name, tensor in named}


@torch.no_grad()
def load_tensors(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Give parameters and buffers the values of `tensors_of`, in place: what is a view of a vector stays one."""
    own = tensors_of(module)
    assert own.keys() == saved.keys(), f"the checkpoint is another model's: {sorted(own.keys() ^ saved.keys())}"
    for name, tensor in own.items():
        assert tensor.shape == saved[name].shape, f"{name}: {tuple(tensor.shape)} is not {tuple(saved[name].shape)}"
        tensor.copy_(saved[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of an optimizer's state."""
    whole = _own(optimizer).state_dict()
    sharded = {
        index: {key: local(value) for key, value in state.items() if hasattr(value, "to_local")}
        for index, state in whole["state"].items()
    }
    plain = {
        index: {key: value for key, value in state.items() if key not in sharded[index]}
        for index, state in whole["state"].items()
    }
    return {"plain": plain, "sharded": sharded, "groups": whole["param_groups"]}


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer of the same parameters the state of `optimizer_state`."""
    optimizer = _own(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {**plain, **{key: _like(parameters[index], value) for key, value in saved["sharded"][index].items()}}
        for index, plain in saved["plain"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})


def _own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`ZeroRedundancyOptimizer` updates this rank's parameters through an optimizer of theirs."""
    own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return own


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A tensor that is sharded as a parameter is, of which this rank holds `shard`."""
    whole = torch.zeros_like(parameter.detach(), dtype=shard.dtype)
    local(whole).copy_(shard)
    return whole
