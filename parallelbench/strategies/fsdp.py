"""Fully sharded data parallel training with torch's `fully_shard` (Zhao et al. 2023, arXiv 2304.11277)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.errors import ConfigError
from parallelbench.spec.config import StateShards, Strategy

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica


class Fsdp(Strategy, frozen=True, kw_only=True):
    """One process per device, each with an n-th of every layer's parameters, gradients and optimizer state."""

    shards_tensors: ClassVar[bool] = True

    reshard_after_forward: bool
    """Free each layer's gathered parameters after its forward and gather them again for its backward (ZeRO stage 3):
    least memory. False keeps them until backward is through with them (stage 2): a third less is sent."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One per device."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, where there is nothing to shard, and what a shard can't tell."""
        if run.devices < 2:
            raise ConfigError(
                "strategy=fsdp needs two devices or more: choose devices=2, or strategy=single for one device"
            )
        if run.precision == "fp16":
            raise ConfigError(
                "precision=fp16 with strategy=fsdp is refused: a rank would check only its own shard of the "
                "gradients for infinities; choose precision=bf16"
            )

    def held(self, run: RunConfig) -> StateShards:
        """An n-th of everything; a layer's gathered parameters, while it works, come on top."""
        return StateShards.even(run.devices)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard layer by layer over all ranks."""
        from parallelbench.strategies.parts.sharded import shard_layers

        return shard_layers(model, run, world, shard=world.size, reshard_after_forward=self.reshard_after_forward)
