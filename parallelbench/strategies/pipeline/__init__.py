"""Pipeline parallelism: every device holds a part of the layers, and micro-batches keep all of them at work.

dp_pp: several pipelines, each on its own part of every batch. dp_pp_tp: besides, stages share their linear layers among
devices. model_parallel: the naive split, without micro-batches, one device at work at a time. Loads no torch. Read on
in `schedules.py` (what each schedule needs), `stages.py` (how a rank trains its stages, in torch's own orders of the
work) and `naive.py` (the naive split). `analysis/advisor/replay.py` writes the orders out.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Shard, Strategy
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.mesh import Mesh, position_in
from parallelbench.strategies.pipeline.partition import assign, valid_map
from parallelbench.strategies.pipeline.schedules import Pipeline, Schedule, StageMap
from parallelbench.strategies.shared_refusals import (
    SCALES_ALONE,
    first_of,
    no_fp16,
    one_node,
    two_devices,
    why_complex,
    why_shared,
    why_untouched,
)
from parallelbench.strategies.tensor import even_shards, why_drawn_in_parts, why_half_planned

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
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
        return self.mesh(run).data

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        batch, rest = divmod(run.global_batch_size, self.mesh(run).data)
        return self.pipeline(run).rules(run, self.stage_map, batch_size=0 if rest else batch)

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Each stage waits for the gradient of what it sent."""
        return first_of(why_untouched(traits), why_complex(traits), why_shared(run, traits))

    def micro_batches_per_step(self, run: RunConfig) -> int:
        return self.micro_batches

    def why_no_recomputation(self, run: RunConfig) -> str:
        """Where backward comes in two parts, each would compute the same layers again."""
        if not self.pipeline(run).splits_backward:
            return ""
        return f"strategy.schedule={self.schedule} cuts backward in two, and each part would compute layers again"

    def bubble(self, run: RunConfig) -> float:
        return self.pipeline(run).bubble()

    def pipeline(self, run: RunConfig) -> Pipeline:
        """The schedule of one pipeline."""
        return Pipeline(self.schedule, self.micro_batches, self.stages_per_rank, self.mesh(run).inner["stages"])

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Cut the model into stages and keep this rank's, or its shard of them."""
        from parallelbench.strategies.pipeline.stages import PipelineReplica

        return PipelineReplica(
            model,
            assign(model, run, self.stage_map, self.pipeline(run).stages),
            self.pipeline(run),
            run=run,
            world=world,
            position=position_in(self.mesh(run), world),
        )


class PipelineParallel(PipelineStrategy, frozen=True, kw_only=True):
    """Stages of consecutive layers on different devices (Huang et al. 2019, arXiv 1811.06965), by torch's schedules.

    Gradients of a batch's micro-batches add up; there is one update per batch, so nothing is stale.
    """

    def mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"stages": run.devices})


class DpPp(PipelineStrategy, frozen=True, kw_only=True):
    """Data × pipeline parallelism: several pipelines, each on its own part of every batch.

    Pipelines side by side (Narayanan et al. 2021, arXiv 2104.04473).

    Each stage's gradients are averaged over its copies after the last micro-batch, in one message: DDP around stages
    works with 1F1B only.
    """

    stages: Count
    """Devices in one pipeline; the data dimension is the number of devices ÷ this."""

    def mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"stages": self.stages})

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from self.mesh(run).rules(run, least_data=2)
        yield from super().rules(run, device_type)


class DpPpTp(PipelineStrategy, frozen=True, kw_only=True):
    """Data × pipeline × tensor parallelism: pipelines side by side whose stages share their linear layers among
    devices.

    All three dimensions at once (Narayanan et al. 2021, arXiv 2104.04473: PTD-P).

    Neighbouring ranks share linear layers, these groups form pipelines, and pipelines have copies where there are
    devices left.
    """

    shards_tensors: ClassVar[bool] = True

    stages: Count
    """Devices that a pipeline is long."""
    tensor: Count
    """Devices that share each linear layer; the data dimension is the number of devices ÷ (stages · tensor)."""
    vocabulary_parallel: bool = False
    """Divide embedding and head by vocabulary too, and compute the cross entropy from divided logits."""
    sequence_parallel: bool = False
    """Norms and residuals on parts of the sequence (Korthikanti et al. 2022, arXiv 2205.05198)."""

    def mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"stages": self.stages, "tensor": self.tensor})

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Stages are cut by the model's plan besides."""
        return first_of(
            super().why_not_model(run, traits), why_half_planned(run, traits), why_drawn_in_parts(run, traits)
        )

    def draws_alike(self, run: RunConfig) -> int:
        """Those that share a stage's linear layers."""
        return self.tensor

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from self.mesh(run).rules(run, least_data=1)
        yield from even_shards(run, shards=self.tensor, option="strategy.tensor")
        yield from super().rules(run, device_type)


class ModelParallel(Strategy, frozen=True, kw_only=True):
    """Naive model parallelism: whole layers on different devices, one device at work at a time.

    Layers spread over the devices, without micro-batches.
    """

    updates_as_asked: ClassVar[bool] = True

    device_map: dict[str, Annotated[int, Meta(ge=0)]] | None
    """Layer name → device index; null: contiguous parts with nearly equal counts of floating-point operations."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One process drives all GPUs; on CPUs each part has its own."""
        return 1 if device_type == "cuda" else run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: every part sees the whole batch."""
        return 1

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """Splits that don't fit, several nodes of GPUs, and fp16 on CPUs."""
        yield from two_devices(run)
        yield from valid_map(self.device_map, run, parts=run.devices, part="device")
        if device_type == "cuda":
            yield from one_node(run)
        else:
            yield from no_fp16(run, f"on CPUs {SCALES_ALONE}")

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Each part waits for the gradient of what it sent."""
        return first_of(why_untouched(traits), why_shared(run, traits))

    def bubble(self, run: RunConfig) -> float:
        """(p−1)/p on p devices: one works while the others wait, as under GPipe with one micro-batch."""
        return 1 - 1 / run.devices

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        from parallelbench.strategies.pipeline.naive import LayerSplitReplica, crossing_bytes, spread
        from parallelbench.strategies.replica import ModuleReplica

        layers = assign(model, run, self.device_map)
        if world.device_type == "cpu":
            return LayerSplitReplica(model, layers, run=run, world=world)
        step_bytes = crossing_bytes(model, layers, run, world)
        return ModuleReplica(
            spread(model, layers, run, world.devices),
            run=run,
            world=world,
            data_shard=Shard(),
            count_step=lambda traffic: traffic.send("activation", step_bytes),
        )
