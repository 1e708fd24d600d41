"""The replica of everything that pipelines: stages of consecutive layers, and `torch.distributed.pipelining`.

Stages may also have copies along a data dimension, whose gradients are averaged once per step, and their linear layers
may be sharded along a tensor dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import pipelining

from parallelbench.loaders.batch import Shard
from parallelbench.probes.spans import Phase, Spanned
from parallelbench.rank.numerics import sums
from parallelbench.strategies.parts.layer_split import gather
from parallelbench.strategies.parts.pipeline_parts import Parts
from parallelbench.strategies.parts.replicas import BaseReplica, kept_buffers, share
from parallelbench.strategies.parts.shapes import size_bytes
from parallelbench.strategies.parts.sharded import whole
from parallelbench.strategies.parts.state import local
from parallelbench.strategies.parts.tensors import optimizer_of, share_replicated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from parallelbench.loaders.batch import Batch
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.parts.positions import Position
    from parallelbench.strategies.parts.schedules import Pipeline

_SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


class PipelineReplica(BaseReplica):
    """This rank's stages of a pipeline."""

    waiting: ClassVar[Phase] = "bubble"

    def __init__(
        self,
        model: nn.Sequential,
        stage_of: Mapping[str, int],
        pipeline: Pipeline,
        *,
        run: RunConfig,
        world: World,
        position: Position,
    ) -> None:
        self._pipeline, self._world = pipeline, world
        self._position = here = position
        self._parts = parts = Parts(model, stage_of, pipeline, run=run, world=world, position=here)
        super().__init__(Shard(here.copy, here.copies, images=0 in parts.indices, labels=parts.last in parts.indices))
        self._mine = parts.layers
        self._optimizer = optimizer_of(self._mine.parameters(), run, world.device_type)
        self.hides_communication = here.tensor is not None and (world.device_type == "cuda" or run.compile)
        self._schedule = self._new_schedule()
        self._sums: list[Tensor] = []

    def _new_schedule(self) -> Any:
        parts = self._parts
        self._stages = stages = [
            pipelining.PipelineStage(
                stage,
                index,
                self._pipeline.stages,
                self._world.device,
                # Given shapes spare the ranks from asking each other, which runs everything once.
                input_args=_example(parts.values[index], requires_grad=index > 0),
                output_args=_example(parts.values[index + 1], requires_grad=True),
                group=self._position.pipeline,
            )
            for index, stage in parts.stages.items()
        ]
        schedule = _SCHEDULES[self._pipeline.schedule]
        single = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
        return schedule(
            stages[0] if single else stages,
            self._pipeline.micro_batches,
            loss_fn=lambda logits, labels: self._loss(logits, labels),  # as it is then: a pass may put a span around it
            scale_grads=False,
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """A micro-batch's part of the batch's mean loss."""
        loss = self._parts.numerics.loss(logits, labels)
        self._sums.append(sums(loss, logits, labels))
        return loss / self._pipeline.micro_batches

    def step(self, batch: Batch) -> Tensor | None:
        """All micro-batches forward and backward, gradients averaged over the copies, one update."""
        result = self._forward_backward(batch)
        self._update()
        self._count_step()
        return result

    def spanned(self) -> Iterable[Spanned]:
        """Each stage's work on a micro-batch, averaging, update: the schedule's waiting between them is its bubble."""
        for stage in self._stages:
            yield Spanned(stage, "forward_one_chunk", "forward")
            yield Spanned(stage, "backward_one_chunk", "backward")
            yield Spanned(stage, "backward_weight_one_chunk", "backward")
        yield Spanned(self, "_loss", "forward")
        yield Spanned(self, "_average", "communication")
        yield from super().spanned()

    def _count_step(self) -> None:
        micro_batches, here = self._pipeline.micro_batches, self._position
        self.traffic.send("activation", micro_batches * self._parts.sent_bytes())
        if here.tensor is not None:
            self.traffic.all_reduce("activation", micro_batches * self._parts.summed_bytes, here.tensor.size())
        self.traffic.all_reduce("gradient", self._parts.gradient_bytes, here.copies)

    def compile_warmup(self, batch: Batch) -> None:
        """Forward and backward without an update; buffers are put back."""
        with kept_buffers(self._mine):
            self._forward_backward(batch)
        self._optimizer.zero_grad(set_to_none=True)

    def _forward_backward(self, batch: Batch) -> Tensor | None:
        self._optimizer.zero_grad(set_to_none=True)
        self._sums.clear()
        inputs = () if batch.images is None else (batch.images,)
        self._schedule.step(*inputs, target=batch.labels, return_outputs=False)
        if self._position.copies > 1:
            self._average()
        return self._owned_sums()

    def _owned_sums(self) -> Tensor | None:
        return torch.stack(self._sums).sum(0) if self._sums and self._position.owns_loss else None

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients over the copies of these stages, in one message."""
        grads = [local(p.grad) for p in self._mine.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(grads).div_(self._position.copies)
        dist.all_reduce(flat, group=self._position.data)
        for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(mean)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over the test set where the last stage is; batches go through the stages in pieces, of any size."""
        if self._position.copies > 1:
            share(self._mine.buffers(), self._position.data)
        if self._position.tensor is not None:
            share_replicated(self._mine, self._position.tensor)
        self._mine.eval()
        self._sums.clear()
        for batch in batches:
            self._evaluate(batch)
        self._mine.train()
        return self._owned_sums()

    def _evaluate(self, batch: Batch) -> None:
        parts, sizes = self._parts, _pieces(batch.size, self._pipeline.micro_batches)
        sends: list[tuple[Any, Tensor]] = []
        outputs: list[Tensor] = []
        for index in parts.indices:
            inputs = outputs if index - 1 in parts.indices else self._inputs(index, batch, sizes)
            if len(parts.indices) > 1:
                # Where the stages go round, a rank that sends before it has received may wait for one that does
                # likewise: a message may last until it is received, and NCCL's don't overtake each other. Whole
                # stages in their order can't wait in a circle.
                inputs = list(inputs)
            outputs = []
            for value in inputs:
                output = parts.stages[index](value)
                if index == parts.last or index + 1 in parts.indices:
                    outputs.append(output)
                else:
                    sends.append((dist.isend(output, parts.owners[index + 1]), output))
                    self.traffic.send("activation", size_bytes(output))
        if self.data_shard.labels and outputs:
            assert batch.labels is not None
            logits = torch.cat(outputs)
            self._sums.append(sums(parts.numerics.loss(logits, batch.labels), logits, batch.labels))
        for work, _ in sends:
            work.wait()

    def _inputs(self, index: int, batch: Batch, sizes: list[int]) -> Iterator[Tensor]:
        """What enters a stage, piece by piece."""
        if index == 0:
            assert batch.images is not None
            yield from batch.images.split(sizes)
            return
        example = self._parts.values[index]
        for size in sizes:
            value = torch.empty(size, *example.shape[1:], dtype=example.dtype, device=self._world.device)
            dist.recv(value, self._parts.owners[index - 1])
            yield value

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """This rank's layers and their optimizer."""
        return self._mine, self._optimizer

    def full_state_dict(self) -> dict[str, Tensor]:
        """Rank 0 receives what the others hold, in the model's order."""
        return self._gather(self._mine.state_dict(), list(self._parts.template))

    def full_gradients(self) -> dict[str, Tensor]:
        """As the last step left them."""
        mine = {name: p.grad for name, p in self._mine.named_parameters() if p.grad is not None}
        return self._gather(mine, self._parts.names)

    def _gather(self, mine: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        mine = {name: whole(tensor) for name, tensor in mine.items()}
        if self._position.ranks[0] > 0:
            return {}  # another pipeline has the same
        owners = {name: self._parts.owner(name) for name in names}
        return gather(mine, owners, self._parts.template, rank=self._world.rank)


def _example(value: Tensor, *, requires_grad: bool) -> Tensor:
    return value.detach().clone().requires_grad_(requires_grad)


def _pieces(size: int, count: int) -> list[int]:
    """Sizes of at most `count` nearly equal pieces, none of them empty."""
    return [piece for i in range(count) if (piece := size * (i + 1) // count - size * i // count)]
