"""Fully sharded data parallel training with torch's `fully_shard` (Zhao et al. 2023, arXiv 2304.11277)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.strategies.parts.data_parallel_base import ShardedStrategy

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


class Fsdp(ShardedStrategy, frozen=True, kw_only=True):
    """One process per device, each with an n-th of every layer's parameters, gradients and optimizer state."""

    takes_own_loss: ClassVar[bool] = True

    def ranks_per_copy(self, run: RunConfig) -> int:
        """All ranks share the one copy."""
        return run.devices
