"""Tensor parallelism: every device holds a shard of the linear layers (Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import Shard, Strategy
from parallelbench.strategies.parts.meshes import check_tensor_plan, device_mesh, why_drawn_in_parts, why_half_planned
from parallelbench.strategies.parts.refusals import check_two_devices, first_of, why_complex

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class TensorParallel(Strategy, frozen=True, kw_only=True):
    """Linear layers in pairs, the first cut by outputs and the second by inputs, as the model's own plan says.

    All ranks compute on the whole batch; one sum per pair and direction makes the values whole again. Every rank
    computes the other layers (convolutions, norms) itself.
    """

    shards_tensors: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    vocabulary_parallel: bool = False
    """Divide embedding and head by vocabulary too, and compute the cross entropy from divided logits."""
    sequence_parallel: bool = False
    """Norms and residuals on parts of the sequence (Korthikanti et al. 2022, arXiv 2205.05198)."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: every rank reads the whole batch."""
        return 1

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, models with nothing to shard, and sizes that the devices don't divide."""
        check_two_devices(run)
        check_tensor_plan(run, shards=run.devices, option=f"devices={run.devices}")

    def draws_alike(self, run: RunConfig) -> int:
        """All: they compute on the same values."""
        return run.devices

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Messages hold real numbers."""
        return first_of(why_complex(traits), why_half_planned(run, traits), why_drawn_in_parts(run, traits))

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Keep this rank's shards."""
        from parallelbench.strategies.parts.tensor_shards import TensorReplica, place_shards
        from parallelbench.strategies.parts.tensor_traffic import exchanged_bytes

        mesh = device_mesh(world, tensor=world.size)
        exchanged = exchanged_bytes(model, run, world.device, samples=run.global_batch_size)
        place_shards(model, run, world.device, mesh)
        return TensorReplica(
            model,
            mesh,
            run=run,
            world=world,
            data_shard=Shard(),
            count_step=lambda traffic: exchanged.count(traffic, world.size),
        )
