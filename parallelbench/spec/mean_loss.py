"""What training minimises: a specification that builds a function of logits and labels."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from parallelbench.spec.structure import Component

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    MeanLoss = Callable[[Tensor, Tensor], Tensor]


class Loss(Component, frozen=True, kw_only=True):
    """A loss's options. Importing the file loads no torch; `build` does."""

    @abstractmethod
    def build(self) -> MeanLoss:
        """The mean over a batch as a function of logits and labels.

        Logits have the shape (n, classes), or (n, positions, classes), in the parameters' dtype; labels, int64, that of
        the logits without the classes. The function returns one number, differentiable by the logits: the mean over
        all labels, so that the mean over equal parts of a batch is that over the batch.
        """
