"""One rank of a pipeline: its stages, trained by the schedules of `torch.distributed.pipelining`.

Stages may have copies along a data dimension, whose gradients are averaged once per step. Their linear layers may be
sharded along a tensor dimension.
"""

from __future__ import annotations

import functools
import operator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from parallelbench.config.components import Shard
from parallelbench.models.norms import count_compiled_norms, synchronize_norms
from parallelbench.strategies.pipeline.partition import piece_sizes, values_between
from parallelbench.strategies.replica import LayersReplica, numerics_of, share, sum_gradients, to_device
from parallelbench.strategies.state import local
from parallelbench.strategies.tensor.sequence import parameters_of_parts
from parallelbench.strategies.tensor.shards import local_values, optimizer_of, place_shards, share_replicated
from parallelbench.strategies.tensor.traffic import exchanged_bytes
from parallelbench.strategies.tensor.vocabulary import divided_loss
from parallelbench.world.spans import Phase, phase, waits_are_hidden

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from parallelbench.config.components import Batch
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.mesh import Position
    from parallelbench.strategies.pipeline.schedules import Pipeline
    from parallelbench.world.numerics import Numerics, Sums
    from parallelbench.world.world import World


_SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


class Stage(nn.Module):
    """Consecutive layers, called by a schedule; tensors sent to another rank are contiguous in memory."""

    def __init__(self, layers: Iterable[nn.Module], numerics: Numerics, *, compiled: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)
        if compiled:
            self.body.compile()
        self._numerics = numerics

    def forward(self, x: Tensor) -> Tensor:
        """Through all layers."""
        if x.requires_grad:
            x.register_hook(torch.Tensor.contiguous)
        with self._numerics.autocast():
            y: Tensor = self.body(x).contiguous()
        if torch.is_grad_enabled() and not y.requires_grad:
            y.requires_grad_()  # of frozen layers: schedules send its gradient back all the same
        return y


class TimedStage(pipelining.PipelineStage):
    """Torch's stage, whose work on a micro-batch is a phase; the waiting between them is the schedule's bubble."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward."""
        with phase("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Backward, or its half by inputs."""
        with phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """The other half."""
        with phase("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class PipelineReplica(LayersReplica):
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
        """Keep this rank's layers; `stage_of` names the stage of each layer, in order."""
        self._pipeline, self._world, self._position, self._compiled = pipeline, world, position, run.compile
        self._numerics = numerics_of(run, world.device_type, loss=divided_loss(run, position.tensor))
        self._ranks = [position.ranks[index] for index in pipeline.stage_devices()]
        """The rank of every stage."""
        self._own = [stage for stage, rank in enumerate(self._ranks) if rank == world.rank]
        """This rank's stages."""
        self._last = pipeline.stages - 1
        owners = {name: self._ranks[stage] for name, stage in stage_of.items()}
        shard = Shard(position.copy, position.copies, images=0 in self._own, labels=self._last in self._own)
        super().__init__(model, owners, data_shard=shard, rank=world.rank, run=run)
        self._note_shapes(model, stage_of, run)
        self._place_layers(run)
        self._stages = {
            index: Stage(
                [self._layers[name] for name, stage in stage_of.items() if stage == index],
                self._numerics,
                compiled=run.compile,
            )
            for index in self._own
        }
        self._in_parts = parameters_of_parts(self._layers, run)
        self._optimizer = optimizer_of(self._layers.parameters(), run, world.device_type)
        self.hides_communication = position.tensor is not None and waits_are_hidden(
            world.device_type, compiled=run.compile
        )
        self._copy_group = position.copy_group(world.rank)
        self._schedule = self._new_schedule()
        self._sums: list[Sums] = []

    def _note_shapes(self, model: nn.Sequential, stage_of: Mapping[str, int], run: RunConfig) -> None:
        """Find the shapes and bytes of what flows between stages; `model` is still whole."""
        position, device = self._position, self._world.device
        micro_batch = run.global_batch_size // position.copies // self._pipeline.micro_batches
        values = values_between(model, run, device, micro_batch)
        if position.tensor is not None:
            values = local_values(values, model, run, position.tensor.size())
        stages = list(stage_of.values())
        starts = [stages.index(stage) for stage in range(self._pipeline.stages)]
        self._values = [values[start] for start in [*starts, len(stages)]]
        """The input of each stage for a micro-batch, and the last one's output: meta tensors."""
        if position.tensor is not None:  # per micro-batch
            own = set(self._layers)
            self._exchanged = exchanged_bytes(model, run, device, samples=micro_batch, layers=own)

    def _place_layers(self, run: RunConfig) -> None:
        """Move this rank's layers, or its shards of them, to its device."""
        position, device = self._position, self._world.device
        synchronize_norms(self._layers, position.data)
        self.shares_at_evaluation = position.tensor is not None
        if position.tensor is None:
            to_device(self._layers, run, device)
        else:
            place_shards(self._layers, run, device, position.tensor)

    def _new_schedule(self) -> Any:
        stages = [
            TimedStage(
                stage,
                index,
                self._pipeline.stages,
                self._world.device,
                # Without given shapes the ranks would ask each other for them, and run everything once for that.
                input_args=self._values[index].clone().requires_grad_(index > 0),
                output_args=self._values[index + 1].clone().requires_grad_(),
                group=self._position.pipeline,
            )
            for index, stage in self._stages.items()
        ]
        schedule = _SCHEDULES[self._pipeline.schedule]
        single = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
        return schedule(
            stages[0] if single else stages,
            self._pipeline.micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """A micro-batch's part of the batch's mean loss."""
        with phase("forward"):
            loss = self._numerics.training_loss(logits, labels)
            self._sums.append(self._numerics.sums(loss, logits, labels))
            return loss / self._pipeline.micro_batches

    def step(self, batch: Batch) -> Sums | None:
        """All micro-batches forward and backward, gradients averaged over the copies, one update."""
        result = self._forward_backward(batch)
        self._update()
        self._count_step()
        return result

    @property
    def _ranks_group(self) -> dist.ProcessGroup:
        return super()._ranks_group if self._position.pipeline is None else self._position.pipeline

    def _count_step(self) -> None:
        micro_batches, position = self._pipeline.micro_batches, self._position
        self.traffic.send("activation", micro_batches * self._sent_bytes())
        if position.tensor is not None:
            self._exchanged.count(self.traffic, position.tensor.size(), passes=micro_batches)
        count_compiled_norms(self._layers, self.traffic, passes=micro_batches * self._compiled)

    def _sent_bytes(self) -> int:
        """Bytes sent to other ranks per micro-batch: each stage's output forward, its input's gradient back."""
        cuts = enumerate(pairwise(self._ranks), start=1)
        return sum(self._values[cut].nbytes for cut, ranks in cuts if self._rank in ranks and len({*ranks}) > 1)

    def _forward_backward(self, batch: Batch) -> Sums | None:
        self._optimizer.zero_grad(set_to_none=True)
        self._sums.clear()
        inputs = () if batch.images is None else (batch.images,)
        self._schedule.step(*inputs, target=batch.labels, return_outputs=False)
        if self._in_parts and self._position.tensor is not None:
            with phase("communication"):
                sum_gradients(self._in_parts, self._position.tensor.get_group(), self.traffic)
        if self._position.copies > 1:
            with phase("communication"):
                self._average()
        return self._owned_sums()

    def _owned_sums(self) -> Sums | None:
        return functools.reduce(operator.iadd, self._sums) if self._sums and self._position.owns_loss else None

    def _average(self) -> None:
        """Average the gradients over the copies of these stages."""
        assert self._position.data is not None
        sum_gradients(self._layers.parameters(), self._position.data, self.traffic, divisor=self._position.copies)

    def copied(self) -> Mapping[int, Iterable[Tensor]]:
        """This rank's layers, or its shards of them, where other pipelines train the same."""
        if self._position.copies == 1:
            return {}
        return {self._copy_group: [local(parameter) for parameter in self._layers.parameters()]}

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over the test set on the last stage's rank; batches of any size go through the stages in pieces."""
        if self._position.copies > 1:
            share(self._layers.buffers(), self._position.data)
        if self._position.tensor is not None:
            share_replicated(self._layers, self._position.tensor)
        self._sums.clear()
        with self._in_evaluation():
            for batch in batches:
                self._evaluate(batch)
        owned = self._owned_sums()
        return None if owned is None else owned.tensor()

    def _evaluate(self, batch: Batch) -> None:
        sizes = piece_sizes(batch.size, self._pipeline.micro_batches)
        sends: list[tuple[Any, Tensor]] = []
        outputs: list[Tensor] = []
        for index in self._own:
            inputs = outputs if index - 1 in self._own else self._inputs(index, batch, sizes)
            if len(self._own) > 1:
                # With several stages per rank, ranks that send before they have received may wait for each other in
                # a circle: a send may last until it is received, and NCCL's messages don't overtake each other. A rank
                # that receives all inputs of a stage first can't be part of a circle.
                inputs = list(inputs)
            outputs = []
            for value in inputs:
                output = self._stages[index](value)
                if index == self._last or index + 1 in self._own:
                    outputs.append(output)
                else:
                    sends.append((dist.isend(output, self._ranks[index + 1]), output))
                    self.traffic.send("activation", output.nbytes)
        if self.data_shard.labels and outputs:
            assert batch.labels is not None
            logits = torch.cat(outputs)
            loss = self._numerics.loss(logits, batch.labels)
            self._sums.append(self._numerics.sums(loss, logits, batch.labels))
        for work, _ in sends:
            work.wait()

    def _inputs(self, index: int, batch: Batch, sizes: list[int]) -> Iterator[Tensor]:
        """The inputs of a stage, piece by piece."""
        if index == 0:
            assert batch.images is not None
            yield from batch.images.split(sizes)
            return
        example = self._values[index]
        for size in sizes:
            value = torch.empty(size, *example.shape[1:], dtype=example.dtype, device=self._world.device)
            dist.recv(value, self._ranks[index - 1])
            yield value
