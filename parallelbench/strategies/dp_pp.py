"""Data × pipeline parallelism: several pipelines, each on its own part of every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.parts.meshes import Mesh
from parallelbench.strategies.parts.pipeline_base import PipelineStrategy

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


class DpPp(PipelineStrategy, frozen=True, kw_only=True):
    """Pipelines side by side (Narayanan et al. 2021, arXiv 2104.04473).

    Each stage's gradients are averaged over its copies after the last micro-batch, in one message: DDP around stages
    works with 1F1B only.
    """

    stages: Count
    """Devices in one pipeline; the data dimension is the number of devices ÷ this."""

    def mesh(self, run: RunConfig) -> Mesh:
        """Copies × stages."""
        return Mesh(run.devices, {"stages": self.stages})

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse sizes that don't divide the devices, stages that don't fit, and wrong numbers of micro-batches."""
        self.mesh(run).check(run, least_data=2)
        super().check(run, device_type)
