"""Data × pipeline × tensor parallelism: pipelines side by side whose stages share their linear layers among devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.parts.meshes import Mesh, check_tensor_plan, why_drawn_in_parts, why_half_planned
from parallelbench.strategies.parts.pipeline_base import PipelineStrategy
from parallelbench.strategies.parts.refusals import first_of

if TYPE_CHECKING:
    from parallelbench.config.components import Traits
    from parallelbench.config.run import RunConfig


class DpPpTp(PipelineStrategy, frozen=True, kw_only=True):
    """All three dimensions at once (Narayanan et al. 2021, arXiv 2104.04473: PTD-P).

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
        """Copies × stages × shards."""
        return Mesh(run.devices, {"stages": self.stages, "tensor": self.tensor})

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Stages are cut by the model's plan besides."""
        return first_of(
            super().why_not_model(run, traits), why_half_planned(run, traits), why_drawn_in_parts(run, traits)
        )

    def draws_alike(self, run: RunConfig) -> int:
        """Those that share a stage's linear layers."""
        return self.tensor

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse sizes that don't divide the devices, stages that don't fit, and wrong numbers of micro-batches."""
        self.mesh(run).check(run, least_data=1)
        check_tensor_plan(run, shards=self.tensor, option=f"strategy.tensor={self.tensor}")
        super().check(run, device_type)
