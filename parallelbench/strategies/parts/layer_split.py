"""A model cut into layers that live in different processes, one of which works at a time.

A *segment* is a run of consecutive layers of one owner. The activation of a segment goes to the owner of the next,
its gradient comes back the same way; an owner may hold several segments (fc1 and fc4, say).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.loaders.batch import Shard
from parallelbench.probes.spans import Phase, Spanned
from parallelbench.rank.numerics import Numerics, sums
from parallelbench.strategies.parts.replicas import BaseReplica, kept_buffers, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from parallelbench.loaders.batch import Batch
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER_LENGTH = 8


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of one owner."""

    index: int
    owner: int
    names: tuple[str, ...]


def segments_of(layers: Mapping[str, int]) -> list[Segment]:
    """Group the layers, given in order with their owners, into segments."""
    runs = [(owner, tuple(names)) for owner, names in groupby(layers, key=lambda name: layers[name])]
    return [Segment(index, owner, names) for index, (owner, names) in enumerate(runs)]


class Channel:
    """Sends tensors between ranks; their dtype and shape travel along the first time only."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[torch.dtype, tuple[int, ...]]] = {}

    def send(self, value: Tensor, to: int, *, segment: int) -> None:
        """Send the output of `segment`."""
        key = (segment, value.shape[0])
        if key not in self._known:
            self._known[key] = (value.dtype, tuple(value.shape))
            header = [_DTYPES.index(value.dtype), value.dim(), *value.shape]
            dist.send(torch.tensor(header + [0] * (_HEADER_LENGTH - len(header))), to)
        dist.send(value.contiguous(), to)

    def receive(self, source: int, *, segment: int, batch_size: int) -> Tensor:
        """Receive the output of `segment`."""
        key = (segment, batch_size)
        if key not in self._known:
            header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
            dist.recv(header, source)
            code, dim, *sizes = header.tolist()
            self._known[key] = (_DTYPES[code], tuple(sizes[:dim]))
        dtype, shape = self._known[key]
        value = torch.empty(shape, dtype=dtype)
        dist.recv(value, source)
        return value


class StagesReplica(BaseReplica):
    """The segments of one rank, driven in the order that the data flows."""

    waiting: ClassVar[Phase] = "bubble"

    def __init__(self, model: nn.Sequential, layers: Mapping[str, int], *, run: RunConfig, world: World) -> None:
        self._rank = world.rank
        self._segments = segments_of(layers)
        first, last = self._segments[0].owner, self._segments[-1].owner
        super().__init__(Shard(images=first == world.rank, labels=last == world.rank))
        self._numerics = Numerics(run.precision, "cpu")
        state = place(model, run, torch.device("cpu")).state_dict()
        self._template = {name: value.to("meta") for name, value in state.items()}
        self._owners = {name: layers[name.partition(".")[0]] for name in state}
        self._parameters = [name for name, _ in model.named_parameters()]
        self._mine = nn.ModuleDict(
            {name: getattr(model, name) for name, owner in layers.items() if owner == world.rank}
        )
        self._forward: dict[int, Callable[[Tensor], Tensor]] = {}
        for segment in self._segments:
            if segment.owner == world.rank:
                part = nn.Sequential(*(self._mine[name] for name in segment.names))
                self._forward[segment.index] = torch.compile(part) if run.compile else part
        self._optimizer = run.optimizer.build(self._mine.parameters(), run, "cpu")
        self._channel = Channel()

    def step(self, batch: Batch) -> Tensor | None:
        """Forward, backward, update, each segment in its turn."""
        result = self._forward_backward(batch)
        self._update()
        return result

    def compile_warmup(self, batch: Batch) -> None:
        """Forward and backward without an update; buffers are put back."""
        with kept_buffers(self._mine):
            self._forward_backward(batch)
        self._optimizer.zero_grad(set_to_none=True)

    def _forward_backward(self, batch: Batch) -> Tensor | None:
        self._optimizer.zero_grad(set_to_none=True)
        result: Tensor | None = None
        values: list[tuple[Segment, Tensor, Tensor]] = []
        for segment in self._segments:
            if segment.owner != self._rank:
                continue
            value, output = self._run(segment, batch)
            if segment is self._segments[-1]:
                assert batch.labels is not None
                logits, output = output, self._loss(output, batch.labels)
                result = sums(output, logits, batch.labels)
            values.append((segment, value, output))
        for segment, value, output in reversed(values):
            self._backward(segment, value, output)
        return result

    def _run(self, segment: Segment, batch: Batch) -> tuple[Tensor, Tensor]:
        """Input and output of a segment; the output is sent on where there is a next one."""
        if segment.index == 0:
            assert batch.images is not None
            value = batch.images
        else:
            before = self._segments[segment.index - 1]
            value = self._channel.receive(before.owner, segment=before.index, batch_size=batch.size)
            value.requires_grad_(torch.is_grad_enabled())
        output = self._compute(segment, value)
        if segment is not self._segments[-1]:
            self._channel.send(output.detach(), self._segments[segment.index + 1].owner, segment=segment.index)
            self.traffic.send("activation", output.numel() * output.element_size())
        return value, output

    def _compute(self, segment: Segment, value: Tensor) -> Tensor:
        with self._numerics.autocast():
            return self._forward[segment.index](value)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._numerics.loss(logits, labels)

    def _differentiate(self, output: Tensor, gradient: Tensor | None) -> None:
        output.backward(gradient)

    def spanned(self) -> Iterable[Spanned]:
        """Forward, backward, update: what is waited for between them is another rank's turn."""
        yield Spanned(self, "_compute", "forward")
        yield Spanned(self, "_loss", "forward")
        yield Spanned(self, "_differentiate", "backward")
        yield from super().spanned()

    def _backward(self, segment: Segment, value: Tensor, output: Tensor) -> None:
        if segment is self._segments[-1]:
            self._differentiate(output, None)
        else:
            after = self._segments[segment.index + 1]
            gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
            dist.recv(gradient, after.owner)
            self._differentiate(output, gradient)
        if segment.index > 0:
            assert value.grad is not None
            dist.send(value.grad.contiguous(), self._segments[segment.index - 1].owner)
            self.traffic.send("activation", value.grad.numel() * value.grad.element_size())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over the test set on the last segment's owner."""
        self._mine.eval()
        total: Tensor | None = None
        for batch in batches:
            for segment in self._segments:
                if segment.owner == self._rank:
                    _, output = self._run(segment, batch)
            if self.data_shard.labels:
                assert batch.labels is not None
                result = sums(self._numerics.loss(output, batch.labels), output, batch.labels)
                total = result if total is None else total + result
        self._mine.train()
        return total

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """This rank's layers and their optimizer."""
        return self._mine, self._optimizer

    def full_state_dict(self) -> dict[str, Tensor]:
        """Rank 0 receives what the others hold, in the model's order."""
        return self._gather(self._mine.state_dict(), list(self._template))

    def full_gradients(self) -> dict[str, Tensor]:
        """As the last step left them."""
        mine = {name: p.grad for name, p in self._mine.named_parameters() if p.grad is not None}
        return self._gather(mine, self._parameters)

    def _gather(self, mine: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        return gather(mine, {name: self._owners[name] for name in names}, self._template, rank=self._rank)


def gather(
    mine: Mapping[str, Tensor], owners: Mapping[str, int], template: Mapping[str, Tensor], *, rank: int
) -> dict[str, Tensor]:
    """Collect tensors on rank 0's CPU in the order of `owners`, which says on which rank each one is.

    `mine` are this rank's; `template` tells shapes and dtypes. All ranks among the owners, and rank 0, must call it.
    """
    gathered: dict[str, Tensor] = {}
    for name, owner in owners.items():
        if owner == rank == 0:
            gathered[name] = mine[name].detach().to("cpu", copy=True)
        elif owner == rank:
            dist.send(mine[name].detach().cpu().contiguous(), 0)
        elif rank == 0:
            gathered[name] = torch.empty_like(template[name], device="cpu", memory_format=torch.contiguous_format)
            dist.recv(gathered[name], owner)
    return gathered
