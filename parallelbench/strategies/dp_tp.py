"""Data × tensor parallelism: linear layers sharded within a group of devices, the groups' copies kept by FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import Shard, Strategy
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.parts.meshes import (
    Mesh,
    check_tensor_plan,
    device_mesh,
    why_drawn_in_parts,
    why_half_planned,
)
from parallelbench.strategies.parts.refusals import (
    first_of,
    why_complex,
    why_shared,
    why_uncut,
    why_untouched,
)

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.world.world import World


class DpTp(Strategy, frozen=True, kw_only=True):
    """Tensor parallel over neighbouring ranks, fully sharded data parallel over the others.

    Shoeybi et al. 2019 (arXiv 1909.08053) for the tensor dimension, Zhao et al. 2023 (arXiv 2304.11277) for the data
    dimension. DDP would train as well, but loses the tensor-sharded parameters from `state_dict`.
    """

    shards_tensors: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    tensor: Count
    """Devices that share each linear layer; the data dimension is the number of devices ÷ this."""
    reshard_after_forward: bool
    """Free each layer's gathered parameters after its forward and gather them again for its backward."""
    vocabulary_parallel: bool = False
    """Divide embedding and head by vocabulary too, and compute the cross entropy from divided logits."""
    sequence_parallel: bool = False
    """Norms and residuals on parts of the sequence (Korthikanti et al. 2022, arXiv 2205.05198)."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per group of tensor ranks, which read the same samples."""
        return self._mesh(run).data

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse meshes that aren't all devices, models with nothing to shard, and sizes that don't divide."""
        self._mesh(run).check(run, least_data=2)
        check_tensor_plan(run, shards=self.tensor, option=f"strategy.tensor={self.tensor}")

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Layers are cut one by one, each parameter along its first dimension."""
        return first_of(
            why_untouched(traits),
            why_uncut(traits),
            why_complex(traits),
            why_half_planned(run, traits),
            why_drawn_in_parts(run, traits),
            why_shared(run, traits),
        )

    def draws_alike(self, run: RunConfig) -> int:
        """Those that share a group's linear layers."""
        return self.tensor

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard the linear layers over the tensor dimension, then every layer over the data dimension."""
        from parallelbench.models.norms import synchronize_norms
        from parallelbench.strategies.parts.fsdp_shards import shard_one_by_one
        from parallelbench.strategies.parts.replicas import share_buffers
        from parallelbench.strategies.parts.tensor_shards import TensorReplica, sharding
        from parallelbench.strategies.parts.tensor_traffic import exchanged_bytes

        mesh = device_mesh(world, data=self._mesh(run).data, tensor=self.tensor)
        tensor, data = mesh["tensor"], mesh["data"]
        shard = Shard(data.get_local_rank(), data.size())
        exchanged = exchanged_bytes(model, run, world.device, samples=run.global_batch_size // shard.count)
        synchronize_norms(model, data.get_group())
        padded = shard_one_by_one(
            model,
            run,
            world.device,
            data,
            reshard_after_forward=self.reshard_after_forward,
            first=sharding(model, run, tensor),
        )

        def count_step(traffic: Traffic) -> None:
            exchanged.count(traffic, tensor.size())
            traffic.all_gather("parameter", padded.gathered_bytes(self.reshard_after_forward), shard.count)
            traffic.reduce_scatter("gradient", padded.gradient_bytes, shard.count)

        return TensorReplica(
            model,
            tensor,
            run=run,
            world=world,
            data_shard=shard,
            before_evaluation=lambda: share_buffers(model),
            count_step=count_step,
        )

    def _mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"tensor": self.tensor})
