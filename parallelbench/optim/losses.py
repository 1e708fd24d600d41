"""The losses: specifications that build a function of logits and labels. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.config.components import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from parallelbench.config.components import MeanLoss


class CrossEntropy(Loss, frozen=True, kw_only=True):
    """Minus the logarithm of the softmax at the label."""

    label_smoothing: Annotated[float, Meta(ge=0, lt=1)]
    """Share of the target that all classes have alike (Szegedy et al. 2016, arXiv 1512.00567); 0: the label has all."""

    def build(self) -> MeanLoss:
        """Torch's own, over all labels of all samples."""
        from torch.nn import functional as F

        smoothing = self.label_smoothing

        def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)

        return mean_cross_entropy


class MeanSquaredError(Loss, frozen=True, kw_only=True):
    """The square of the difference from the one-hot label (1 at the label, 0 elsewhere), the mean over all classes."""

    def build(self) -> MeanLoss:
        """Torch's own, of the logits as they are."""
        import torch
        from torch.nn import functional as F

        def mean_squared_error(logits: Tensor, labels: Tensor) -> Tensor:
            targets = torch.zeros_like(logits).scatter(-1, labels.unsqueeze(-1), 1.0)
            return F.mse_loss(logits, targets)

        return mean_squared_error
