"""Synchronous data parallel training with torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from parallelbench.errors import ConfigError
from parallelbench.loaders.batch import Shard
from parallelbench.spec.config import StateShards, Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica


class Ddp(Strategy, frozen=True, kw_only=True):
    """One process per device, each with the whole model; gradients are all-reduced in buckets during backward."""

    bucket_mib: Annotated[float, Meta(gt=0)]
    """Size of a gradient bucket, MiB (DDP's `bucket_cap_mb`)."""
    gradient_as_bucket_view: bool
    """Let gradients share the buckets' memory: saves one copy of all gradients."""
    static_graph: bool
    """Promise that every step uses the same parameters in the same way."""
    compression: Literal["none", "fp16", "bf16"]
    """Round gradients for the all-reduce; parity with one device then holds only as well as the format rounds."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One per device."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, where there is nothing to reduce."""
        if run.devices < 2:
            raise ConfigError(
                "strategy=ddp needs two devices or more: choose devices=2, or strategy=single for one device"
            )

    def parity_tolerance(self) -> float:
        """As exact as the format that gradients are rounded to: 11 significant bits in fp16, 8 in bf16."""
        rounded = {"none": 0.0, "fp16": 1e-2, "bf16": 5e-2}[self.compression]
        return max(rounded, super().parity_tolerance())

    def held(self, run: RunConfig) -> StateShards:
        """A copy of everything."""
        return StateShards.even(1)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Wrap the model; every rank then holds rank 0's parameters."""
        from parallelbench.strategies.parts.replicas import ModuleReplica, gradient_bytes, in_ddp, share_buffers

        wrapped = in_ddp(
            model,
            run,
            world,
            bucket_mib=self.bucket_mib,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        module = wrapped.module
        self._compress(wrapped)

        size_bytes = gradient_bytes(module)
        if self.compression != "none":
            size_bytes = 2 * sum(p.numel() for p in module.parameters() if p.requires_grad)
        return ModuleReplica(
            module,
            run=run,
            world=world,
            data_shard=Shard(world.rank, world.size),
            wrapped=wrapped,
            before_evaluation=lambda: share_buffers(module),
            count_step=lambda traffic: traffic.all_reduce("gradient", size_bytes, world.size),
        )

    def _compress(self, wrapped: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }
        if self.compression in hooks:
            wrapped.register_comm_hook(None, hooks[self.compression])
