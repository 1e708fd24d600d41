"""Data parallel training with a sharded optimizer: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.errors import ConfigError
from parallelbench.loaders.batch import Shard
from parallelbench.spec.config import StateShards, Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from parallelbench.probes.communication import Traffic
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica


class Zero1(Strategy, frozen=True, kw_only=True):
    """DDP, but each parameter tensor has one owner: it keeps the optimizer's state, updates, and sends the result."""

    bucket_mib: Annotated[float, Meta(gt=0)]
    """Size of a gradient bucket, MiB (DDP's `bucket_cap_mb`)."""
    gradient_as_bucket_view: bool
    """Let gradients share the buckets' memory: saves one copy of all gradients."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One per device."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, where there is nothing to shard, and what would measure waiting."""
        if run.devices < 2:
            raise ConfigError(
                "strategy=zero1 needs two devices or more: choose devices=2, or strategy=single for one device"
            )
        if run.precision == "fp16" and device_type == "cuda":
            raise ConfigError(
                "precision=fp16 with strategy=zero1 makes the host wait for the GPU in every step (the gradient "
                "scaler's check): choose precision=bf16"
            )

    def held(self, run: RunConfig) -> StateShards:
        """A copy of parameters and gradients, and an n-th of the optimizer's state."""
        return StateShards(1, 1, 1 / run.devices)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Wrap the model in DDP, and the run's optimizer in torch's ZeroRedundancyOptimizer."""
        from parallelbench.strategies.parts.replicas import ModuleReplica, gradient_bytes, in_ddp, share_buffers

        wrapped = in_ddp(
            model,
            run,
            world,
            bucket_mib=self.bucket_mib,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        module = wrapped.module
        optimizer = _sharded_optimizer(module, run, world)
        size_bytes, owned_bytes = gradient_bytes(module), _owned_bytes(optimizer)

        def count_step(traffic: Traffic) -> None:
            traffic.all_reduce("gradient", size_bytes, world.size)
            # Whole tensors have owners, so what ranks own differs; they own the model together, so the mean over the
            # ranks is that of an all-gather.
            traffic.send("parameter", (world.size - 1) * owned_bytes)

        return ModuleReplica(
            module,
            run=run,
            world=world,
            data_shard=Shard(world.rank, world.size),
            wrapped=wrapped,
            optimizer=optimizer,
            before_evaluation=lambda: share_buffers(module),
            count_step=count_step,
        )


def _sharded_optimizer(module: nn.Module, run: RunConfig, world: World) -> ZeroRedundancyOptimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        module.parameters(),
        optimizer_class=lambda owned: run.optimizer.build(owned, run, world.device_type),  # type: ignore[arg-type]
        # One message per owner instead of one per tensor; but a bucket would make channels-last weights contiguous.
        parameters_as_bucket_view=not run.channels_last,
    )


def _owned_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Bytes of the parameters that this rank updates and sends to all others."""
    return sum(p.numel() * p.element_size() for group in optimizer.optim.param_groups for p in group["params"])
