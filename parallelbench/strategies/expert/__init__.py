"""Expert parallelism: devices share the experts, tokens travel to theirs (Lepikhin et al. 2020, arXiv 2006.16668)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import StateShards
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.strategies.data_parallel import DdpStrategy
from parallelbench.strategies.shared_refusals import SCALES_ALONE, no_fp16

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class ExpertParallel(DdpStrategy, frozen=True, kw_only=True):
    """Expert parallelism: devices share the experts, tokens travel to theirs (Lepikhin et al. 2020, arXiv 2006.16668).

    One process per device, each with an n-th of each block's experts and a copy of everything else.

    Each rank routes the tokens of its own slice of the batch. All-to-alls take them to the ranks of their experts and
    bring the results back, in forward and, as gradients, in backward. No token is dropped. Gradients of all other
    parameters are averaged by DDP.

    n is the number of devices, or `expert_ranks`: then groups of so many ranks hold copies of each other's experts, as
    in DeepSpeed-MoE (Rajbhandari et al. 2022, arXiv 2201.05596), and tokens stay in their group. Gradients of experts
    are all-reduced over the groups, each as soon as backward has it.
    """

    shards_tensors: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    waits_in_steps: ClassVar[str] = "the sizes of messages follow from the routing"

    expert_ranks: Count | None = None
    """Neighbouring ranks that have all experts together; devices ÷ this many groups have copies. null: all ranks."""

    def ranks_per_copy(self, run: RunConfig) -> int:
        """Neighbouring ranks that have all experts together."""
        return self.expert_ranks or run.devices

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from super().rules(run, device_type)
        devices, experts, ranks = run.devices, run.model.anatomy().experts.each, self.expert_ranks
        yield (
            not experts,
            f"strategy={self.name} finds no experts in model={run.model.name}, as gpt_moe has them",
            ("model", "strategy"),
        )
        yield (
            ranks is None and experts % devices,
            f"strategy={self.name} can't divide model.experts={experts} among devices={devices}",
            ("devices", "strategy.expert_ranks", "model.experts"),
        )
        yield (
            ranks is not None and (not 1 < ranks < devices or devices % ranks or experts % ranks),
            f"strategy.expert_ranks={ranks} must divide devices={devices} and model.experts={experts}, and be neither "
            "1 nor all devices, which null says",
            ("strategy.expert_ranks", "strategy"),
        )
        yield from no_fp16(run, SCALES_ALONE)

    def state_shards(self, run: RunConfig) -> StateShards:
        """An n-th of the experts, and a copy of the rest."""
        routed = run.model.anatomy().experts.share
        part = 1 - routed + routed / self.ranks_per_copy(run)
        return StateShards(part, part, part)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        from parallelbench.strategies.expert.dispatch import divide_experts, exchange_tokens, with_shards

        ranks = self.ranks_per_copy(run)
        divide_experts(model, world, ranks)
        wrapped = self.in_ddp(model, run, world)
        replica = self.replica(wrapped, run, world, **with_shards(wrapped.module, run, world, ranks=ranks))
        return exchange_tokens(replica, world, ranks)
