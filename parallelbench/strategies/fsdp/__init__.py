"""Fully sharded data parallel training with torch's `fully_shard` (Zhao et al. 2023, arXiv 2304.11277). Loads no torch.

hsdp: shards within a group of ranks, copies between groups (section 3.2.2). With groups of one node each, parameters
are gathered over the fast links within a node, and only gradients, an n-th per rank, cross the slower ones between
nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from parallelbench.config.components import StateShards
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.data_parallel import DataParallelStrategy, equal_pieces
from parallelbench.strategies.shared_refusals import (
    first_of,
    no_fp16,
    why_complex,
    why_shared,
    why_uncut,
    why_untouched,
)

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.replica import ModuleReplica
    from parallelbench.world.world import World


class ShardedStrategy(DataParallelStrategy, frozen=True, kw_only=True):
    """Every layer's parameters, gradients and optimizer state in shards, by torch's `fully_shard`."""

    shards_tensors: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    reshard_after_forward: bool
    """Free each layer's gathered parameters after its forward and gather them again for its backward (ZeRO stage 3):
    least memory. False keeps them until the layer's backward ends (stage 2): a third less is sent."""
    gather: Literal["stored", "bf16"] = "stored"
    """Arithmetic in which parameters are gathered. stored: as the optimizer has them, in fp32; bf16: rounded first, so
    half is sent, with precision=bf16 only. Activations have the same types, and gradients are summed in fp32, either
    way; those of norms, embeddings and biases are rounded to bf16 once before."""
    micro_batches: Count = 1
    """Pieces that a rank cuts its slice of every batch into; must divide it. Gradients add up, whole, and ranks average
    them with the last piece; parameters are gathered for each."""

    def micro_batches_per_step(self, run: RunConfig) -> int:
        return self.micro_batches

    def rounds_messages(self, run: RunConfig) -> bool:
        return self.gather == "bf16" or super().rounds_messages(run)

    @abstractmethod
    def ranks_per_copy(self, run: RunConfig) -> int:
        """Neighbouring ranks that one copy of the model is sharded over."""

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """One device, unequal micro-batches, gathering in other arithmetic than layers compute in, and fp16."""
        yield from super().rules(run, device_type)
        yield from equal_pieces(self.micro_batches, run)
        yield (
            self.gather == "bf16" and run.precision != "bf16",
            f"strategy.gather=bf16 with precision={run.precision} is refused: layers would compute in bf16",
            ("precision=bf16", "strategy.gather"),
        )
        yield from no_fp16(run, "a rank would check only its own shard of the gradients for infinities")

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Layers are cut one by one, each parameter along its first dimension."""
        return first_of(why_untouched(traits), why_uncut(traits), why_complex(traits), why_shared(run, traits))

    def state_shards(self, run: RunConfig) -> StateShards:
        """A shard of everything, but whole gradients while micro-batches add up; a layer's gathered parameters come
        on top while it works.
        """
        shards = StateShards.even(self.ranks_per_copy(run))
        return shards if self.micro_batches == 1 else shards._replace(gradients=1.0)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard layer by layer, and synchronise the copies."""
        return self.sharded(model, run, world)

    def sharded(self, model: nn.Sequential, run: RunConfig, world: World, **options: Any) -> ModuleReplica:
        """This rank's replica; `options` are those of `shard_layers` that are no options of the strategy."""
        from parallelbench.strategies.fsdp.shards import shard_layers

        return shard_layers(
            model,
            run,
            world,
            shards=self.ranks_per_copy(run),
            reshard_after_forward=self.reshard_after_forward,
            # The parity check is fp64, whatever the run's precision.
            gather="stored" if run.precision == "fp64" else self.gather,
            micro_batches=self.micro_batches,
            **options,
        )


class Fsdp(ShardedStrategy, frozen=True, kw_only=True):
    """Fully sharded data parallel training with torch's `fully_shard` (Zhao et al. 2023, arXiv 2304.11277).

    One process per device, each with an n-th of every layer's parameters, gradients and optimizer state.
    """

    takes_own_loss: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True

    def ranks_per_copy(self, run: RunConfig) -> int:
        return run.devices


class Hsdp(ShardedStrategy, frozen=True, kw_only=True):
    """Hybrid sharded data parallel training: shards within a group of ranks, copies between groups.

    One process per device on a mesh of replicate × shard.
    """

    takes_own_loss: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True

    shard: Count
    """Neighbouring ranks that one copy of the model is sharded over; devices ÷ shard copies train side by side."""

    def ranks_per_copy(self, run: RunConfig) -> int:
        return self.shard

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield (
            not 1 < self.shard < run.devices or run.devices % self.shard,
            f"strategy.shard={self.shard} must divide devices={run.devices}, and be neither 1 nor all of them",
            ("strategy.shard", "devices", "strategy"),
        )
        yield from super().rules(run, device_type)
