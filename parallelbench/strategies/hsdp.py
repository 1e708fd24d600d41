"""Hybrid sharded data parallel training: shards within a group of ranks, copies between groups.

Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), section 3.2.2. With groups of one node each, parameters are
gathered over the fast links within a node, and only gradients, an n-th per rank, cross the slower ones between nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.errors import ConfigError
from parallelbench.spec.config import StateShards, Strategy
from parallelbench.spec.structure import Count  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica


class Hsdp(Strategy, frozen=True, kw_only=True):
    """One process per device on a mesh of replicate × shard."""

    shards_tensors: ClassVar[bool] = True

    shard: Count
    """Neighbouring ranks that one copy of the model is sharded over; devices ÷ shard copies train side by side."""
    reshard_after_forward: bool
    """Free each layer's gathered parameters after its forward and gather them again for its backward: least memory.
    False keeps them until backward is through with them."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One per device."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse meshes that aren't the world, or have only one dimension, and what a shard can't tell."""
        if run.devices % self.shard:
            raise ConfigError(
                f"strategy.shard={self.shard} does not divide devices={run.devices}: "
                f"choose devices as a multiple of {self.shard}, or another strategy.shard"
            )
        if self.shard == 1:
            raise ConfigError("strategy.shard=1 shards nothing: choose strategy.shard=2 or more, or strategy=ddp")
        if self.shard == run.devices:
            raise ConfigError(
                f"strategy.shard={self.shard} with devices={run.devices} leaves one copy of the model, and nothing to "
                f"replicate: choose devices={2 * self.shard}, or strategy=fsdp"
            )
        if run.precision == "fp16":
            raise ConfigError(
                "precision=fp16 with strategy=hsdp is refused: a rank would check only its own shard of the "
                "gradients for infinities; choose precision=bf16"
            )

    def held(self, run: RunConfig) -> StateShards:
        """A shard of everything; a layer's gathered parameters, while it works, come on top."""
        return StateShards.even(self.shard)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard layer by layer over groups of neighbouring ranks."""
        from parallelbench.strategies.parts.sharded import shard_layers

        return shard_layers(model, run, world, shard=self.shard, reshard_after_forward=self.reshard_after_forward)
