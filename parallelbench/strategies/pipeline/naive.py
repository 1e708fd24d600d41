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


class LayerSplitReplica(LayersReplica):
    """The segments of one rank, run in the order of the layers."""

    waiting: ClassVar[Phase] = "bubble"

    def __init__(self, model: nn.Sequential, layers: Mapping[str, int], *, run: RunConfig, world: World) -> None:
        """Keep this rank's layers; `layers` names the rank of each, in order."""
        self._numerics = numerics_of(run, "cpu")
        segments = [tuple(names) for _, names in groupby(layers, key=layers.__getitem__)]
        self._owner_of, self._last = [layers[names[0]] for names in segments], len(segments) - 1
        parts = [nn.Sequential(*(model.get_submodule(name) for name in names)) for names in segments]
        trained = [any(each.requires_grad for each in part.parameters()) for part in parts]
        self._gets_gradient = list(accumulate(trained, operator.or_))
        """Of each segment, whether it or one before it has parameters that need a gradient."""
        values = dict(zip(layers, values_between(model, run, torch.device("cpu"), 1)[1:], strict=True))
        self._outputs = [values[names[-1]] for names in segments]
        """What each segment gives of one sample: meta tensors."""
        shard = Shard(images=self._owner_of[0] == world.rank, labels=self._owner_of[-1] == world.rank)
        super().__init__(model, layers, data_shard=shard, rank=world.rank, run=run)
        to_device(self._layers, run, torch.device("cpu"))
        own = {index: parts[index] for index, owner in enumerate(self._owner_of) if owner == world.rank}
        self._own: dict[int, Callable[[Tensor], Tensor]] = {
            index: torch.compile(part) if run.compile else part for index, part in own.items()
        }
        """This rank's segments."""
        self._optimizer = optimizer_of(self._layers.parameters(), run, "cpu")

    def step(self, batch: Batch) -> Sums | None:
        """Forward, backward, update, one segment after the other."""
        result = self._forward_backward(batch)
        self._update()
        return result

    def _forward_backward(self, batch: Batch) -> Sums | None:
        self._optimizer.zero_grad(set_to_none=True)
        result: Sums | None = None
        done: list[tuple[int, Tensor, Tensor]] = []
        for index in self._own:
            value, output = self._run(index, batch)
            if index == self._last:
                assert batch.labels is not None
                with phase("forward"):
                    loss = self._numerics.training_loss(output, batch.labels)
                result, output = sums(loss, output, batch.labels), loss
            done.append((index, value, output))
        for index, value, output in reversed(done):
            if self._gets_gradient[index]:
                self._backward(index, value, output)
        return result

    def _run(self, index: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Input and output of a segment; the output is sent to the next segment's owner, if there is one."""
        if index == 0:
            assert batch.images is not None
            value = batch.images
        else:
            example = self._outputs[index - 1]
            value = torch.empty(batch.size, *example.shape[1:], dtype=example.dtype)
            dist.recv(value, self._owner_of[index - 1])
            value.requires_grad_(self._gets_gradient[index - 1] and torch.is_grad_enabled())
        with phase("forward"), self._numerics.autocast():
            output = self._own[index](value)
        if index < self._last:
            dist.send(output.detach().contiguous(), self._owner_of[index + 1])
            self.traffic.send("activation", output.nbytes)
        return value, output

    def _backward(self, index: int, value: Tensor, output: Tensor) -> None:
        gradient: Tensor | None = None
        if index < self._last:
            gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
            dist.recv(gradient, self._owner_of[index + 1])
        with phase("backward"):
            output.backward(gradient)
        if value.requires_grad:
            assert value.grad is not None
            dist.send(value.grad.contiguous(), self._owner_of[index - 1])
            self.traffic.send("activation", value.grad.nbytes)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over the test set on the last segment's owner."""
        total: Sums | None = None
        with self._in_evaluation():
            for batch in batches:
                for index in self._own:
                    _, output = self._run(index, batch)
                if self.data_shard.labels:
                    assert batch.labels is not None
                    result = self._numerics.sums(self._numerics.loss(output, batch.labels), output, batch.labels)
                    total = added(total, result)
        return None if total is None else total.tensor()
