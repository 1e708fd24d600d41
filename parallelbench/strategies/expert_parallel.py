"""Expert parallelism: devices share the experts, tokens travel to theirs (Lepikhin et al. 2020, arXiv 2006.16668)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.errors import ConfigError
from parallelbench.spec.config import StateShards
from parallelbench.strategies.parts.data_parallel_base import DdpStrategy
from parallelbench.strategies.parts.refusals import SCALES_ALONE, check_no_fp16

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.replica import Replica
    from parallelbench.world.world import World


class ExpertParallel(DdpStrategy, frozen=True, kw_only=True):
    """One process per device, each with an n-th of each block's experts and a copy of everything else.

    Each rank routes the tokens of its own slice of the batch. All-to-alls take them to the ranks of their experts and
    bring the results back, in forward and, as gradients, in backward. No token is dropped. Gradients of all other
    parameters are averaged by DDP.
    """

    shards_tensors: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    waits_in_steps: ClassVar[str] = "the sizes of messages follow from the routing"

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, models without experts, experts that the devices don't divide, and fp16."""
        super().check(run, device_type)
        who, experts = f"strategy={self.name}", run.model.routed_experts
        if not experts:
            raise ConfigError(
                f"{who} finds no experts in model={run.model.name}: choose model=gpt_moe or gpt_moe_tiny, or "
                "strategy=ddp"
            )
        if experts % run.devices:
            valid = ", ".join(str(n) for n in range(2, experts + 1) if experts % n == 0)
            more = -(-experts // run.devices) * run.devices
            raise ConfigError(
                f"{who} can't divide model.experts={experts} among devices={run.devices}: choose devices={valid}, or "
                f"model.experts={more}"
            )
        check_no_fp16(run, SCALES_ALONE)

    def state_shards(self, run: RunConfig) -> StateShards:
        """An n-th of the experts, and a copy of the rest."""
        routed = run.model.routed_share
        part = 1 - routed + routed / run.devices
        return StateShards(part, part, part)

    def why_no_recomputation(self, run: RunConfig) -> str:
        """Layers that are computed again would send their tokens again; attention sends none."""
        if run.activation_recomputation == "selective":
            return ""
        return (
            "each layer that is computed again would send its tokens again: choose activation_recomputation=selective, "
            "or strategy=ddp"
        )

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Keep this rank's experts, and wrap the rest in DDP."""
        from parallelbench.strategies.parts.expert_shards import divide_experts, exchange_tokens, new_replica

        divide_experts(model, world)
        return exchange_tokens(new_replica(self.in_ddp(model, run, world), run, world), world)
