"""The replicas that strategies share: the whole model on every rank, or some of its layers on each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from parallelbench.measure.spans import Spanned
from parallelbench.models.norms import count_compiled_norms
from parallelbench.strategies.parts.base_replica import BaseReplica, numerics_of
from parallelbench.strategies.parts.hooked_ddp import HookedDdp
from parallelbench.strategies.parts.state import kept_by, local
from parallelbench.world.numerics import Sums, dtype_of, in_arithmetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from parallelbench.config.components import Batch, MeanLoss, Shard
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.parts.clipping import Clipping
    from parallelbench.world.world import World


class ModuleReplica(BaseReplica):
    """A module that maps images to logits, trained by backward and one optimizer.

    Training calls `wrapped` (a DDP module, for example); evaluation and state use `module`, which it wraps.
    `optimizer` and `loss` replace the run's own (by sharded ones, for example). `count_step` adds the bytes that a
    step sends.
    `micro_batches`: pieces of a batch whose gradients add up.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        run: RunConfig,
        world: World,
        data_shard: Shard,
        wrapped: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: MeanLoss | None = None,
        before_evaluation: Callable[[], None] | None = None,
        count_step: Callable[[Traffic], None] | None = None,
        micro_batches: int = 1,
    ) -> None:
        super().__init__(data_shard, run)
        self._module, self._world = module, world
        self._numerics = numerics_of(run, world.device_type, loss=loss)
        self._optimizer = optimizer or run.optimizer.build(module.parameters(), run, world.device_type)
        self._hooked = wrapped if isinstance(wrapped, HookedDdp) else None
        self._forward: Callable[[Tensor], Tensor] = wrapped if wrapped is not None else module
        self._compiled = run.compile
        if run.compile:
            self._forward = torch.compile(self._forward)
        self._compiles_update = run.compiles_step
        self._before_evaluation, self._count_step = before_evaluation, count_step
        self._micro_batches = micro_batches
        self._one: Tensor | None = None
        """The gradient of the loss by itself."""

    def step(self, batch: Batch) -> Sums | None:
        """Forward, backward, update."""
        result = self._forward_backward(batch)
        self._update()
        if self._count_step is not None:
            self._count_step(self.traffic)
        return result

    def _forward_backward(self, batch: Batch) -> Sums:
        assert batch.images is not None
        assert batch.labels is not None
        self._optimizer.zero_grad(set_to_none=True)
        if self._micro_batches == 1:
            return self._take_gradient(batch.images, batch.labels)
        count = self._micro_batches
        pieces = enumerate(zip(batch.images.chunk(count), batch.labels.chunk(count), strict=True), start=1)
        total: Sums | None = None
        for number, (images, labels) in pieces:
            with self._adding_up(last=number == count):
                part = self._take_gradient(images, labels)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _take_gradient(self, images: Tensor, labels: Tensor) -> Sums:
        """Add to the gradients what these samples, a micro-batch, have of the batch's."""
        logits, labels, loss = self._predict(images, labels)
        result = self._owned_sums(loss, logits, labels)
        self._backward(loss if self._micro_batches == 1 else loss / self._micro_batches)
        if self._compiled:
            count_compiled_norms(self._module, self.traffic)
        return result

    def _adding_up(self, *, last: bool) -> AbstractContextManager[object]:
        """Of a micro-batch's forward and backward: ranks average what has added up with the last one."""
        return nullcontext() if last or self._hooked is None else self._hooked.no_sync()

    def _owned_sums(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
        """What this rank owns of a batch whose mean loss is known."""
        return self._numerics.sums(loss, logits, labels)

    def _predict(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, labels on the same device, and the mean loss."""
        with self._numerics.autocast():
            logits = self._forward(images)
        labels = labels.to(logits.device, non_blocking=True)
        return logits, labels, self._numerics.training_loss(logits, labels)

    def _backward(self, loss: Tensor) -> None:
        scaled = self._numerics.scale(loss)
        if self._one is None:
            self._one = torch.ones_like(scaled)  # autograd would make one in every step: a launch
        scaled.backward(self._one)

    def _clip(self, clipping: Clipping) -> None:
        self._numerics.unscale(self._optimizer)
        clipping.clip()

    def _apply_gradients(self) -> None:
        self._numerics.update(self._optimizer)

    def spanned(self) -> Iterable[Spanned]:
        """Forward, backward, DDP's communication hook, update."""
        yield Spanned(self, "_predict", "forward")
        yield Spanned(self, "_backward", "backward", reduces=True)
        yield from self._hooked.spanned() if self._hooked is not None else ()
        yield from super().spanned()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over this rank's part of the test set."""
        if self._before_evaluation is not None:
            self._before_evaluation()
        self._module.eval()
        total: Sums | None = None
        for batch in batches:
            assert batch.images is not None
            assert batch.labels is not None
            with self._numerics.autocast():
                logits = self._module(batch.images)
            labels = batch.labels.to(logits.device, non_blocking=True)
            result = self._owned_sums(self._numerics.loss(logits, labels), logits, labels)
            total = result if total is None else total + result
        self._module.train()
        return None if total is None else total.tensor()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Rank 0 copies its module: every rank has the whole model."""
        return self._copy(self._module.state_dict())

    def full_gradients(self) -> dict[str, Tensor]:
        """As the last step left them, before it clipped them."""
        grads = {name: parameter.grad for name, parameter in self._module.named_parameters()}
        return self._copy(self._unclipped({name: grad for name, grad in grads.items() if grad is not None}))

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        """Likewise."""
        return self._copy(kept_by(self._optimizer, self._module.named_parameters(), key))

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module and its optimizer."""
        return self._module, self._optimizer

    def copied(self) -> Iterable[Tensor]:
        """All parameters that are not sharded."""
        return [parameter for parameter in self._module.parameters() if not hasattr(parameter, "to_local")]

    def local_state(self) -> dict[str, Any]:
        """Also the scale of the loss."""
        return {**super().local_state(), "scaler": self._numerics.local_state()}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Restore it."""
        super().load_local_state(state)
        self._numerics.load_local_state(state["scaler"])

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mine = tensors.items() if self._world.rank == 0 else ()
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in mine}


def to_device(module: nn.Module, run: RunConfig, device: torch.device) -> nn.Module:
    """Move a module to a device, in the run's dtype and memory format."""
    module = in_arithmetic(module, dtype_of(run.precision), device)
    return module.to(memory_format=torch.channels_last) if run.channels_last else module


def share_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group (None: all) its first rank's buffers.

    Under norm=batch each rank has its own running statistics, but one model is evaluated.
    """
    share(module.buffers(), group)


@torch.no_grad()
def share(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group (None: all) its first rank's values, in any memory layout."""
    for tensor in tensors:
        values = tensor.contiguous()
        dist.broadcast(values, group=group, group_src=0)
        tensor.copy_(values)


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients of all trainable parameters, or of this rank's shards of them."""
    return sum(local(p).numel() * p.element_size() for p in module.parameters() if p.requires_grad)
