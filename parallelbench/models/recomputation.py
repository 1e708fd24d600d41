"""Layers that keep only their input for the backward pass, which computes the rest again.

Chen et al. 2016 (arXiv 1604.06174); which parts: Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from parallelbench.models.modules import unchanged_buffers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from parallelbench.config.run import RunConfig


def recomputing(model: nn.Sequential, run: RunConfig) -> nn.Sequential:
    """The same model, which recomputes in training what `activation_recomputation` says; names and values stay.

    full: every layer but the last, whose backward pass begins when its forward pass has ended. selective: what
    attention computes between its linear layers (`Anatomy.attention`).
    """
    if run.activation_recomputation == "full":
        for layer in list(model)[:-1]:
            _repeat(layer, "forward")
    elif run.activation_recomputation == "selective":
        for name, module in model.named_modules():
            if fnmatchcase(name, run.model.anatomy().attention):
                _repeat(module, "attend")
    return model


def repeats_forward(run: RunConfig, layer: str) -> bool:
    """Whether a step computes this layer's forward pass twice, with the messages in it."""
    return run.activation_recomputation == "full" and layer != run.model.layer_names[-1]


def _repeat(module: nn.Module, method: str) -> None:
    """Let backward repeat a method of this module, and of its copies."""
    kind: Any = type(module)
    module.__class__ = _repeating(kind, method)


@cache
def _repeating(cls: type[nn.Module], method: str) -> type[nn.Module]:
    """The same kind of module, one of whose methods backward repeats: a class, so that copies are bound to themselves.

    The method is repeated to its end, also where nothing needs its last values (`early_stop`): a step costs what the
    formula says, and the ranks send the same messages.
    """
    genuine = getattr(cls, method)

    def repeated(self: nn.Module, *values: Tensor) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return genuine(self, *values)
        contexts = partial(_contexts, self)
        return checkpoint(partial(genuine, self), *values, use_reentrant=False, context_fn=contexts, early_stop=False)

    return type(f"Recomputing{cls.__name__}", (cls,), {method: repeated, "__module__": cls.__module__})


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the forward pass, and of its repetition."""
    return nullcontext(), unchanged_buffers(module)  # running statistics saw this batch already
