"""Context parallelism: every device holds a part of each sequence and the whole model, for sequences that are long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from parallelbench.errors import ConfigError
from parallelbench.strategies.parts.data_parallel_base import DdpStrategy

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.replica import Replica
    from parallelbench.world.world import World


class ContextParallel(DdpStrategy, frozen=True, kw_only=True):
    """All ranks read the same samples; each computes on its own tokens, and attention alone joins them.

    The loss is the mean over all tokens: gradients are averaged over ranks, as by DDP. Positions are those in the whole
    sequence.
    """

    exchange: Literal["ring", "all_gather", "all_to_all"]
    """What ranks send each other for attention. ring: keys and values go round (Liu et al. 2023, arXiv 2310.01889).
    all_gather: every rank gathers all keys and values (Llama 3, arXiv 2407.21783). all_to_all: queries, keys and values
    of all tokens, for a share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509)."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: every rank reads the whole batch."""
        return 1

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, models whose tokens meet outside of attention, and sizes that the devices don't divide."""
        super().check(run, device_type)
        if run.model.token_heads is None:
            raise ConfigError(
                f"strategy={self.name} cuts sequences of tokens, which only causal attention may join, but "
                f"model={run.model.name} has no such attention: choose model=gpt or gpt_tiny, or strategy=ddp"
            )
        _check_sequence(run, parts=run.devices * (1 if self.exchange == "all_to_all" else 2))
        if self.exchange == "all_to_all":
            self._check_heads(run)

    def why_no_recomputation(self, run: RunConfig) -> str:
        """Attention that is computed again would send its messages again."""
        return "each attention that is computed again would send its messages again: choose strategy=fsdp"

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Give the layers this rank's positions, and the attention its exchange; wrap the model in DDP."""
        from parallelbench.strategies.parts.context_replica import ContextReplica

        return ContextReplica(self.in_ddp(model, run, world), exchange=self.exchange, run=run, world=world)

    def _check_heads(self, run: RunConfig) -> None:
        heads, _ = run.model.token_heads or (1, 1)
        if heads % run.devices:
            fitting = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0)
            instead = f"devices={fitting}, or strategy.exchange=ring" if fitting else "strategy.exchange=ring"
            raise ConfigError(
                f"strategy.exchange=all_to_all gives each device whole heads, but devices={run.devices} does not "
                f"divide model.heads={heads}: choose {instead}"
            )


def _check_sequence(run: RunConfig, *, parts: int) -> None:
    """Refuse sequences that can't be cut into so many equal parts."""
    (tokens,) = run.data.shape
    if tokens % parts == 0:
        return
    below = tokens - tokens % parts
    choices = [str(below)] if below else []
    try:
        run.model.check(in_channels=1, image_size=below + parts)
        choices.append(str(below + parts))
    except ConfigError:
        choices = choices or [f"{below + parts} with model.sequence={below + parts}"]
    raise ConfigError(
        f"strategy={run.strategy.name} can't cut data.sequence={tokens} into {parts} equal parts "
        f"(devices={run.devices}): choose data.sequence={' or '.join(choices)}"
    )
