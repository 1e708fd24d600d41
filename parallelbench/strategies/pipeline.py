"""Pipeline parallelism: every device holds a part of the layers, and micro-batches keep all of them at work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.strategies.parts.meshes import Mesh
from parallelbench.strategies.parts.pipeline_base import PipelineStrategy

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


class PipelineParallel(PipelineStrategy, frozen=True, kw_only=True):
    """Stages of consecutive layers on different devices (Huang et al. 2019, arXiv 1811.06965), by torch's schedules.

    Gradients of a batch's micro-batches add up; there is one update per batch, so nothing is stale.
    """

    def mesh(self, run: RunConfig) -> Mesh:
        """One pipeline of all devices."""
        return Mesh(run.devices, {"stages": run.devices})
