"""What an evaluation measures besides loss and accuracy: a specification of sums over labels, and of a number."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from parallelbench.spec.structure import Component

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from parallelbench.spec.mean_loss import Loss

    LabelSums = Callable[[Tensor, Tensor], Tensor]


class Metric(Component, frozen=True, kw_only=True):
    """A metric's options. Importing the file loads no torch; `build` does.

    It follows from sums over the test set's labels. So it is the same whichever ranks, stages or pieces of a batch
    evaluate the samples. Most metrics are a ratio of two sums, and only `build` them.
    """

    @abstractmethod
    def build(self) -> LabelSums:
        """The sums over a batch, a tensor of shape (size,), as a function of logits and labels.

        Logits have the shape (n, classes), or (n, positions, classes), in the parameters' dtype; labels, int64, that of
        the logits without the classes. Sums of several batches are added up in float64.
        """

    def size(self, classes: int) -> int:
        """How many sums there are, where a label has so many logits. 0: nothing is measured."""
        return 2

    def value(self, sums: Sequence[float]) -> float:
        """The metric, from the sums over the whole test set: the first ÷ the second."""
        above, below = sums
        return above / below

    def check(self, classes: int, loss: Loss) -> None:
        """Raise `ConfigError` with the fix where the metric means nothing after training by `loss`, or for so many
        logits of a label; before anything starts.
        """
