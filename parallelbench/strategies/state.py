"""One rank's training state as plain tensors and numbers, and a module's parameters as one vector."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.errors import LEFT_OUT, ConfigError
from parallelbench.world.generators import Generators, attributes_of, held_generators, restore, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a `DTensor`, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; of a `DTensor` put together from its shards, which is a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of all parameters and buffers, by name; writing to them changes the module."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: local(tensor.detach()) for name, tensor in named}


@torch.no_grad()
def load_tensors(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Give parameters and buffers the values of `tensors_of`, in place, so that views of a vector stay views."""
    own = tensors_of(module)
    assert own.keys() == saved.keys(), f"the checkpoint is another model's: {sorted(own.keys() ^ saved.keys())}"
    for name, tensor in own.items():
        assert tensor.shape == saved[name].shape, f"{name}: {tuple(tensor.shape)} is not {tuple(saved[name].shape)}"
        tensor.copy_(saved[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of an optimizer's state."""
    complete = _local_optimizer(optimizer).state_dict()
    parts: dict[str, Any] = {"plain": {}, "sharded": {}, "groups": complete["param_groups"]}
    for index, state in complete["state"].items():
        sharded = {key: local(value) for key, value in state.items() if hasattr(value, "to_local")}
        parts["sharded"][index] = sharded
        parts["plain"][index] = {key: value for key, value in state.items() if key not in sharded}
    return parts


@torch.no_grad()
def kept_by(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Tensor]], key: str) -> dict[str, Tensor]:
    """What an optimizer keeps of each parameter under `key`, laid out like the parameter.

    A number fills a tensor; zeros where it keeps nothing, from which torch's optimizers begin. A collective where
    parameters have owners that keep it (`ZeroRedundancyOptimizer`).
    """
    state = _local_optimizer(optimizer).state
    kept = {}
    for name, parameter in parameters:
        value = state.get(parameter, {}).get(key)
        if value is None:
            value = torch.zeros_like(parameter)
        elif key == "step" or not hasattr(value, "shape") or value.shape != parameter.shape:
            value = torch.full_like(parameter, float(value))
        if _local_optimizer(optimizer) is not optimizer:
            value = value.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(value)  # others than the owner have zeros
        kept[name] = value
    return kept


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer of the same parameters the state of `optimizer_state`."""
    optimizer = _local_optimizer(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {**plain, **{key: _like(parameters[index], value) for key, value in saved["sharded"][index].items()}}
        for index, plain in saved["plain"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
    for index, parameter in enumerate(parameters):
        for key, value in state.get(index, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(loaded, Tensor) and loaded.dtype != value.dtype:  # torch gives it the parameter's format
                optimizer.state[parameter][key] = value.to(loaded.device)


def _local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of this rank's parameters, which a `ZeroRedundancyOptimizer` wraps."""
    local_optimizer: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return local_optimizer


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A tensor sharded like a parameter, of which this rank holds `shard`."""
    tensor = torch.zeros_like(parameter.detach(), dtype=shard.dtype)
    local(tensor).copy_(shard)
    return tensor


@contextmanager
def undrawn_numbers(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the generators of the host and of the module's GPUs, and what `own_state` finds, at the end."""
    gpus = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    own = own_state(module, optimizer)
    with Generators(list(gpus)).unchanged():
        yield
    load_own_state(module, optimizer, own)


def own_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an author's own modules, and an author's own optimizer, keep in attributes: generators and numbers."""
    generators = {path: state_of(generator) for path, generator in held_generators(module).items()}
    numbers = {
        path: {name: value for name, value in attributes_of(owner).items() if type(value) in (bool, int, float)}
        for path, owner in _authors_own(module, optimizer).items()
    }
    numbers = {path: found for path, found in numbers.items() if found}
    return ({"generators": generators} if generators else {}) | ({"numbers": numbers} if numbers else {})


def load_own_state(module: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give them what `own_state` found."""
    own = held_generators(module)
    for path, state in saved.get("generators", {}).items():
        restore(own[path], state)
    owners = _authors_own(module, optimizer)
    for path, numbers in saved.get("numbers", {}).items():
        for name, value in numbers.items():
            setattr(owners[path], name, value)


_OPTIMIZER = "(optimizer)"
"""Its place among modules, whose paths have no brackets."""
_NOT_AUTHORS = ("torch", "torchvision", "parallelbench", "builtins", "typing", "abc")


def _authors_own(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Modules and the optimizer, by path, where one of their classes is an author's own."""
    owners: dict[str, object] = {**dict(module.named_modules()), _OPTIMIZER: _local_optimizer(optimizer)}
    return {
        path: owner
        for path, owner in owners.items()
        if any(cls.__module__.partition(".")[0] not in _NOT_AUTHORS for cls in type(owner).__mro__)
    }


@contextmanager
def undone_updates(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore parameters, buffers and what the optimizer keeps at the end, in place.

    What it has only begun to keep becomes zero, from which every optimizer begins that can be compiled or captured.
    """
    before = {key: tensor.clone() for key, tensor in _changing(module, optimizer)}
    yield
    with torch.no_grad():
        for key, tensor in _changing(module, optimizer):
            tensor.copy_(before[key]) if key in before else tensor.zero_()


def _changing(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[object, Tensor]]:
    """All that an update changes, by what it is."""
    yield from tensors_of(module).items()
    for parameter, state in _local_optimizer(optimizer).state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield (parameter, name), local(value)


class FlatParameters:
    """One vector of a module's trainable parameters, which become views of it.

    Ranks with the same model get the same layout, so a slice means the same parameters on all of them.
    """

    def __init__(self, module: nn.Module, *, multiple: int = 1) -> None:
        """Copy the parameters into the vector; zeros pad its length to a multiple of `multiple`."""
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        first, used = self._parameters[0], sum(parameter.numel() for parameter in self._parameters)
        length = -(-used // multiple) * multiple
        self.values = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.values)
        for parameter, view in zip(self._parameters, self._views(self.values), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._gradients = self._views(self.gradient)

    def gather_gradient(self) -> None:
        """Copy the parameters' gradients into `gradient`."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if len(gradients) < len(self._gradients):
            raise ConfigError(LEFT_OUT)
        torch._foreach_copy_(self._gradients, gradients)

    def named_views(self, vector: Tensor, module: nn.Module) -> dict[str, Tensor]:
        """The parts of a vector of the same layout, copied, by the parameters' names in `module`."""
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        return {name: view.clone() for name, view in zip(names, self._views(vector), strict=True)}

    def _views(self, vector: Tensor) -> list[Tensor]:
        views, start = [], 0
        for parameter in self._parameters:
            views.append(torch.as_strided(vector, parameter.shape, parameter.stride(), start))
            start += parameter.numel()
        return views
