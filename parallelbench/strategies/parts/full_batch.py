"""Training by `torch.optim.LBFGS` on one device: what sharded L-BFGS is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.probes.spans import Spanned
from parallelbench.strategies.parts.replicas import ModuleReplica

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from parallelbench.loaders.batch import Batch


class FullBatchReplica(ModuleReplica):
    """A module whose optimizer asks for losses and gradients at several points per step."""

    def spanned(self) -> Iterable[Spanned]:
        """All that is neither forward nor backward is the optimizer's: directions, and the search along them."""
        return [Spanned(self, "step", "optimizer"), *super().spanned()]

    def step(self, batch: Batch) -> Tensor | None:
        """One iteration; the sums are those at the point where it starts."""
        results: list[Tensor] = []

        def closure() -> float:
            results.append(self._forward_backward(batch))
            return results[-1][0].item() / batch.size

        self._optimizer.step(closure)
        return results[0]
