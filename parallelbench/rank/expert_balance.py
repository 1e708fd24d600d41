"""How evenly tokens fall on the experts of a model in an epoch: a rank's counts, and the ratio over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.store.expert_columns import EXPERT_BALANCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.replica import Replica


class ExpertBalance:
    """One rank's counts of an epoch. For models without experts nothing is asked, kept or sent."""

    def __init__(self, replica: Replica, run: RunConfig) -> None:
        self._replica = replica
        self._blocks, self._experts = run.model.routed_blocks, run.model.routed_experts
        self.counts: list[float] = []
        """Block by block, of each expert; zeros of blocks that are on other ranks."""

    def take(self) -> None:
        """Those since the last call; waits for the devices."""
        if not self._blocks:
            return
        taken = self._replica.take_expert_tokens()
        nothing = [0] * self._experts
        self.counts = [float(count) for block in range(self._blocks) for count in taken.get(block, nothing)]

    def column(self, summed: Sequence[float]) -> dict[str, float | None]:
        """The column of `epochs`, from the sum of `counts` over all ranks.

        Ranks that compute the same tokens, as those of tensor parallelism, count them once each: the ratio stays.
        """
        size = self._experts
        blocks = [summed[first : first + size] for first in range(0, len(summed), size)] if size else []
        ratios = [max(counts) * size / sum(counts) for counts in blocks if sum(counts)]
        (column,) = EXPERT_BALANCE
        return {column.name: sum(ratios) / len(ratios) if ratios else None}
