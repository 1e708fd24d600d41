"""What wraps a model and its optimizer for data parallel training by torch: DDP, ZeRO's optimizer, DataParallel."""

from __future__ import annotations

import weakref
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelbench.measure.spans import Spanned
from parallelbench.world.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class HookedDdp(DistributedDataParallel):
    """Calls its communication hook, if it gets one, through a method of its own, which may be wrapped later.

    The reducer keeps the hook it was given for good. DDP's own all-reduces have no hook: the reducer starts them in
    C++, within backward.
    """

    _hook: Hook | None = None

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Register a hook, as DDP does."""
        self._hook = hook
        # The reducer, in C++, would keep a module that its hook refers to, with its memory and connections, for good.
        module = weakref.ref(self)
        super().register_comm_hook(state, lambda state, bucket: _alive(module).reduce_bucket(state, bucket))

    def reduce_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Call the hook with a full bucket, while backward goes on."""
        assert self._hook is not None
        return self._hook(state, bucket)

    def spanned(self) -> Iterable[Spanned]:
        """The hook is communication: what it computes and how long it waits is no part of backward."""
        return [Spanned(self, "reduce_bucket", "communication")] if self._hook is not None else []


def _alive(module: weakref.ref[HookedDdp]) -> HookedDdp:
    this = module()
    assert this is not None, "a reducer works for a living module only"
    return this


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
    return sum(p.numel() * p.element_size() for group in optimizer.optim.param_groups for p in group["params"])


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


class BatchBytes:
    """Bytes of a global batch's samples, of its logits and of their gradients, as the last forward pass had them."""

    batch_bytes = 0

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        """Hook of the module that scatters and gathers."""
        self.batch_bytes = inputs[0].nbytes + 2 * logits.nbytes
