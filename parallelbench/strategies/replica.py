"""Replicas: what all have in common, one module on every rank, and some of the model's layers on each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from parallelbench.measure.traffic import Traffic
from parallelbench.models.initial import fill
from parallelbench.models.modules import unchanged_buffers
from parallelbench.models.moe_layers import take_expert_tokens
from parallelbench.models.norms import count_compiled_norms
from parallelbench.strategies.clipping import Clipping, Groups
from parallelbench.strategies.state import (
    kept_by,
    load_optimizer,
    load_own_state,
    load_tensors,
    local,
    optimizer_state,
    own_state,
    tensors_of,
    undone_updates,
    undrawn_numbers,
    whole,
)
from parallelbench.world.numerics import MetricSums, Numerics, Sums, dtype_of, in_arithmetic, matching
from parallelbench.world.spans import Phase, backward_phase, phase, waits_are_hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.components import Batch, MeanLoss, Shard
    from parallelbench.config.replica import Push
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.context.tokens import OwnTokens
    from parallelbench.world.world import World


def numerics_of(run: RunConfig, device_type: str, *, loss: MeanLoss | None = None) -> Numerics:
    """The arithmetic of a run, with its metric and its loss, or one that computes the same in another way."""
    loss = run.model.with_own_loss(loss or run.loss.build())
    metric = MetricSums(run.metric_size, run.metric.build()) if run.metric_size else None
    return Numerics(run.precision, device_type, loss=loss, metric=metric, compiles_loss=run.compiles_step)


class BaseReplica(ABC):
    """What all replicas have in common."""

    waiting: ClassVar[Phase] = "communication"
    hides_communication: bool = False
    whole_epochs: ClassVar[bool] = False
    shares_at_evaluation: bool = False
    _compiles_update: bool = False

    def __init__(self, data_shard: Shard, run: RunConfig | None = None) -> None:
        """`run`: whose `lr_schedule` and `clip_norm` updates follow; None: gradients and rate are used as they are."""
        self.data_shard = data_shard
        self.traffic = Traffic()
        self._rate = ScheduledRate(run) if run is not None and run.lr_schedule.changes else None
        self._clip_norm = None if run is None else run.clip_norm

    @abstractmethod
    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module with this rank's parameters and buffers, and the optimizer that updates them."""

    @abstractmethod
    def _forward_backward(self, batch: Batch) -> Sums | None:
        """Leave this rank's gradients of a batch; returns the sums that `step` returns."""

    def compile_warmup(self, batch: Batch) -> None:
        """Forward and backward, and whole steps where updates are compiled; all of it is undone, random numbers too."""
        module, optimizer = self.trained()
        undone = undone_updates(module, optimizer) if self._compiles_update else nullcontext()
        with undrawn_numbers(module, optimizer), unchanged_buffers(module), undone:
            self._forward_backward(batch)
            if self._compiles_update:
                self._update()
                self._forward_backward(batch)
                self._update()
        optimizer.zero_grad(set_to_none=True)

    def local_state(self) -> dict[str, Any]:
        """Parameters, buffers, the optimizer's state, and what modules and an optimizer of an author's own keep in
        attributes; a replica that keeps more between epochs adds it.
        """
        module, optimizer = self.trained()
        rate = {} if self._rate is None else {"rate": self._rate.local_state()}
        own = {"own": own} if (own := own_state(module, optimizer)) else {}
        return {"tensors": tensors_of(module), "optimizer": optimizer_state(optimizer), **rate, **own}

    def load_local_state(self, state: dict[str, Any]) -> None:
        module, optimizer = self.trained()
        load_tensors(module, state["tensors"])
        load_optimizer(optimizer, state["optimizer"])
        load_own_state(module, optimizer, state.get("own", {}))
        if self._rate is not None:
            self._rate.load_local_state(state["rate"])

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        """None, but where a replica gathers it."""
        return None

    def copied(self) -> Mapping[int, Iterable[Tensor]]:
        """None, but where a replica says so."""
        return {}

    def take_pushes(self) -> list[Push]:
        """None: there is no parameter server."""
        return []

    def take_norms(self) -> dict[str, float]:
        return {} if self._clipping is None else self._clipping.norms.take()

    def take_expert_tokens(self) -> dict[int, list[int]]:
        """Of the blocks of this rank's module."""
        return take_expert_tokens(self.trained()[0])

    def _update(self) -> None:
        """Clip the gradients, set the step's rate, and let the optimizer update this rank's parameters."""
        with phase("optimizer"):
            if self._clipping is not None:
                self._clip(self._clipping)
            if self._rate is not None:
                self._rate.next_step(self.trained()[1])
            self._apply_gradients()

    @cached_property
    def _clipping(self) -> Clipping | None:
        """What clips this rank's gradients; None: nothing does."""
        if self._clip_norm is None:
            return None
        parameters, over = self._counted()
        return Clipping(self._clip_norm, parameters, over=over, traffic=self.traffic)

    def _counted(self) -> tuple[Iterable[Tensor], Groups]:
        """This rank's parameters that count in the gradient's norm, and groups whose ranks have others."""
        return self.trained()[0].parameters(), ()

    def _clip(self, clipping: Clipping) -> None:
        clipping.clip()

    def _unclipped(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gradients of the last update as they were before."""
        return gradients if self._clipping is None else self._clipping.unclipped(gradients)

    def _apply_gradients(self) -> None:
        self.trained()[1].step()

    def close(self) -> None:  # noqa: B027 what most replicas do
        """Nothing to release besides memory."""


class ScheduledRate:
    """Counts training steps, and gives each the rate that the run's schedule has for it.

    A step counts also where fp16 overflowed and nothing was updated.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run, self._taken = run, 0

    def next_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rate of the next update."""
        self._taken += 1
        factor = self._run.rate_factor(self._taken)
        for group in optimizer.param_groups:
            # Torch's own schedulers keep the full rate here, too: it is saved and loaded with the optimizer's state.
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def local_state(self) -> dict[str, Any]:
        """How many steps there were."""
        return {"taken": self._taken}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._taken = state["taken"]


class ModuleReplica(BaseReplica):
    """A module that every rank calls as a whole, on its samples, and trains by backward and one optimizer.

    It is the replica of every mesh: ranks may hold copies of the module or shards, of other samples, the same ones, or
    parts of them.

    Training calls `wrapped` (a DDP module, for example); evaluation and state use `module`, which it wraps.
    `optimizer` and `loss` replace the run's own (by sharded ones, for example). `count_step` adds the bytes that a
    step sends.
    `micro_batches`: pieces of a batch whose gradients add up; `no_sync` is the context of all but the last, after which
    ranks average them. `after_backward`: what a step's gradients still need from other ranks, counted as it is sent.
    `tokens`: those that this rank has of each sample; None: all. `alike`: ranks that compute the same from the same
    samples; the first of them owns the loss.
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
        after_evaluation: Callable[[], None] | None = None,
        count_step: Callable[[Traffic], None] | None = None,
        micro_batches: int = 1,
        no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
        after_backward: Callable[[Traffic], None] | None = None,
        tokens: OwnTokens | None = None,
        alike: DeviceMesh | None = None,
    ) -> None:
        super().__init__(data_shard, run)
        self._module, self._world = module, world
        self._numerics = numerics_of(run, world.device_type, loss=loss)
        self._optimizer = optimizer or run.optimizer.build(module.parameters(), run, world.device_type)
        self._forward: Callable[[Tensor], Tensor] = wrapped if wrapped is not None else module
        self._compiled = run.compile
        if run.compile:
            self._forward = torch.compile(self._forward)
        self._compiles_update = run.compiles_step
        self._before_evaluation, self._after_evaluation = before_evaluation, after_evaluation
        self._count_step, self._after_backward = count_step, after_backward
        self._micro_batches, self._no_sync = micro_batches, no_sync
        self._tokens, self._alike = tokens, alike
        self._one: Tensor | None = None
        """The gradient of the loss by itself."""
        parameters = list(module.parameters())
        if tokens is not None or any(isinstance(each, DTensor) for each in parameters):
            # Layers themselves wait for other ranks.
            self.hides_communication = waits_are_hidden(world.device_type, compiled=run.compile)

    def step(self, batch: Batch) -> Sums | None:
        result = self._forward_backward(batch)
        self._update()
        if self._count_step is not None:
            self._count_step(self.traffic)
        return result if self._owns_loss else None

    def _forward_backward(self, batch: Batch) -> Sums:
        self._optimizer.zero_grad(set_to_none=True)
        *others, last = self._pieces(self._cut(batch))
        total: Sums | None = None
        for images, labels in others:
            with self._no_sync():
                total = added(total, self._take_gradient(images, labels))
        total = added(total, self._take_gradient(*last))
        if self._after_backward is not None:
            with phase("backward"), phase("communication"):
                self._after_backward(self.traffic)
        return total

    def _pieces(self, batch: Batch) -> Iterable[tuple[Tensor, Tensor]]:
        """Samples and labels of each micro-batch."""
        assert batch.images is not None
        assert batch.labels is not None
        if self._micro_batches == 1:
            return [(batch.images, batch.labels)]
        parts = (values.chunk(self._micro_batches) for values in (batch.images, batch.labels))
        return zip(*parts, strict=True)

    def _take_gradient(self, images: Tensor, labels: Tensor) -> Sums:
        """Add to the gradients what these samples, a micro-batch, have of the batch's."""
        with phase("forward"):
            logits, labels, loss = self._predict(images, labels)
        result = self._owned_sums(loss, logits, labels)
        if self._micro_batches > 1:
            loss = loss / self._micro_batches
        with backward_phase(loss):
            self._backward(loss)
        if self._compiled:
            count_compiled_norms(self._module, self.traffic)
        return result

    def _cut(self, batch: Batch) -> Batch:
        """What this rank computes of its samples."""
        return batch if self._tokens is None else self._tokens.of(batch)

    @property
    def _owns_loss(self) -> bool:
        return self._alike is None or self._alike.get_local_rank() == 0

    def _owned_sums(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
        """What this rank owns of a batch whose mean loss is known."""
        if self._tokens is not None:
            loss, logits = self._tokens.share(loss, logits)
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

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over this rank's part of the test set; a collective where ranks share layers or sequences."""
        if self._before_evaluation is not None:
            self._before_evaluation()
        self._module.eval()
        total: Sums | None = None
        for batch in map(self._cut, batches):
            assert batch.images is not None
            assert batch.labels is not None
            with self._numerics.autocast():
                logits = self._module(batch.images)
            labels = batch.labels.to(logits.device, non_blocking=True)
            total = added(total, self._owned_sums(self._numerics.loss(logits, labels), logits, labels))
        self._module.train()
        if self._after_evaluation is not None:
            self._after_evaluation()
        if total is None or not self._owns_loss:
            return None
        return total.tensor() if self._tokens is None else self._tokens.total(total.tensor())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Rank 0 copies its module."""
        return self._copy(self._module.state_dict())

    def full_gradients(self) -> dict[str, Tensor]:
        """As the last step left them, before it clipped them."""
        grads = {name: parameter.grad for name, parameter in self._module.named_parameters()}
        return self._copy(self._unclipped({name: grad for name, grad in grads.items() if grad is not None}))

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        return self._copy(kept_by(self._optimizer, self._module.named_parameters(), key))

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._module, self._optimizer

    def copied(self) -> Mapping[int, Iterable[Tensor]]:
        """Parameters that are not sharded, which all ranks hold, and the shards that several groups of ranks hold.

        None among ranks that compute alike: what they hold whole is shared before each evaluation, so a comparison
        could not fail.
        """
        if self._alike is not None:
            return {}
        everywhere: list[Tensor] = []
        shards: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in self._module.parameters():
            if not isinstance(parameter, DTensor):
                everywhere.append(parameter)
            elif "replicate" in ((mesh := parameter.device_mesh).mesh_dim_names or ()):
                shards[1 + mesh.get_local_rank(mesh.ndim - 1)].append(local(parameter))
        return {0: everywhere, **shards}

    def local_state(self) -> dict[str, Any]:
        """Also the scale of the loss."""
        return {**super().local_state(), "scaler": self._numerics.local_state()}

    def load_local_state(self, state: dict[str, Any]) -> None:
        super().load_local_state(state)
        self._numerics.load_local_state(state["scaler"])

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On rank 0; every rank takes part, and puts shards together, one tensor at a time."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            together = whole(tensor)
            if self._world.rank == 0:
                copies[name] = together.detach().to("cpu", copy=True)
        return copies


def added(total: Sums | None, more: Sums) -> Sums:
    """Adds in place."""
    if total is None:
        return more
    total += more
    return total


def to_device(module: nn.Module, run: RunConfig, device: torch.device) -> nn.Module:
    """Move a module to a device, in the run's dtype and memory format; what has no values yet gets its initial ones.

    Child by child, so that the host holds one of them, besides what stays there.
    """
    for part in (*module.children(), module):
        fill(part)
        in_arithmetic(part, dtype_of(run.precision), device)
    return module.to(memory_format=torch.channels_last) if run.channels_last else module


_MESSAGE_BYTES = 25 * 2**20
"""What `share` copies together, at most, but for a tensor that is larger by itself."""


def share_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group (None: all) its first rank's buffers.

    Under norm=batch each rank has its own running statistics, but one model is evaluated.
    """
    share(module.buffers(), group)


@torch.no_grad()
def share(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group (None: all) its first rank's values, in any memory layout.

    As DDP does at its start: values of a type go together, in messages of bounded size.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if values := list(tensors):
        dist._broadcast_coalesced(group, values, _MESSAGE_BYTES, 0)  # type: ignore[attr-defined]


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[Tensor], group: dist.ProcessGroup, traffic: Traffic, *, divisor: int = 1
) -> None:
    """Add up this rank's gradients over a group, each divided before, in one message.

    By hand: torch 2.15's NCCL backend sends a message for each tensor of `allreduce_coalesced`.
    """
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    if not gradients:
        return  # all are frozen, on each rank
    flat = _flatten_dense_tensors(gradients)
    if divisor > 1:
        flat.div_(divisor)
    dist.all_reduce(flat, group=group)
    traffic.all_reduce("gradient", flat.nbytes, group.size())
    for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(total)


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients of all trainable parameters, or of this rank's shards of them."""
    return sum(local(p).nbytes for p in module.parameters() if p.requires_grad)


class LayersReplica(BaseReplica):
    """Some of the model's layers on this rank, the others on other ranks; subclasses set `_optimizer`.

    `owners` says on which rank each layer is.
    """

    _optimizer: torch.optim.Optimizer

    def __init__(
        self, model: nn.Sequential, owners: Mapping[str, int], *, data_shard: Shard, rank: int, run: RunConfig
    ) -> None:
        super().__init__(data_shard, run)
        self._compiles_update = run.compiles_step
        dtype = dtype_of(run.precision)
        self._owners, self._rank = owners, rank
        self._layers = nn.ModuleDict({name: layer for name, layer in model.named_children() if owners[name] == rank})
        self._parameter_names = [name for name, _ in model.named_parameters()]
        self._trainable_names = [name for name, each in model.named_parameters() if each.requires_grad]
        self._template = {
            name: tensor.to("meta", matching(tensor.dtype, dtype)) for name, tensor in model.state_dict().items()
        }
        """Parameters and buffers of the whole model: meta tensors."""

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._layers, self._optimizer

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Evaluation mode within. At the end each module has its mode back: a `train` of the whole model's own, which
        may keep some of them frozen, is on no rank.
        """
        modes = [(module, module.training) for module in self._layers.modules()]
        self._layers.eval()
        yield
        self._layers.train()
        for module, is_training in modes:
            module.training = is_training

    def _counted(self) -> tuple[Iterable[Tensor], Groups]:
        """No parameter is shared by layers of several ranks: `valid_map` and `why_shared` refuse it."""
        groups = self._optimizer.param_groups  # also where no layer has any
        return [parameter for group in groups for parameter in group["params"]], (self._ranks_group,)

    @property
    def _ranks_group(self) -> dist.ProcessGroup:
        """The ranks that hold one copy of the model together."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def full_state_dict(self) -> dict[str, Tensor]:
        """Rank 0 receives the other ranks' tensors, in the model's order."""
        return self._gather(self._layers.state_dict(), self._template)

    def full_gradients(self) -> dict[str, Tensor]:
        gradients = {name: p.grad for name, p in self._layers.named_parameters() if p.grad is not None}
        return self._gather(self._unclipped(gradients), self._trainable_names)

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        return self._gather(kept_by(self._optimizer, self._layers.named_parameters(), key), self._parameter_names)

    def _gather(self, own: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Collect the ranks' tensors on rank 0's CPU in the order of `names`; all owners of layers must call it."""
        own = {name: whole(tensor.detach()) for name, tensor in own.items()}
        gathered: dict[str, Tensor] = {}
        if min(self._owners.values()) > 0:
            return gathered  # these ranks hold a copy, which rank 0 has no part in
        for name in names:
            owner = self._owners[name.partition(".")[0]]
            if owner == self._rank == 0:
                gathered[name] = own[name].to("cpu", copy=True)
            elif owner == self._rank:
                dist.send(own[name].cpu().contiguous(), 0)
            elif self._rank == 0:
                template = self._template[name]
                gathered[name] = torch.empty_like(template, device="cpu", memory_format=torch.contiguous_format)
                dist.recv(gathered[name], owner)
        return gathered
