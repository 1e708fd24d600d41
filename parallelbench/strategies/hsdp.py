"""Hybrid sharded data parallel training: shards within a group of ranks, copies between groups.

Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), section 3.2.2. With groups of one node each, parameters are
gathered over the fast links within a node, and only gradients, an n-th per rank, cross the slower ones between nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.alternatives import any_of
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError
from parallelbench.strategies.parts.data_parallel_base import ShardedStrategy

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


class Hsdp(ShardedStrategy, frozen=True, kw_only=True):
    """One process per device on a mesh of replicate × shard."""

    takes_own_loss: ClassVar[bool] = True

    shard: Count
    """Neighbouring ranks that one copy of the model is sharded over; devices ÷ shard copies train side by side."""

    def ranks_per_copy(self, run: RunConfig) -> int:
        """As the option says."""
        return self.shard

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse groups that don't divide the devices, meshes of one dimension only, and fp16."""
        if run.devices % self.shard:
            above = -(-run.devices // self.shard) * self.shard
            shards = any_of([str(n) for n in range(2, run.devices) if run.devices % n == 0])
            raise ConfigError(
                f"strategy.shard={self.shard} does not divide devices={run.devices}: "
                f"choose devices={max(above, 2 * self.shard)}" + (f", or strategy.shard={shards}" if shards else "")
            )
        if self.shard == 1:
            raise ConfigError("strategy.shard=1 shards nothing: choose strategy.shard=2 or more, or strategy=ddp")
        if self.shard == run.devices:
            raise ConfigError(
                f"strategy.shard={self.shard} with devices={run.devices} leaves one copy of the model, and nothing to "
                f"replicate: choose devices={2 * self.shard}, or strategy=fsdp"
            )
        super().check(run, device_type)
