"""Which of the suite's runs no formula of the advisor knows; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.strategies.context import FsdpCp
from parallelbench.strategies.tensor import divides_sequence, divides_vocabulary

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


def check_formula(run: RunConfig) -> None:
    """Raise `ConfigError` where what a run's step computes or sends is in no formula."""
    if isinstance(run.optimizer, Lbfgs):
        raise ConfigError("a step of L-BFGS takes as many gradients as its line search needs: no formula has it")
    strategy = run.strategy
    if isinstance(strategy, FsdpCp):  # FSDP's formula knows nothing of what attention sends
        raise ConfigError(f"no formula knows strategy={strategy.name}")
    if getattr(strategy, "micro_batches", 1) > 1 and not strategy.has_stages:
        raise ConfigError(f"no formula knows strategy.micro_batches of strategy={strategy.name}: choose 1")
    divided = {"vocabulary_parallel": divides_vocabulary(run), "sequence_parallel": divides_sequence(run)}
    for option in (name for name, asked in divided.items() if asked):
        raise ConfigError(
            f"no formula knows what strategy.{option}=true sends and saves: choose strategy.{option}=false, or "
            "measure it"
        )
