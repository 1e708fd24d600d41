"""The metrics of evaluations: sums over labels, and what follows from them. Importing this loads no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.config.components import Metric
from parallelbench.errors import ConfigError
from parallelbench.optim.losses import MeanSquaredError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from parallelbench.config.components import LabelSums, Loss


class NoMetric(Metric, frozen=True, kw_only=True):
    """Evaluations give loss and accuracy only."""

    def build(self) -> LabelSums:
        return lambda logits, labels: logits.new_zeros(0)

    def size(self, classes: int) -> int:
        return 0


class TopK(Metric, frozen=True, kw_only=True):
    """Share of labels whose logit is among the k largest; of equal logits, the others come first."""

    k: Annotated[int, Meta(ge=1, le=1_000_000)]
    """How many predictions each label has."""

    def build(self) -> LabelSums:
        """Hits and labels. A label whose logit is not a number is no hit."""
        import torch

        k = self.k

        def hits(logits: Tensor, labels: Tensor) -> Tensor:
            place = (logits >= logits.gather(-1, labels.unsqueeze(-1))).sum(-1)
            found = ((place >= 1) & (place <= k)).sum()
            return torch.stack([found, torch.full_like(found, labels.numel())])

        return hits

    def check(self, classes: int, loss: Loss) -> None:
        """Refuse a share that is always 1."""
        if self.k >= classes:
            most = f"metric.k of at most {classes - 1}, or " if classes > 1 else ""
            raise ConfigError(
                f"metric.k={self.k} is refused: each of {classes} classes is among so many: choose {most}metric=none"
            )


class MacroF1(Metric, frozen=True, kw_only=True):
    """Mean over classes of the harmonic mean of precision and recall: rare classes count as much as frequent ones.

    Classes that are neither among the labels nor among the predictions don't count.
    """

    def build(self) -> LabelSums:
        """Of each class how many are predicted rightly, then predicted, then there."""
        import torch

        def counts(logits: Tensor, labels: Tensor) -> Tensor:
            classes, predicted, true = logits.shape[-1], logits.argmax(-1).flatten(), labels.flatten()
            each = (true[predicted == true], predicted, true)
            return torch.cat([torch.bincount(found, minlength=classes) for found in each])

        return counts

    def size(self, classes: int) -> int:
        return 3 * classes

    def value(self, sums: Sequence[float]) -> float:
        """2 · right ÷ (predicted + there), the mean over classes."""
        classes = len(sums) // 3
        each = zip(sums[:classes], sums[classes : 2 * classes], sums[2 * classes :], strict=True)
        scores = [2 * right / (predicted + there) for right, predicted, there in each if predicted + there]
        return math.fsum(scores) / len(scores)


class CalibrationError(Metric, frozen=True, kw_only=True):
    """By how much confidence, the largest softmax, is off from accuracy: Guo et al. 2017, arXiv 1706.04599.

    Predictions are sorted into bins of equal width by confidence; a bin counts as much as it has predictions.
    """

    bins: Annotated[int, Meta(ge=1, le=10_000)]
    """How many bins there are between 0 and 1."""

    def build(self) -> LabelSums:
        """Of each bin the predictions, then the right ones, then the sum of their confidence.

        Bin b of B, from 0, has confidences above b ÷ B, up to (b + 1) ÷ B.
        """
        import torch

        bins = self.bins

        def by_confidence(logits: Tensor, labels: Tensor) -> Tensor:
            flat = logits.flatten(0, -2)
            confidence = (flat.amax(-1) - flat.logsumexp(-1)).exp().double()
            right = flat.argmax(-1) == labels.flatten()
            place = ((confidence * bins).ceil() - 1).clamp(0, bins - 1)
            # Products instead of a scatter: the same bits each time, on a GPU, too.
            member = (place.unsqueeze(-1) == torch.arange(bins, device=flat.device)).double()
            return torch.cat([member.sum(0), right.double() @ member, confidence @ member])

        return by_confidence

    def size(self, classes: int) -> int:
        return 3 * self.bins

    def value(self, sums: Sequence[float]) -> float:
        """The mean over predictions of |right ones − confidence| of their bin."""
        bins = self.bins
        gaps = [abs(right - held) for right, held in zip(sums[bins : 2 * bins], sums[2 * bins :], strict=True)]
        return math.fsum(gaps) / math.fsum(sums[:bins])

    def check(self, classes: int, loss: Loss) -> None:
        """Refuse outputs that are no logarithms of probabilities."""
        if isinstance(loss, MeanSquaredError):
            raise ConfigError(
                f"metric={self.name} with loss={loss.name} is refused: outputs that are trained towards 0 and 1 "
                "have no confidence by softmax: choose loss=cross_entropy, or another metric"
            )
