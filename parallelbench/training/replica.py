"""From a model to what a rank trains. Importing this loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.config.replica import Replica
from parallelbench.errors import ConfigError
from parallelbench.models.norms import report_norms
from parallelbench.models.recomputation import recomputing

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


_SOMETIMES = {"compile_warmup", "take_norms", "take_expert_tokens"}
"""Methods that only some configurations call."""


def new_replica(model: nn.Sequential, run: RunConfig, world: World) -> Replica:
    """This rank's replica of a model on the CPU, by the run's strategy; `model` is consumed."""
    layers = list(model)  # which the strategy may take apart
    replica = run.strategy.prepare(recomputing(model, run), run, world)
    names = {*Replica.__annotations__, *(name for name in vars(Replica) if not name.startswith("_"))}
    if lacking := ", ".join(name for name in sorted(names - _SOMETIMES) if not hasattr(replica, name)):
        raise ConfigError(
            f"strategy={run.strategy.name}: prepare returns {type(replica).__name__}, which lacks {lacking}: return a "
            "replica; in parallelbench.strategies.replica, BaseReplica has most of it, ModuleReplica all "
            "(docs/adding-a-strategy.md)"
        )
    for layer in layers:
        report_norms(layer, replica.traffic)
    return replica
