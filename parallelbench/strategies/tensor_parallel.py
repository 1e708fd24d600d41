"""Tensor parallelism: every device holds a shard of the linear layers (Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.errors import ConfigError
from parallelbench.spec.config import Strategy
from parallelbench.strategies.parts.meshes import check_tensor_plan

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica


class TensorParallel(Strategy, frozen=True, kw_only=True):
    """Linear layers in pairs, the first cut by outputs and the second by inputs, as the model's own plan says.

    All ranks compute on the whole batch; one sum per pair and direction makes the values whole again. What the plan
    leaves out (convolutions, norms) is computed by every rank.
    """

    shards_tensors: ClassVar[bool] = True

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One per device."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: every rank reads the whole batch."""
        return 1

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse models with nothing to shard, and sizes that the devices don't divide."""
        if run.devices < 2:
            raise ConfigError(
                f"strategy={self.name} needs two devices or more: choose devices=2, or strategy=single for one device"
            )
        check_tensor_plan(run, shards=run.devices, option=f"devices={run.devices}")

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Keep this rank's shards."""
        from parallelbench.strategies.parts.device_meshes import device_mesh
        from parallelbench.strategies.parts.tensors import shard_whole

        return shard_whole(model, run, world, device_mesh(world, tensor=world.size))
