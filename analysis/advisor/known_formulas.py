"""Which of the suite's runs no formula of the advisor knows; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError
from parallelbench.optimizers import Lbfgs
from parallelbench.strategies.parts.meshes import divides_vocabulary

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig


def check_formula(run: RunConfig) -> None:
    """Raise `ConfigError` where what a run's step computes or sends is in no formula."""
    if isinstance(run.optimizer, Lbfgs):
        raise ConfigError("a step of L-BFGS takes as many gradients as its line search needs: no formula has it")
    if divides_vocabulary(run):
        raise ConfigError(
            "no formula knows what strategy.vocabulary_parallel=true sends and saves: choose "
            "strategy.vocabulary_parallel=false, or measure it"
        )
