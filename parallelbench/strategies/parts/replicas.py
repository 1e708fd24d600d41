"""The replica that most strategies share: one module, called as a whole on every rank."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from parallelbench.models.norms import synchronize_norms
from parallelbench.probes.communication import Traffic
from parallelbench.probes.spans import Phase, Spanned
from parallelbench.rank.numerics import Numerics, sums
from parallelbench.strategies.parts.state import load_optimizer, load_tensors, optimizer_state, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from parallelbench.loaders.batch import Batch, Shard
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Push


class BaseReplica(ABC):
    """What every replica has."""

    waiting: ClassVar[Phase] = "communication"
    hides_communication: bool = False
    whole_epochs: ClassVar[bool] = False

    def __init__(self, data_shard: Shard) -> None:
        self.data_shard = data_shard
        self.traffic = Traffic()

    @abstractmethod
    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What holds this rank's parameters and buffers, and what updates them."""

    def local_state(self) -> dict[str, Any]:
        """Parameters, buffers, and the optimizer's state; a replica that keeps more between epochs adds it."""
        module, optimizer = self.trained()
        return {"tensors": tensors_of(module), "optimizer": optimizer_state(optimizer)}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Put them back in place."""
        module, optimizer = self.trained()
        load_tensors(module, state["tensors"])
        load_optimizer(optimizer, state["optimizer"])

    def take_pushes(self) -> list[Push]:
        """None: there is no parameter server."""
        return []

    def spanned(self) -> Iterable[Spanned]:
        """The update; a replica adds what else it does."""
        return [Spanned(self, "_update", "optimizer")]

    def _update(self) -> None:
        """Let the optimizer update this rank's parameters."""
        self.trained()[1].step()

    def close(self) -> None:  # noqa: B027 what most replicas do
        """Nothing to release besides memory."""


class ModuleReplica(BaseReplica):
    """A module that maps images to logits, trained by backward and one optimizer.

    `wrapped` is what training calls (a DDP module, say), `module` what it wraps: evaluation and state come from there.
    `optimizer` replaces the run's own (a sharded one, say). `count_step` adds the bytes that one step sends.
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
        before_evaluation: Callable[[], None] | None = None,
        count_step: Callable[[Traffic], None] | None = None,
    ) -> None:
        super().__init__(data_shard)
        self._module, self._world = module, world
        self._numerics = Numerics(run.precision, world.device_type)
        self._optimizer = optimizer or run.optimizer.build(module.parameters(), run, world.device_type)
        self._forward: Callable[[Tensor], Tensor] = wrapped if wrapped is not None else module
        if run.compile:
            self._forward = torch.compile(self._forward)
        self._before_evaluation, self._count_step = before_evaluation, count_step

    def step(self, batch: Batch) -> Tensor | None:
        """Forward, backward, update."""
        result = self._forward_backward(batch)
        self._update()
        if self._count_step is not None:
            self._count_step(self.traffic)
        return result

    def compile_warmup(self, batch: Batch) -> None:
        """Forward and backward without an update; buffers are put back."""
        with kept_buffers(self._module):
            self._forward_backward(batch)
        self._optimizer.zero_grad(set_to_none=True)

    def _forward_backward(self, batch: Batch) -> Tensor:
        assert batch.images is not None
        assert batch.labels is not None
        self._optimizer.zero_grad(set_to_none=True)
        logits, labels, loss = self._predict(batch.images, batch.labels)
        self._backward(loss)
        return sums(loss, logits, labels)

    def _predict(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, labels where those are, and the mean loss."""
        with self._numerics.autocast():
            logits = self._forward(images)
        labels = labels.to(logits.device, non_blocking=True)
        return logits, labels, self._numerics.loss(logits, labels)

    def _backward(self, loss: Tensor) -> None:
        self._numerics.scale(loss).backward()

    def _update(self) -> None:
        self._numerics.update(self._optimizer)

    def spanned(self) -> Iterable[Spanned]:
        """Forward, backward, update."""
        yield Spanned(self, "_predict", "forward")
        yield Spanned(self, "_backward", "backward", reduces=True)
        yield from super().spanned()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over this rank's part of the test set."""
        if self._before_evaluation is not None:
            self._before_evaluation()
        self._module.eval()
        total: Tensor | None = None
        for batch in batches:
            assert batch.images is not None
            assert batch.labels is not None
            with self._numerics.autocast():
                logits = self._module(batch.images)
            labels = batch.labels.to(logits.device, non_blocking=True)
            result = sums(self._numerics.loss(logits, labels), logits, labels)
            total = result if total is None else total + result
        self._module.train()
        return total

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every rank has everything: rank 0 copies it."""
        return self._copy(self._module.state_dict())

    def full_gradients(self) -> dict[str, Tensor]:
        """As the last step left them."""
        grads = {name: parameter.grad for name, parameter in self._module.named_parameters()}
        return self._copy({name: grad for name, grad in grads.items() if grad is not None})

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module and its optimizer."""
        return self._module, self._optimizer

    def local_state(self) -> dict[str, Any]:
        """Those, and the scale of the loss."""
        return {**super().local_state(), "scaler": self._numerics.local_state()}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Put them back."""
        super().load_local_state(state)
        self._numerics.load_local_state(state["scaler"])

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._world.rank:
            return {}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def place(module: nn.Module, run: RunConfig, device: torch.device) -> nn.Module:
    """Move a module to a device, in the run's dtype and memory format."""
    module = module.to(device=device, dtype=Numerics(run.precision, device.type).dtype)
    return module.to(memory_format=torch.channels_last) if run.channels_last else module


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Put the buffers (running statistics) back as they were."""
    before = [buffer.clone() for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.copy_(old)


def share_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group (None: all) its first rank's buffers.

    Under norm=batch each has its own running statistics, but one model is evaluated.
    """
    share(module.buffers(), group)


@torch.no_grad()
def share(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group (None: all) its first rank's values, whatever their layout in memory."""
    for tensor in tensors:
        values = tensor.contiguous()
        dist.broadcast(values, group=group, group_src=0)
        tensor.copy_(values)


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients of all trainable parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def in_ddp(
    model: nn.Sequential,
    run: RunConfig,
    world: World,
    *,
    bucket_mib: float,
    gradient_as_bucket_view: bool,
    static_graph: bool = False,
) -> DistributedDataParallel:
    """The model on this rank's device, in torch's DDP; every rank then holds rank 0's parameters."""
    from torch.nn.parallel import DistributedDataParallel

    module = place(model, run, world.device)
    synchronize_norms(module, dist.group.WORLD)
    return DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device_type == "cuda" else None,
        bucket_cap_mb=bucket_mib,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        **_buffers_stay(DistributedDataParallel),
    )


def _buffers_stay(ddp: type[nn.Module]) -> dict[str, Any]:
    """Running statistics are used in evaluation only, and shared before it; DDP would send them in every step.

    Torch 2.13 named the option anew. Under the new name buffers are sent once at the start, when all have the same.
    """
    known = inspect.signature(ddp).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
