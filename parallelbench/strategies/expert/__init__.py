"""Expert parallelism: devices share the experts, tokens travel to theirs (Lepikhin et al. 2020, arXiv 2006.16668)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import StateShards
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError
from parallelbench.strategies.data_parallel import DdpStrategy
from parallelbench.strategies.refusals import SCALES_ALONE, check_no_fp16

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.replica import Replica
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

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, models without experts, experts or devices that ranks don't divide, and fp16."""
        super().check(run, device_type)
        who, experts = f"strategy={self.name}", run.model.routed_experts
        if not experts:
            raise ConfigError(
                f"{who} finds no experts in model={run.model.name}: choose model=gpt_moe or gpt_moe_tiny, or "
                "strategy=ddp"
            )
        if self.expert_ranks is not None:
            _check_groups(self.expert_ranks, run)
        elif experts % run.devices:
            valid = ", ".join(str(n) for n in range(2, experts + 1) if experts % n == 0)
            more = -(-experts // run.devices) * run.devices
            groups = _group_sizes(run)
            fewer = f", strategy.expert_ranks={groups[-1]}" if groups else ""
            raise ConfigError(
                f"{who} can't divide model.experts={experts} among devices={run.devices}: choose devices={valid}"
                f"{fewer}, or model.experts={more}"
            )
        check_no_fp16(run, SCALES_ALONE)

    def state_shards(self, run: RunConfig) -> StateShards:
        """An n-th of the experts, and a copy of the rest."""
        routed = run.model.routed_share
        part = 1 - routed + routed / self.ranks_per_copy(run)
        return StateShards(part, part, part)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Keep this rank's experts, and wrap the rest in DDP."""
        from parallelbench.strategies.expert.exchange import divide_experts, exchange_tokens, new_replica

        ranks = self.ranks_per_copy(run)
        divide_experts(model, world, ranks)
        replica = new_replica(self.in_ddp(model, run, world), run, world, ranks=ranks)
        return exchange_tokens(replica, world, ranks)


def _group_sizes(run: RunConfig) -> list[int]:
    """Numbers of ranks that can have all experts together, where others have copies."""
    return [n for n in range(2, run.devices) if run.devices % n == 0 and run.model.routed_experts % n == 0]


def _check_groups(ranks: int, run: RunConfig) -> None:
    """Refuse groups of one rank, groups that devices or experts can't be divided into, and a single group."""
    devices, experts = run.devices, run.model.routed_experts
    reasons = {
        "divides no experts": ranks == 1,
        f"is more than devices={devices}": ranks > devices,
        f"is all of devices={devices}, which strategy.expert_ranks=null says": ranks == devices,
        f"does not divide devices={devices}": devices % ranks > 0,
        f"does not divide model.experts={experts}": experts % ranks > 0,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), "")
    if not reason:
        return
    nearest = sorted(sorted(_group_sizes(run), key=lambda n: abs(n - ranks))[:2])
    fixes = [f"strategy.expert_ranks={' or '.join(map(str, nearest))}"] if nearest else []
    fixes += ["strategy.expert_ranks=null"] if experts % devices == 0 else []
    if ranks == 1 or not fixes:
        fixes.append("strategy=ddp")
    raise ConfigError(f"strategy.expert_ranks={ranks} {reason}: choose {', or '.join(fixes)}")
