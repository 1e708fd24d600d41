"""Which runs can give the parts of a sequence to several ranks; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig

Exchange = Literal["ring", "all_gather", "all_to_all"]
"""How keys and values reach the queries of other ranks: see `ContextParallel.exchange`."""


def check_context(run: RunConfig, *, exchange: Exchange, ranks: int, option: str) -> None:
    """Refuse models whose tokens meet outside of attention, and sizes that the ranks of a sequence don't divide.

    `option`: what asks for so many ranks, as a command line says it without the number.
    """
    if run.model.token_heads is None:
        raise ConfigError(
            f"strategy={run.strategy.name} cuts sequences of tokens, which only causal attention may join, but "
            f"model={run.model.name} has no such attention: choose model=gpt or gpt_tiny, or strategy=ddp"
        )
    by_heads = exchange == "all_to_all"
    _check_sequence(run, parts=ranks * (1 if by_heads else 2), because=f"{option}={ranks}")
    if by_heads:
        _check_heads(run, ranks=ranks, option=option)


def _check_heads(run: RunConfig, *, ranks: int, option: str) -> None:
    heads, _ = run.model.token_heads or (1, 1)
    if heads % ranks:
        fitting = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0)
        instead = f"{option}={fitting}, or strategy.exchange=ring" if fitting else "strategy.exchange=ring"
        raise ConfigError(
            f"strategy.exchange=all_to_all gives each device whole heads, but {option}={ranks} does not divide "
            f"model.heads={heads}: choose {instead}"
        )


def _check_sequence(run: RunConfig, *, parts: int, because: str) -> None:
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
        f"({because}): choose data.sequence={' or '.join(choices)}"
    )
