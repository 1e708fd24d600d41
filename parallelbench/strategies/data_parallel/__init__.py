"""Data parallel training: the whole model on every device, each with its own slice of every batch. Loads no torch.

ddp: torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704). ring_ddp: gradients go round a ring of the
suite's own, as Horovod's do. zero1: a sharded optimizer, ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054).
data_parallel: torch's `nn.DataParallel`, older, simpler and slower than ddp. In every step one process copies the
model from the first GPU to the others, runs one thread per GPU, and sums the gradients on the first, which alone holds
the optimizer (Li et al. 2020, section 2.2, on why ddp replaced it).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from parallelbench.config.components import Shard, StateShards, Strategy
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.shared_refusals import first_of, one_node, two_devices, why_complex, why_untouched

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.replica import ModuleReplica
    from parallelbench.world.world import World


class DataParallelStrategy(Strategy, frozen=True, kw_only=True):
    """One process per device; each reads its own slice of every global batch."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        return run.devices

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        return two_devices(run)


def equal_pieces(micro_batches: int, run: RunConfig) -> Rules:
    """Refuses pieces of unequal size, and steps that are captured or compiled as one."""
    if micro_batches == 1:
        return
    shards, who = run.strategy.data_parallel_degree(run), f"strategy.micro_batches={micro_batches}"
    batch, rest = divmod(run.global_batch_size, shards)
    yield (
        batch % micro_batches and not rest,
        f"{who} doesn't divide a device's batch of {batch} samples (batch_size={run.batch_size})",
        ("strategy.micro_batches", "batch_size"),
    )
    for key, chosen in {"graph": run.graph, "compile": run.compile}.items():
        yield (
            chosen,
            f"{who} with {key}=true is refused: steps would be made of two kinds of backward, with and without "
            "averaging",
            (key, "strategy.micro_batches=1"),
        )


class DdpStrategy(DataParallelStrategy, frozen=True, kw_only=True):
    """The whole model on every device, in torch's DDP, which averages gradients bucket by bucket during backward."""

    updates_as_asked: ClassVar[bool] = True

    bucket_mib: Annotated[float, Meta(gt=0)]
    """Size of a gradient bucket, MiB (DDP's `bucket_cap_mb`)."""
    gradient_as_bucket_view: bool
    """Let gradients share the buckets' memory: saves one copy of all gradients."""

    def state_shards(self, run: RunConfig) -> StateShards:
        return StateShards.even(1)

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """DDP waits for each gradient."""
        return first_of(why_untouched(traits), why_complex(traits))

    def in_ddp(
        self, model: nn.Sequential, run: RunConfig, world: World, *, static_graph: bool = False
    ) -> DistributedDataParallel:
        """Move the model to this rank's device and wrap it; every rank then holds rank 0's parameters."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from parallelbench.models.norms import synchronize_norms
        from parallelbench.strategies.data_parallel.ddp import keep_buffers_local
        from parallelbench.strategies.replica import to_device
        from parallelbench.world import cuda

        module = to_device(model, run, world.device)
        synchronize_norms(module, dist.group.WORLD)
        # A step can be captured only where DDP was made on another stream than the default one.
        with cuda.aside(world.device) if run.graph else nullcontext():
            return DistributedDataParallel(
                module,
                device_ids=[world.device.index] if world.device_type == "cuda" else None,
                bucket_cap_mb=self.bucket_mib,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                static_graph=static_graph,
                **keep_buffers_local(DistributedDataParallel),
            )

    def replica(self, wrapped: DistributedDataParallel, run: RunConfig, world: World, **options: Any) -> ModuleReplica:
        """This rank's replica of a wrapped model; `options` are those of `ModuleReplica`, for others than these."""
        from parallelbench.strategies.graph import CapturedReplica
        from parallelbench.strategies.replica import ModuleReplica, share_buffers

        usual: dict[str, Any] = {
            "data_shard": Shard(world.rank, world.size),
            "before_evaluation": lambda: share_buffers(wrapped.module),
            "micro_batches": self.micro_batches_per_step(run),
            "no_sync": wrapped.no_sync,
        }
        kind = CapturedReplica if run.graph else ModuleReplica
        return kind(wrapped.module, run=run, world=world, wrapped=wrapped, **usual | options)


class AccumulatingDdp(DdpStrategy, frozen=True, kw_only=True):
    """The same, where a rank's slice of every batch may go through the model in pieces."""

    micro_batches: Count = 1
    """Pieces that a rank cuts its slice of every batch into; must divide it. Gradients add up, and ranks average them
    with the last piece."""

    def micro_batches_per_step(self, run: RunConfig) -> int:
        return self.micro_batches

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from super().rules(run, device_type)
        yield from equal_pieces(self.micro_batches, run)


class Ddp(AccumulatingDdp, frozen=True, kw_only=True):
    """Synchronous data parallel training with torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704).

    One process per device, each with the whole model; gradients are all-reduced in buckets during backward.
    """

    can_be_captured: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True

    static_graph: bool
    """Promise that every step uses the same parameters in the same way."""
    compression: Literal["none", "fp16", "bf16"]
    """Round gradients for the all-reduce; parity with one device then holds only as well as the format rounds."""

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """A promise that micro-batches break."""
        yield from super().rules(run, device_type)
        yield (
            self.static_graph and self.micro_batches > 1,
            f"strategy.static_graph=true with strategy.micro_batches={self.micro_batches} is refused: only the last "
            "backward of a step averages",
            ("strategy.static_graph", "strategy.micro_batches=1"),
        )

    def parity_tolerance(self) -> float:
        """As exact as the format that gradients are rounded to: 11 significant bits in fp16, 8 in bf16."""
        rounded = {"none": 0.0, "fp16": 1e-2, "bf16": 5e-2}[self.compression]
        return max(rounded, super().parity_tolerance())

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Wrap the model; every rank then holds rank 0's parameters."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        from parallelbench.strategies.data_parallel.ddp import send_by
        from parallelbench.strategies.replica import gradient_bytes

        wrapped = self.in_ddp(model, run, world, static_graph=self.static_graph)
        size_bytes = gradient_bytes(wrapped.module)
        if self.compression != "none":
            send_by(wrapped, getattr(default_hooks, f"{self.compression}_compress_hook"))
            size_bytes = 2 * sum(p.numel() for p in wrapped.module.parameters() if p.requires_grad)
        return self.replica(
            wrapped, run, world, count_step=lambda traffic: traffic.all_reduce("gradient", size_bytes, world.size)
        )


class RingDdp(AccumulatingDdp, frozen=True, kw_only=True):
    """Data parallel training whose gradients go round a ring of the suite's own, as Horovod does.

    One process per device, each with the whole model; a chunked ring averages each gradient bucket in backward.
    """

    takes_own_loss: ClassVar[bool] = True

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Let DDP fill buckets during backward, and send them round the ring."""
        from parallelbench.strategies.data_parallel.ddp import send_by
        from parallelbench.strategies.data_parallel.ring import ring_hook

        wrapped = self.in_ddp(model, run, world)
        replica = self.replica(wrapped, run, world)
        reduce = ring_hook(replica.traffic, world)
        send_by(wrapped, lambda _, bucket: reduce(bucket))
        return replica


class Zero1(AccumulatingDdp, frozen=True, kw_only=True):
    """Data parallel training with a sharded optimizer: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054).

    DDP, but each parameter tensor has one owner: it keeps the optimizer's state, updates, and sends the result.
    """

    takes_own_loss: ClassVar[bool] = True

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """One device, and fp16 on GPUs, where waiting would be measured."""
        yield from super().rules(run, device_type)
        yield (
            run.precision == "fp16" and device_type == "cuda",
            "precision=fp16 with strategy=zero1 makes the host wait for the GPU in every step (the gradient scaler's "
            "check)",
            ("precision=bf16",),
        )

    def state_shards(self, run: RunConfig) -> StateShards:
        """A copy of parameters and gradients, and an n-th of the optimizer's state."""
        return StateShards(1, 1, 1 / run.devices)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Wrap the model in DDP, and the run's optimizer in torch's ZeroRedundancyOptimizer."""
        from parallelbench.strategies.data_parallel.ddp import sharded_optimizer, updated_bytes
        from parallelbench.strategies.replica import gradient_bytes

        wrapped = self.in_ddp(model, run, world)
        optimizer = sharded_optimizer(wrapped.module, run, world)
        size_bytes, owned_bytes = gradient_bytes(wrapped.module), updated_bytes(optimizer)

        def count_step(traffic: Traffic) -> None:
            traffic.all_reduce("gradient", size_bytes, world.size)
            # Whole tensors have owners, so ranks own different amounts. Together they own the model: the mean over the
            # ranks is that of an all-gather.
            traffic.send("parameter", (world.size - 1) * owned_bytes)

        return self.replica(wrapped, run, world, optimizer=optimizer, count_step=count_step)


class DataParallel(Strategy, frozen=True, kw_only=True):
    """Data parallel training from one process with torch's `nn.DataParallel`: older, simpler and slower than ddp.

    One process and one thread per GPU. Evaluation runs on the first GPU.
    """

    updates_as_asked: ClassVar[bool] = True

    def processes(self, run: RunConfig, device_type: str) -> int:
        return 1

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: the module itself scatters the batch."""
        return 1

    def micro_batches_per_step(self, run: RunConfig) -> int:
        """One per GPU. No process group joins the GPUs, so each normalises its own piece, under norm=sync too."""
        return run.devices

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """CPUs, where `nn.DataParallel` is silently the bare module, several nodes, and compiling."""
        where = "a CPU" if device_type != "cuda" else f"devices={run.devices}"
        yield (
            device_type != "cuda" or run.devices < 2,
            f"strategy=data_parallel needs two CUDA devices or more, and on {where} would train on one device",
            ("strategy=ddp", "strategy=ddp devices=2"),
        )
        yield from one_node(run)
        yield (
            run.global_batch_size % run.devices,
            f"batch_size={run.global_batch_size} can't be scattered evenly over devices={run.devices}",
            ("batch_size",),
        )
        yield (
            run.compile,
            "compile=true with strategy=data_parallel is refused: the module is copied anew in every step",
            ("compile", "strategy"),
        )

    def why_no_recomputation(self, run: RunConfig) -> str:
        """The threads' backward passes would restore the one state of random numbers under each other."""
        return "the GPUs' threads share one state of random numbers, which each would restore"

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Put the model on the first GPU; each forward scatters the batch over all, and gathers the logits there."""
        from torch import nn

        from parallelbench.strategies.data_parallel.ddp import autocasting
        from parallelbench.strategies.replica import ModuleReplica, gradient_bytes, to_device

        module = to_device(model, run, world.device)
        wrapped = nn.DataParallel(autocasting(module, run, world), device_ids=list(world.devices))
        model_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        others, size_bytes = run.devices - 1, gradient_bytes(module)
        batch_bytes = 0

        def note(_module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
            """Of a global batch: its samples, its logits and their gradients."""
            nonlocal batch_bytes
            batch_bytes = inputs[0].nbytes + 2 * logits.nbytes

        wrapped.register_forward_hook(note)

        def count_step(traffic: Traffic) -> None:
            # Between the devices of the one process: from the first device to the others, and back.
            traffic.send("parameter", others * model_bytes)
            traffic.send("gradient", others * size_bytes)
            traffic.send("activation", others / run.devices * batch_bytes)

        return ModuleReplica(module, run=run, world=world, data_shard=Shard(), wrapped=wrapped, count_step=count_step)
