"""Training on one device: what every other strategy is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import Shard, StateShards, Strategy
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.strategies.shared_refusals import one_device

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class Single(Strategy, frozen=True, kw_only=True):
    """Training on one device: what every other strategy is compared with.

    One process, one device.
    """

    can_be_captured: ClassVar[bool] = True
    evaluates_repeatedly: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    def processes(self, run: RunConfig, device_type: str) -> int:
        return 1

    def data_parallel_degree(self, run: RunConfig) -> int:
        return 1

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        return one_device(run)

    def state_shards(self, run: RunConfig) -> StateShards:
        return StateShards.even(1)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        from parallelbench.strategies.graph import CapturedReplica
        from parallelbench.strategies.lbfgs.sandblaster import FullBatchReplica
        from parallelbench.strategies.replica import ModuleReplica, to_device

        kind = FullBatchReplica if isinstance(run.optimizer, Lbfgs) else CapturedReplica if run.graph else ModuleReplica
        return kind(to_device(model, run, world.device), run=run, world=world, data_shard=Shard())
