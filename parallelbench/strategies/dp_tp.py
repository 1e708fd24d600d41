"""Data × tensor parallelism: linear layers sharded within a group of devices, the groups' copies kept by FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.spec.config import Strategy
from parallelbench.spec.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.parts.meshes import Mesh, check_tensor_plan

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica


class DpTp(Strategy, frozen=True, kw_only=True):
    """Tensor parallel over neighbouring ranks, fully sharded data parallel over the others.

    Shoeybi et al. 2019 (arXiv 1909.08053) for the tensor dimension, Zhao et al. 2023 (arXiv 2304.11277) for the data
    dimension. DDP would train as well, but loses the tensor-sharded parameters from `state_dict`.
    """

    shards_tensors: ClassVar[bool] = True

    tensor: Count
    """Devices that share each linear layer; the data dimension is the number of devices ÷ this."""
    reshard_after_forward: bool
    """Free each layer's gathered parameters after its forward and gather them again for its backward."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One per device."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per group of tensor ranks, which read the same samples."""
        return self._mesh(run).data

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse meshes that aren't all devices, models with nothing to shard, and sizes that don't divide."""
        self._mesh(run).check(run, least_data=2)
        check_tensor_plan(run, shards=self.tensor, option=f"strategy.tensor={self.tensor}")

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard the linear layers, then every layer's parameters over the data dimension."""
        from parallelbench.strategies.parts.device_meshes import device_mesh
        from parallelbench.strategies.parts.tensors import shard_twice

        mesh = device_mesh(world, data=self._mesh(run).data, tensor=self.tensor)
        return shard_twice(model, run, world, mesh, reshard_after_forward=self.reshard_after_forward)

    def _mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"tensor": self.tensor})
