"""Context parallelism: every device holds a part of each sequence and the whole model, for sequences that are long.

fsdp_cp: sequences in parts on a group of devices, all state in shards on all devices. Loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from parallelbench.config.components import Shard
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.data_parallel import DdpStrategy
from parallelbench.strategies.fsdp import ShardedStrategy
from parallelbench.strategies.mesh import Mesh

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


Exchange = Literal["ring", "all_gather", "all_to_all"]
"""How keys and values reach the queries of other ranks: see `ContextParallel.exchange`."""


class ContextParallel(DdpStrategy, frozen=True, kw_only=True):
    """Context parallelism: every device holds a part of each sequence and the whole model, for sequences that are long.

    All ranks read the same samples; each computes on its own tokens, and attention alone joins them.

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

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from super().rules(run, device_type)
        yield from parts_of_sequences(run, exchange=self.exchange, ranks=run.devices, option="devices")

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Give the layers this rank's positions, and the attention its exchange; wrap the model in DDP."""
        from parallelbench.strategies.context.tokens import ContextGroup, OwnTokens
        from parallelbench.strategies.replica import gradient_bytes

        wrapped = self.in_ddp(model, run, world)
        size_bytes = gradient_bytes(wrapped.module)
        tokens = OwnTokens(ContextGroup(world.rank, world.size), self.exchange, run, world)
        replica = self.replica(
            wrapped,
            run,
            world,
            data_shard=Shard(),
            tokens=tokens,
            count_step=lambda traffic: traffic.all_reduce("gradient", size_bytes, world.size),
        )
        return tokens.join(replica)


class FsdpCp(ShardedStrategy, frozen=True, kw_only=True):
    """FSDP × context parallelism: sequences in parts on a group of devices, all state in shards on all devices.

    One process per device on a mesh of data × context.

    Neighbouring ranks share the sequences of their slice of every batch, and attention joins the parts. Parameters,
    gradients and optimizer state are sharded over the ranks of both dimensions, as torchtitan does (Liang et al. 2024,
    arXiv 2410.06511): the mean over all ranks' tokens is that over all slices and parts.
    """

    context: Count
    """Devices that share each sequence; the data dimension is the number of devices ÷ this."""
    exchange: Exchange
    """What they send each other for attention: as in `context_parallel`."""

    def ranks_per_copy(self, run: RunConfig) -> int:
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per group of ranks that share their sequences."""
        return self._mesh(run).data

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from self._mesh(run).rules(run, least_data=1)
        yield from parts_of_sequences(run, exchange=self.exchange, ranks=self.context, option="strategy.context")
        yield from super().rules(run, device_type)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard layer by layer over all ranks; give the layers this rank's positions, and the exchange its group."""
        from parallelbench.strategies.context.tokens import OwnTokens, context_group

        context = context_group(world, self.context)
        tokens, shard = OwnTokens(context, self.exchange, run, world), Shard(context.copy, self._mesh(run).data)
        return tokens.join(self.sharded(model, run, world, tokens=tokens, data_shard=shard))

    def _mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"context": self.context})


def parts_of_sequences(run: RunConfig, *, exchange: Exchange, ranks: int, option: str) -> Rules:
    """Refuses models whose tokens meet outside of attention, and sizes that the ranks of a sequence don't divide.

    `option`: the key that asks for so many ranks.
    """
    model, token_heads = run.model, run.model.anatomy().token_heads
    if token_heads is None:
        yield (
            True,
            f"strategy={run.strategy.name} cuts sequences of tokens, which only causal attention may join, but "
            f"model={model.name} has no such attention, as gpt has it",
            ("model", "strategy"),
        )
        return
    by_heads = exchange == "all_to_all"
    (tokens,), parts = run.data.shape, ranks * (1 if by_heads else 2)
    longer = tokens + -tokens % parts
    yield (
        tokens % parts,
        f"strategy={run.strategy.name} can't cut data.sequence={tokens} into {parts} equal parts ({option}={ranks})",
        ("data.sequence", f"data.sequence={longer} model.sequence={longer}"),
    )
    heads, _ = token_heads
    yield (
        by_heads and heads % ranks,
        f"strategy.exchange=all_to_all gives each device whole heads, but {option}={ranks} does not divide "
        f"model.heads={heads}",
        (option, "strategy.exchange=ring"),
    )
