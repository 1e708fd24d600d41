"""Data parallel training with a sharded optimizer: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import StateShards
from parallelbench.errors import ConfigError
from parallelbench.strategies.parts.data_parallel_base import AccumulatingDdp

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.world.world import World


class Zero1(AccumulatingDdp, frozen=True, kw_only=True):
    """DDP, but each parameter tensor has one owner: it keeps the optimizer's state, updates, and sends the result."""

    takes_own_loss: ClassVar[bool] = True

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, and fp16 on GPUs, where waiting would be measured."""
        super().check(run, device_type)
        if run.precision == "fp16" and device_type == "cuda":
            raise ConfigError(
                "precision=fp16 with strategy=zero1 makes the host wait for the GPU in every step (the gradient "
                "scaler's check): choose precision=bf16"
            )

    def state_shards(self, run: RunConfig) -> StateShards:
        """A copy of parameters and gradients, and an n-th of the optimizer's state."""
        return StateShards(1, 1, 1 / run.devices)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Wrap the model in DDP, and the run's optimizer in torch's ZeroRedundancyOptimizer."""
        from parallelbench.strategies.parts.replicas import gradient_bytes

        wrapped = self.in_ddp(model, run, world)
        optimizer = _sharded_optimizer(wrapped.module, run, world)
        size_bytes, owned_bytes = gradient_bytes(wrapped.module), _owned_bytes(optimizer)

        def count_step(traffic: Traffic) -> None:
            traffic.all_reduce("gradient", size_bytes, world.size)
            # Whole tensors have owners, so ranks own different amounts. Together they own the model: the mean over the
            # ranks is that of an all-gather.
            traffic.send("parameter", (world.size - 1) * owned_bytes)

        return self.replica(wrapped, run, world, optimizer=optimizer, count_step=count_step)


def _sharded_optimizer(module: nn.Module, run: RunConfig, world: World) -> ZeroRedundancyOptimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        optimizer_class=lambda owned: run.optimizer.build(owned, run, world.device_type),  # type: ignore[arg-type]
        # One message per owner instead of one per tensor; but a bucket would make channels-last weights contiguous.
        parameters_as_bucket_view=not run.channels_last,
    )


def _owned_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Bytes of the parameters that this rank updates and sends to all others."""
    return sum(p.numel() * p.element_size() for group in optimizer.optim.param_groups for p in group["params"])
