"""From a model to what a rank trains. Importing this loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.models.recomputation import recomputing

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.replica import Replica
    from parallelbench.world.world import World


def new_replica(model: nn.Sequential, run: RunConfig, world: World) -> Replica:
    """This rank's replica of a model on the CPU, by the run's strategy; `model` is consumed."""
    return run.strategy.prepare(recomputing(model, run), run, world)
