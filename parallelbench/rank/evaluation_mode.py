"""Modules that stay in evaluation mode: models that draw random numbers, or mix the samples of a batch, compare so."""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def stay_in_evaluation(model: nn.Module) -> None:
    """Let a model, and its copies, compute as in evaluation whatever mode they are told to take."""
    for module in model.modules():
        module.training = False
        module.train = MethodType(_stayed, module)  # type: ignore[method-assign]


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """The same until the end."""
    before = [(module, module.training) for module in model.modules()]
    stay_in_evaluation(model)
    try:
        yield
    finally:
        for module, training in before:
            del module.train
            module.training = training


def _stayed(module: nn.Module, mode: bool = True) -> nn.Module:
    """What `train` does: nothing."""
    return module
