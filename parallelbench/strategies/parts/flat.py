"""A module's parameters as one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallelbench.errors import LEFT_OUT, ConfigError


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
