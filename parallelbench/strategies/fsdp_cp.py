"""FSDP × context parallelism: sequences in parts on a group of devices, all state in shards on all devices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from parallelbench.config.components import Shard
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.parts.context_checks import Exchange, check_context
from parallelbench.strategies.parts.data_parallel_base import ShardedStrategy
from parallelbench.strategies.parts.meshes import Mesh

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class FsdpCp(ShardedStrategy, frozen=True, kw_only=True):
    """One process per device on a mesh of data × context.

    Neighbouring ranks share the sequences of their slice of every batch, and attention joins the parts. Parameters,
    gradients and optimizer state are sharded over the ranks of both dimensions, as torchtitan does (Liang et al. 2024,
    arXiv 2410.06511): the mean over all ranks' tokens is that over all slices and parts.
    """

    context: Count
    """Devices that share each sequence; the data dimension is the number of devices ÷ this."""
    exchange: Exchange
    """What they send each other for attention: as in `context_parallel`."""

    def ranks_per_copy(self, run: RunConfig) -> int:
        """All ranks share the one copy."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per group of ranks that share their sequences."""
        return self._mesh(run).data

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse meshes that aren't all devices, what context parallelism refuses, and what FSDP does."""
        self._mesh(run).check(run, least_data=1)
        check_context(run, exchange=self.exchange, ranks=self.context, option="strategy.context")
        super().check(run, device_type)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard layer by layer over all ranks; give the layers this rank's positions, and the exchange its group."""
        from parallelbench.strategies.parts.context_group import context_group
        from parallelbench.strategies.parts.sharded_context import ShardedContextReplica

        context = context_group(world, self.context)
        kind = partial(ShardedContextReplica, exchange=self.exchange, context=context)
        return self.sharded(model, run, world, kind=kind, data_shard=Shard(context.copy, self._mesh(run).data))

    def _mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"context": self.context})
