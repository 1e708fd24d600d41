"""What wraps a model and its optimizer for data parallel training by torch: DDP, ZeRO's optimizer, DataParallel."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import nn

from parallelbench.world.numerics import Numerics
from parallelbench.world.spans import phase

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def send_by(wrapped: DistributedDataParallel, hook: Hook) -> None:
    """Let a hook send DDP's full buckets, while backward goes on: what it does, and waits for, is communication.

    DDP's own all-reduces have no hook: the reducer starts them in C++, within backward. The reducer, in C++ too, keeps
    a hook, and a module that the hook refers to, for good.
    """
    # DDP refuses annotations that are strings, and knows some hooks by their names.
    wrapped.register_comm_hook(None, lambda state, bucket: _sent(hook, state, bucket))


def _sent(hook: Hook, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    with phase("communication"):
        return hook(state, bucket)


def keep_buffers_local(ddp: type[nn.Module]) -> dict[str, Any]:
    """The argument by which DDP leaves each rank its own buffers, which it would otherwise send in every step.

    They are running statistics, used in evaluation only and shared before it. Torch 2.13 renamed the argument. Under
    the new name buffers are sent once at the start, when all ranks have the same.
    """
    known = signature(ddp).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def sharded_optimizer(module: nn.Module, run: RunConfig, world: World) -> ZeroRedundancyOptimizer:
    """The run's optimizer, in torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        optimizer_class=lambda owned: run.optimizer.build(owned, run, world.device_type),  # type: ignore[arg-type]
        # One message per owner instead of one per tensor; but a bucket would make channels-last weights contiguous.
        parameters_as_bucket_view=not run.channels_last,
    )


def updated_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    """Bytes of the parameters that this rank updates and sends to all others."""
    return sum(p.nbytes for group in optimizer.optim.param_groups for p in group["params"])


def autocasting(module: nn.Module, run: RunConfig, world: World) -> nn.Module:
    """Wrap a module so that it enters autocast itself.

    Autocast belongs to a thread, and `nn.DataParallel` hands its own threads no dtype: bf16 would become fp16.
    """

    class Autocasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self._numerics = module, Numerics(run.precision, world.device_type)

        def forward(self, images: Tensor) -> Tensor:
            with self._numerics.autocast():
                logits: Tensor = self.module(images)
            return logits

    return Autocasting()
