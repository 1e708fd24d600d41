"""What pipeline strategies have in common: their options, and the mesh that the stages are in; loads no torch.

Read on in `pipeline_schedules.py` (the order of the work) and `pipeline_stages.py` (how a rank trains its stages).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import Strategy
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.parts.meshes import position_in
from parallelbench.strategies.parts.partition import assign
from parallelbench.strategies.parts.pipeline_schedules import Pipeline, Schedule, StageMap
from parallelbench.strategies.parts.refusals import first_of, why_complex, why_shared, why_untouched

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.parts.meshes import Mesh
    from parallelbench.world.world import World


class PipelineStrategy(Strategy, frozen=True, kw_only=True):
    """Stages of consecutive layers on different devices, in one pipeline or in several side by side."""

    has_stages: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    schedule: Schedule
    """The order in which the stages work."""
    micro_batches: Count
    """Pieces that a pipeline cuts its part of every batch into; must divide it."""
    stages_per_rank: Count
    """Stages on each device: 1 under gpipe and 1f1b, 2 under zbv and dualpipev, else any number."""
    stage_map: StageMap | None
    """Layer name → stage; null: contiguous stages with nearly equal counts of floating-point operations."""

    @abstractmethod
    def mesh(self, run: RunConfig) -> Mesh:
        """The mesh of all devices; its dimension called `stages` is one pipeline."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per copy of the model."""
        return self.mesh(run).data

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse stages that don't fit, and numbers of micro-batches that the schedule can't take."""
        self.pipeline(run).check(run, self.stage_map, batch_size=run.global_batch_size // self.mesh(run).data)

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Each stage waits for the gradient of what it sent."""
        return first_of(why_untouched(traits), why_complex(traits), why_shared(run, traits))

    def micro_batches_per_step(self, run: RunConfig) -> int:
        """As the option says."""
        return self.micro_batches

    def why_no_recomputation(self, run: RunConfig) -> str:
        """Where backward comes in two parts, each would compute the same layers again."""
        if not self.pipeline(run).splits_backward:
            return ""
        return (
            f"strategy.schedule={self.schedule} cuts backward in two, and each part would compute layers again: choose "
            "strategy.schedule=1f1b or interleaved_1f1b"
        )

    def bubble(self, run: RunConfig) -> float:
        """By the schedule's formula."""
        return self.pipeline(run).bubble()

    def pipeline(self, run: RunConfig) -> Pipeline:
        """The schedule of one pipeline."""
        return Pipeline(self.schedule, self.micro_batches, self.stages_per_rank, self.mesh(run).inner["stages"])

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Cut the model into stages and keep this rank's, or its shard of them."""
        from parallelbench.strategies.parts.pipeline_stages import PipelineReplica

        return PipelineReplica(
            model,
            assign(model, run, self.stage_map, self.pipeline(run).stages),
            self.pipeline(run),
            run=run,
            world=world,
            position=position_in(self.mesh(run), world),
        )
