"""What data parallel strategies have in common: one process per device, each with its own slice of every batch.

Three specifications: for every such strategy, for those that wrap the model in torch's DDP, and for those that shard it
with torch's `fully_shard`. Importing this loads no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from parallelbench.config.components import Shard, StateShards, Strategy
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError
from parallelbench.strategies.parts.refusals import (
    check_no_fp16,
    check_two_devices,
    first_of,
    why_complex,
    why_shared,
    why_uncut,
    why_untouched,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.parts.replicas import ModuleReplica
    from parallelbench.world.world import World


class DataParallelStrategy(Strategy, frozen=True, kw_only=True):
    """One process per device; each reads its own slice of every global batch."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One slice per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device."""
        check_two_devices(run)


def check_micro_batches(micro_batches: int, run: RunConfig) -> None:
    """Refuse pieces of unequal size, and steps that are captured or compiled as one."""
    if micro_batches == 1:
        return
    shards = run.strategy.data_parallel_degree(run)
    batch = run.global_batch_size // shards
    if batch % micro_batches and not run.global_batch_size % shards:
        valid = [n for n in range(1, batch + 1) if batch % n == 0]
        nearest = sorted(sorted(valid, key=lambda n: abs(n - micro_batches))[:2])
        raise ConfigError(
            f"strategy.micro_batches={micro_batches} doesn't divide a device's batch of {batch} samples "
            f"(batch_size={run.batch_size}): choose strategy.micro_batches={' or '.join(map(str, nearest))}, or "
            "another batch_size"
        )
    refused = {"graph=true": run.graph, "compile=true": run.compile}
    if choice := next((choice for choice, chosen in refused.items() if chosen), ""):
        raise ConfigError(
            f"strategy.micro_batches={micro_batches} with {choice} is refused: steps would be made of two "
            f"kinds of backward, with and without averaging; choose {choice.partition('=')[0]}=false, or "
            "strategy.micro_batches=1"
        )


class DdpStrategy(DataParallelStrategy, frozen=True, kw_only=True):
    """The whole model on every device, in torch's DDP, which averages gradients bucket by bucket during backward."""

    updates_as_asked: ClassVar[bool] = True

    bucket_mib: Annotated[float, Meta(gt=0)]
    """Size of a gradient bucket, MiB (DDP's `bucket_cap_mb`)."""
    gradient_as_bucket_view: bool
    """Let gradients share the buckets' memory: saves one copy of all gradients."""

    def state_shards(self, run: RunConfig) -> StateShards:
        """A copy of everything."""
        return StateShards.even(1)

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """DDP waits for each gradient."""
        return first_of(why_untouched(traits), why_complex(traits))

    def in_ddp(
        self, model: nn.Sequential, run: RunConfig, world: World, *, static_graph: bool = False
    ) -> DistributedDataParallel:
        """Move the model to this rank's device and wrap it; every rank then holds rank 0's parameters."""
        import torch.distributed as dist

        from parallelbench.models.norms import synchronize_norms
        from parallelbench.strategies.parts.hooked_ddp import HookedDdp
        from parallelbench.strategies.parts.replicas import to_device
        from parallelbench.world import cuda

        module = to_device(model, run, world.device)
        synchronize_norms(module, dist.group.WORLD)
        # A step can be captured only where DDP was made on another stream than the default one.
        with cuda.aside(world.device) if run.graph else nullcontext():
            return HookedDdp(
                module,
                device_ids=[world.device.index] if world.device_type == "cuda" else None,
                bucket_cap_mb=self.bucket_mib,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                static_graph=static_graph,
                **keep_buffers_local(HookedDdp),
            )

    def replica(self, wrapped: DistributedDataParallel, run: RunConfig, world: World, **options: Any) -> ModuleReplica:
        """This rank's replica of a wrapped model; `options` are those of `ModuleReplica`."""
        from parallelbench.strategies.parts.captured import CapturedReplica
        from parallelbench.strategies.parts.replicas import ModuleReplica, share_buffers

        kind = CapturedReplica if run.graph else ModuleReplica
        return kind(
            wrapped.module,
            run=run,
            world=world,
            data_shard=Shard(world.rank, world.size),
            wrapped=wrapped,
            before_evaluation=lambda: share_buffers(wrapped.module),
            micro_batches=self.micro_batches_per_step(run),
            **options,
        )


class AccumulatingDdp(DdpStrategy, frozen=True, kw_only=True):
    """The same, where a rank's slice of every batch may go through the model in pieces."""

    micro_batches: Count = 1
    """Pieces that a rank cuts its slice of every batch into; must divide it. Gradients add up, and ranks average them
    with the last piece."""

    def micro_batches_per_step(self, run: RunConfig) -> int:
        """As the option says."""
        return self.micro_batches

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, and pieces of unequal size."""
        super().check(run, device_type)
        check_micro_batches(self.micro_batches, run)


def keep_buffers_local(ddp: type[nn.Module]) -> dict[str, Any]:
    """The argument by which DDP leaves each rank its own buffers, which it would otherwise send in every step.

    They are running statistics, used in evaluation only and shared before it. Torch 2.13 renamed the argument. Under
    the new name buffers are sent once at the start, when all ranks have the same.
    """
    known = signature(ddp).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


class ShardedStrategy(DataParallelStrategy, frozen=True, kw_only=True):
    """Every layer's parameters, gradients and optimizer state in shards, by torch's `fully_shard`."""

    shards_tensors: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    reshard_after_forward: bool
    """Free each layer's gathered parameters after its forward and gather them again for its backward (ZeRO stage 3):
    least memory. False keeps them until the layer's backward ends (stage 2): a third less is sent."""
    gather: Literal["stored", "bf16"] = "stored"
    """Arithmetic in which parameters are gathered. stored: as the optimizer has them, in fp32; bf16: rounded first, so
    half is sent and held, with precision=bf16 only. Gradients are summed in fp32 either way."""
    micro_batches: Count = 1
    """Pieces that a rank cuts its slice of every batch into; must divide it. Gradients add up, whole, and ranks average
    them with the last piece; parameters are gathered for each."""

    def micro_batches_per_step(self, run: RunConfig) -> int:
        """As the option says."""
        return self.micro_batches

    @abstractmethod
    def ranks_per_copy(self, run: RunConfig) -> int:
        """Neighbouring ranks that one copy of the model is sharded over."""

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, fp16, unequal micro-batches, and gathering in other arithmetic than layers compute in."""
        super().check(run, device_type)
        check_micro_batches(self.micro_batches, run)
        if self.gather == "bf16" and run.precision != "bf16":
            raise ConfigError(
                f"strategy.gather=bf16 with precision={run.precision} is refused: layers would compute in bf16; choose "
                "precision=bf16, or strategy.gather=stored"
            )
        check_no_fp16(run, "a rank would check only its own shard of the gradients for infinities")

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

    def sharded(self, model: nn.Sequential, run: RunConfig, world: World, **options: Any) -> Replica:
        """This rank's replica; `options` are those of `shard_layers` that are no options of the strategy."""
        from parallelbench.strategies.parts.fsdp_shards import shard_layers

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
