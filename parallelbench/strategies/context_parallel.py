"""Context parallelism: every device holds a part of each sequence and the whole model, for sequences that are long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.config.components import Shard
from parallelbench.strategies.parts.context_checks import Exchange, check_context
from parallelbench.strategies.parts.data_parallel_base import DdpStrategy

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class ContextParallel(DdpStrategy, frozen=True, kw_only=True):
    """All ranks read the same samples; each computes on its own tokens, and attention alone joins them.

    The loss is the mean over all tokens: gradients are averaged over ranks, as by DDP. Positions are those in the whole
    sequence.
    """

    exchange: Exchange
    """What ranks send each other for attention. ring: keys and values go round (Liu et al. 2023, arXiv 2310.01889).
    all_gather: every rank gathers all keys and values (Llama 3, arXiv 2407.21783). all_to_all: queries, keys and values
    of all tokens, for a share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509)."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: every rank reads the whole batch."""
        return 1

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, models whose tokens meet outside of attention, and sizes that the devices don't divide."""
        super().check(run, device_type)
        check_context(run, exchange=self.exchange, ranks=run.devices, option="devices")

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Give the layers this rank's positions, and the attention its exchange; wrap the model in DDP."""
        from parallelbench.strategies.parts.context_group import ContextGroup
        from parallelbench.strategies.parts.context_replica import ContextReplica
        from parallelbench.strategies.parts.replicas import gradient_bytes

        wrapped = self.in_ddp(model, run, world)
        size_bytes = gradient_bytes(wrapped.module)
        return ContextReplica(
            wrapped.module,
            run=run,
            world=world,
            exchange=self.exchange,
            context=ContextGroup(world.rank, world.size),
            data_shard=Shard(),
            wrapped=wrapped,
            count_step=lambda traffic: traffic.all_reduce("gradient", size_bytes, world.size),
        )
