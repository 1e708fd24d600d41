"""Synchronous data parallel training with torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from parallelbench.errors import ConfigError
from parallelbench.strategies.parts.data_parallel_base import AccumulatingDdp

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class Ddp(AccumulatingDdp, frozen=True, kw_only=True):
    """One process per device, each with the whole model; gradients are all-reduced in buckets during backward."""

    can_be_captured: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True

    static_graph: bool
    """Promise that every step uses the same parameters in the same way."""
    compression: Literal["none", "fp16", "bf16"]
    """Round gradients for the all-reduce; parity with one device then holds only as well as the format rounds."""

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse a promise that micro-batches break."""
        super().check(run, device_type)
        if self.static_graph and self.micro_batches > 1:
            raise ConfigError(
                f"strategy.static_graph=true with strategy.micro_batches={self.micro_batches} is refused: only the "
                "last backward of a step averages; choose strategy.static_graph=false, or strategy.micro_batches=1"
            )

    def parity_tolerance(self) -> float:
        """As exact as the format that gradients are rounded to: 11 significant bits in fp16, 8 in bf16."""
        rounded = {"none": 0.0, "fp16": 1e-2, "bf16": 5e-2}[self.compression]
        return max(rounded, super().parity_tolerance())

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Wrap the model; every rank then holds rank 0's parameters."""
        from parallelbench.strategies.parts.replicas import gradient_bytes

        wrapped = self.in_ddp(model, run, world, static_graph=self.static_graph)
        self._compress(wrapped)
        size_bytes = gradient_bytes(wrapped.module)
        if self.compression != "none":
            size_bytes = 2 * sum(p.numel() for p in wrapped.module.parameters() if p.requires_grad)
        return self.replica(
            wrapped, run, world, count_step=lambda traffic: traffic.all_reduce("gradient", size_bytes, world.size)
        )

    def _compress(self, wrapped: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }
        if self.compression in hooks:
            wrapped.register_comm_hook(None, hooks[self.compression])
