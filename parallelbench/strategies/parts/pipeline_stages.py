"""The stages of a pipeline: which rank runs which, what flows between them, and the module that computes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parallelbench.strategies.parts.partition import size_bytes, values_between
from parallelbench.strategies.parts.tensor_shards import all_reduced_bytes, as_one_rank_sees_it

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parallelbench.rank.numerics import Numerics
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.parts.meshes import Position
    from parallelbench.strategies.parts.pipeline_schedules import Pipeline


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
            y: Tensor = self.body(x)
        return y.contiguous()


class StagePlan:
    """Which rank runs which stage, and what a micro-batch sends between them."""

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
        """Plan the stages of the whole `model`; `stage_of` names the stage of each layer, in order."""
        self.ranks = [position.ranks[index] for index in pipeline.stage_devices()]
        """The rank of every stage."""
        self.owners = {name: self.ranks[stage] for name, stage in stage_of.items()}
        """The rank of every layer."""
        self.own = [stage for stage, rank in enumerate(self.ranks) if rank == world.rank]
        """This rank's stages."""
        self.last = pipeline.stages - 1
        self._rank = world.rank

        micro_batch = run.global_batch_size // position.copies // pipeline.micro_batches
        shards, plan = (1, {}) if position.tensor is None else (position.tensor.size(), run.model.tensor_plan())
        values = values_between(as_one_rank_sees_it(model, plan, shards), run, world.device, micro_batch)
        stages = list(stage_of.values())
        starts = [stages.index(stage) for stage in range(pipeline.stages)]
        self.values = [values[start] for start in [*starts, len(stages)]]
        """The input of each stage for a micro-batch, and the last one's output: meta tensors."""
        summed = all_reduced_bytes(model, plan, run, world.device, batch_size=micro_batch)
        own_layers = {name for name, owner in self.owners.items() if owner == world.rank}
        self.summed_bytes = sum(size for name, size in summed.items() if name.partition(".")[0] in own_layers)
        """Bytes that this rank's stages sum over the tensor ranks per micro-batch."""

    def sent_bytes(self) -> int:
        """Bytes sent to other ranks per micro-batch: each stage's output forward, its input's gradient back."""
        total = 0
        for stage in self.own:
            if stage < self.last and self.ranks[stage + 1] != self._rank:
                total += size_bytes(self.values[stage + 1])
            if stage > 0 and self.ranks[stage - 1] != self._rank:
                total += size_bytes(self.values[stage])
        return total
