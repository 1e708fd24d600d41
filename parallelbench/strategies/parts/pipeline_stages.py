"""What one rank holds of a pipelined model: stages of consecutive layers, and what is known of the other ranks'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parallelbench.models.norms import synchronize_norms
from parallelbench.rank.numerics import Numerics
from parallelbench.strategies.parts.replicas import place
from parallelbench.strategies.parts.shapes import size_bytes, values_between
from parallelbench.strategies.parts.state import local
from parallelbench.strategies.parts.tensor_shards import all_reduced_bytes, as_one_rank_sees_it, place_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.parts.pipeline_schedules import Pipeline
    from parallelbench.strategies.parts.positions import Position


class Stage(nn.Module):
    """Consecutive layers, called by a schedule; what is sent to another rank is contiguous in memory."""

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
            y: Tensor = self.body(x)
        return y.contiguous()


class Parts:
    """This rank's stages, on its device."""

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
        self.owners = [position.ranks[index] for index in pipeline.place()]
        """The rank of every stage."""
        self.indices = [stage for stage, owner in enumerate(self.owners) if owner == world.rank]
        """This rank's stages."""
        self.last = pipeline.stages - 1
        self.numerics = Numerics(run.precision, world.device_type)
        self._stage_of, self._rank = stage_of, world.rank
        micro_batch = run.global_batch_size // position.copies // pipeline.micro_batches
        self._note_shapes(model, run, world, position, micro_batch)
        self._keep(model, run, world, position)

    def _note_shapes(
        self, model: nn.Sequential, run: RunConfig, world: World, position: Position, micro_batch: int
    ) -> None:
        shards, plan = (1, {}) if position.tensor is None else (position.tensor.size(), run.model.tensor_plan())
        values = values_between(as_one_rank_sees_it(model, plan, shards), run, world.device, micro_batch)
        stages = list(self._stage_of.values())
        starts = [stages.index(stage) for stage in range(self.last + 1)]
        self.values = [values[start] for start in [*starts, len(stages)]]
        """What enters each stage with a micro-batch, and what leaves the last: meta tensors."""
        summed = all_reduced_bytes(model, plan, run, world.device, micro_batch)
        self.summed_bytes = sum(size for name, size in summed.items() if self.here(name))
        """Bytes that its stages sum over the tensor ranks per micro-batch."""
        dtype = self.numerics.dtype
        self.template = {
            name: tensor.to("meta", dtype if tensor.is_floating_point() else None)
            for name, tensor in model.state_dict().items()
        }
        """Parameters and buffers of the whole model: meta tensors."""
        self.names = [name for name, _ in model.named_parameters()]

    def _keep(self, model: nn.Sequential, run: RunConfig, world: World, position: Position) -> None:
        self.layers = nn.ModuleDict({name: layer for name, layer in model.named_children() if self.here(name)})
        synchronize_norms(self.layers, position.data)
        if position.tensor is None:
            place(self.layers, run, world.device)
        else:
            place_shards(self.layers, run, world.device, position.tensor)
        self.stages = {
            index: Stage(
                [self.layers[name] for name, stage in self._stage_of.items() if stage == index],
                self.numerics,
                compiled=run.compile,
            )
            for index in self.indices
        }
        self.gradient_bytes = sum(size_bytes(local(parameter)) for parameter in self.layers.parameters())

    def owner(self, name: str) -> int:
        """Rank that holds what a name of the model's stands for: a layer, a module in it, a parameter."""
        return self.owners[self._stage_of[name.partition(".")[0]]]

    def here(self, name: str) -> bool:
        """Whether this rank does."""
        return self.owner(name) == self._rank

    def sent_bytes(self) -> int:
        """What goes to other ranks with a micro-batch: each stage's output onwards, its input's gradient back."""
        total = 0
        for index in self.indices:
            if index < self.last and self.owners[index + 1] != self._rank:
                total += size_bytes(self.values[index + 1])
            if index > 0 and self.owners[index - 1] != self._rank:
                total += size_bytes(self.values[index])
        return total
