"""The naive split: whole layers on different devices, one device at work at a time.

On GPUs one process moves activations from device to device, as in the tutorial "Model Parallelism vs Data
Parallelism: Examples". On CPUs, where `.to("cpu:1")` stays where it is, each part has a process of its own.
Either way the arithmetic is that of one device, bit for bit; the speed-up is at most 1.

Between processes, a *segment* is a run of consecutive layers on one rank, its owner. The activation of a segment goes
to the owner of the next, its gradient comes back the same way. A rank may own several segments (fc1 and fc4, for
example).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.config.components import Shard
from parallelbench.strategies.pipeline.partition import values_between
from parallelbench.strategies.replica import LayersReplica, added, numerics_of, to_device
from parallelbench.strategies.tensor.shards import optimizer_of
from parallelbench.world.numerics import Sums, sums
from parallelbench.world.spans import Phase, phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from parallelbench.config.components import Batch
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


def crossing_bytes(model: nn.Sequential, layers: dict[str, int], run: RunConfig, world: World) -> int:
    """Bytes that a step moves from device to device: at each cut the activation onwards, and its gradient back where
    there is one.
    """
    values, parts = values_between(model, run, world.device, run.global_batch_size), list(layers.values())
    trained = list(accumulate((any(p.requires_grad for p in layer.parameters()) for layer in model), operator.or_))
    cuts = [i for i in range(1, len(parts)) if parts[i] != parts[i - 1]]
    return sum(values[i].nbytes * (2 if trained[i - 1] else 1) for i in cuts)


def spread(
    model: nn.Sequential, layers: dict[str, int], run: RunConfig, devices: tuple[torch.device, ...]
) -> nn.Sequential:
    """Put each layer on its device, and let it fetch its input from the device of the layer before."""

    def fetch_to(device: torch.device) -> object:
        return lambda _layer, inputs: (inputs[0].to(device, non_blocking=True),)

    for (name, index), layer in zip(layers.items(), model, strict=True):
        # Layer by layer from the host: the whole model need not fit on any one device.
        setattr(model, name, to_device(layer, run, devices[index]))
        getattr(model, name).register_forward_pre_hook(fetch_to(devices[index]))
    return model


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


class LayerSplitReplica(LayersReplica):
    """The segments of one rank, run in the order of the layers."""

    waiting: ClassVar[Phase] = "bubble"

    def __init__(self, model: nn.Sequential, layers: Mapping[str, int], *, run: RunConfig, world: World) -> None:
        """Keep this rank's layers; `layers` names the rank of each, in order."""
        self._numerics = numerics_of(run, "cpu")
        self._segments = segments_of(layers)
        trains = {
            name: any(each.requires_grad for each in layer.parameters()) for name, layer in model.named_children()
        }
        trained = [any(trains[name] for name in segment.names) for segment in self._segments]
        self._gets_gradient = list(accumulate(trained, operator.or_))
        """Of each segment, whether it or one before it has parameters that need a gradient."""
        values = dict(zip(layers, values_between(model, run, torch.device("cpu"), 1)[1:], strict=True))
        self._outputs = [values[segment.names[-1]] for segment in self._segments]
        """What each segment gives of one sample: meta tensors."""
        first, last = self._segments[0].owner, self._segments[-1].owner
        shard = Shard(images=first == world.rank, labels=last == world.rank)
        super().__init__(model, layers, data_shard=shard, rank=world.rank, run=run)
        to_device(self._layers, run, torch.device("cpu"))
        self._forward: dict[int, Callable[[Tensor], Tensor]] = {}
        for segment in self._segments:
            if segment.owner == world.rank:
                part = nn.Sequential(*(self._layers[name] for name in segment.names))
                self._forward[segment.index] = torch.compile(part) if run.compile else part
        self._optimizer = optimizer_of(self._layers.parameters(), run, "cpu")

    def step(self, batch: Batch) -> Sums | None:
        """Forward, backward, update, one segment after the other."""
        result = self._forward_backward(batch)
        self._update()
        return result

    def _forward_backward(self, batch: Batch) -> Sums | None:
        self._optimizer.zero_grad(set_to_none=True)
        result: Sums | None = None
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
            if self._gets_gradient[segment.index]:
                self._backward(segment, value, output)
        return result

    def _run(self, segment: Segment, batch: Batch) -> tuple[Tensor, Tensor]:
        """Input and output of a segment; the output is sent to the next segment's owner, if there is one."""
        if segment.index == 0:
            assert batch.images is not None
            value = batch.images
        else:
            before = self._segments[segment.index - 1]
            example = self._outputs[before.index]
            value = torch.empty(batch.size, *example.shape[1:], dtype=example.dtype)
            dist.recv(value, before.owner)
            value.requires_grad_(self._gets_gradient[before.index] and torch.is_grad_enabled())
        output = self._compute(segment, value)
        if segment is not self._segments[-1]:
            dist.send(output.detach().contiguous(), self._segments[segment.index + 1].owner)
            self.traffic.send("activation", output.nbytes)
        return value, output

    def _compute(self, segment: Segment, value: Tensor) -> Tensor:
        with phase("forward"), self._numerics.autocast():
            return self._forward[segment.index](value)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        with phase("forward"):
            return self._numerics.training_loss(logits, labels)

    def _differentiate(self, output: Tensor, gradient: Tensor | None) -> None:
        with phase("backward"):
            output.backward(gradient)

    def _backward(self, segment: Segment, value: Tensor, output: Tensor) -> None:
        if segment is self._segments[-1]:
            self._differentiate(output, None)
        else:
            after = self._segments[segment.index + 1]
            gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
            dist.recv(gradient, after.owner)
            self._differentiate(output, gradient)
        if value.requires_grad:
            assert value.grad is not None
            dist.send(value.grad.contiguous(), self._segments[segment.index - 1].owner)
            self.traffic.send("activation", value.grad.nbytes)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over the test set on the last segment's owner."""
        self._layers.eval()
        total: Sums | None = None
        for batch in batches:
            for segment in self._segments:
                if segment.owner == self._rank:
                    _, output = self._run(segment, batch)
            if self.data_shard.labels:
                assert batch.labels is not None
                result = self._numerics.sums(self._numerics.loss(output, batch.labels), output, batch.labels)
                total = added(total, result)
        self._layers.train()
        return None if total is None else total.tensor()
