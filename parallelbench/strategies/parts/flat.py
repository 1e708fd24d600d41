"""A module's parameters as one vector, and the cutting of such a vector into shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def shard_bounds(length: int, count: int) -> list[tuple[int, int]]:
    """Cut a vector of `length` values into `count` shards, (start, stop) of each; sizes differ by at most one."""
    return [(length * index // count, length * (index + 1) // count) for index in range(count)]


class FlatParameters:
    """The trainable parameters of a module, moved into one vector that they become views of.

    Ranks that hold the same model lay it out alike, so a slice means the same to all of them.
    """

    def __init__(self, module: nn.Module, *, multiple: int = 1) -> None:
        """Lay the parameters out; zeros make the length a multiple of `multiple`."""
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
        assert len(gradients) == len(self._gradients), "every parameter takes part in every step"
        torch._foreach_copy_(self._gradients, gradients)

    def named_views(self, vector: Tensor, module: nn.Module) -> dict[str, Tensor]:
        """A vector laid out like the parameters, as copies by the parameters' names in `module`."""
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        return {name: view.clone() for name, view in zip(names, self._views(vector), strict=True)}

    def _views(self, vector: Tensor) -> list[Tensor]:
        views, start = [], 0
        for parameter in self._parameters:
            views.append(torch.as_strided(vector, parameter.shape, parameter.stride(), start))
            start += parameter.numel()
        return views


class HostedParameters(FlatParameters):
    """The same with copies in pinned host memory, where gloo sends from and receives into; on a CPU the two are one."""

    def __init__(self, module: nn.Module) -> None:
        """Lay the parameters out, and copy them."""
        super().__init__(module)
        self.host_values = _on_host(self.values)
        self.host_gradient = _on_host(self.gradient)

    def gradient_to_host(self) -> Tensor:
        """`gradient` as it is now, on the host."""
        if self.host_gradient is not self.gradient:
            self.host_gradient.copy_(self.gradient)
        return self.host_gradient

    def values_from_host(self) -> None:
        """Make what arrived in `host_values` the module's parameters."""
        if self.host_values is not self.values:
            self.values.copy_(self.host_values)


def _on_host(vector: Tensor) -> Tensor:
    """The vector itself on a CPU, else a pinned copy."""
    return (
        vector if vector.device.type == "cpu" else torch.empty_like(vector, device="cpu", pin_memory=True).copy_(vector)
    )
