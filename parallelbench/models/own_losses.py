"""Losses of a model's own, which its layers leave in a forward pass and which are added to the run's loss after it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from parallelbench.config.components import MeanLoss


class _Left(threading.local):
    """What the layers of the model that this thread last called have left."""

    def __init__(self) -> None:
        self.collects = False
        self.terms: list[Tensor] = []


_left = _Left()


def begin(*, collects: bool) -> None:
    """A forward pass begins: what an earlier one has left is dropped. In evaluations nothing is collected."""
    if not computes_once_more():
        _left.collects, _left.terms = collects, []


def leave(term: Tensor) -> None:
    """Leave a number to be minimised: the mean over the samples of this pass."""
    if _left.collects and not computes_once_more():
        _left.terms.append(term)


def with_own_losses(mean: MeanLoss) -> MeanLoss:
    """A loss to which the terms are added that the forward pass before it has left, each once."""

    def with_terms(logits: Tensor, labels: Tensor) -> Tensor:
        terms, _left.collects, _left.terms = _left.terms, False, []
        return sum(terms, mean(logits, labels))

    return with_terms


def computes_once_more() -> bool:
    """Whether this is within a backward pass, where activation checkpointing calls layers a second time."""
    return torch._C._current_graph_task_id() != -1
