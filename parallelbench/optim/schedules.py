"""The learning-rate schedules: what the optimizer's rate is multiplied by in each step. Importing this loads no torch.

Lengths are in epochs, so that they mean the same at any batch size; rates change from step to step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from parallelbench.config.components import LrSchedule
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


Length = Annotated[float, Meta(gt=0, le=1_000_000)]
MaybeLength = Annotated[float, Meta(ge=0, le=1_000_000)]
_LEAST = 1e-30
"""No rate is 0, however many steps there are."""


class Constant(LrSchedule, frozen=True, kw_only=True):
    """Every step has the optimizer's own rate."""

    changes: ClassVar[bool] = False

    def factor(self, step: int, run: RunConfig) -> float:
        return 1.0


class LinearWarmup(LrSchedule, frozen=True, kw_only=True):
    """The rate rises evenly to the optimizer's own, and stays there (Goyal et al. 2017, arXiv 1706.02677)."""

    warmup_epochs: Length
    """Epochs whose steps have a lower rate: of w such steps, step k has k ÷ (w + 1) of the optimizer's."""

    def factor(self, step: int, run: RunConfig) -> float:
        return _rising(step, steps_in(self.warmup_epochs, run))

    def check(self, run: RunConfig) -> None:
        _check_warmup(self.warmup_epochs, run)

    def shortened(self, step: float) -> LrSchedule:
        return replace(self, warmup_epochs=step)


class Cosine(LrSchedule, frozen=True, kw_only=True):
    """The rate falls along half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983), after a warm-up or without."""

    warmup_epochs: MaybeLength
    """Epochs whose steps have a lower rate, which rises evenly; 0: none."""
    least: Annotated[float, Meta(ge=0, lt=1)]
    """Share of the optimizer's rate that a step after the last one would have: the last is just above it."""

    def factor(self, step: int, run: RunConfig) -> float:
        """A straight line up, then least + (1 − least) · (1 + cos(π · t ÷ T)) ÷ 2 in step t of 0 … T − 1."""
        warmup = steps_in(self.warmup_epochs, run)
        if step <= warmup:
            return _rising(step, warmup)
        passed = (step - 1 - warmup) / (run.epochs * run.steps_per_epoch - warmup)
        return max(self.least + (1 - self.least) * (1 + math.cos(math.pi * passed)) / 2, _LEAST)

    def check(self, run: RunConfig) -> None:
        _check_warmup(self.warmup_epochs, run)

    def shortened(self, step: float) -> LrSchedule:
        return replace(self, warmup_epochs=min(self.warmup_epochs, step))


class StepDecay(LrSchedule, frozen=True, kw_only=True):
    """The rate is multiplied by the same number every so many epochs (He et al. 2016, arXiv 1512.03385)."""

    every_epochs: Length
    """Epochs from one change to the next; a fraction of an epoch is rounded to whole steps."""
    decay: Annotated[float, Meta(gt=0, lt=1)]
    """What the rate is multiplied by at each change."""

    def factor(self, step: int, run: RunConfig) -> float:
        """A power of `decay`; never 0, however often the rate is multiplied."""
        return max(self.decay ** ((step - 1) // steps_in(self.every_epochs, run)), _LEAST)

    def check(self, run: RunConfig) -> None:
        if steps_in(self.every_epochs, run) >= run.epochs * run.steps_per_epoch:
            raise ConfigError(
                f"lr_schedule.every_epochs={self.every_epochs:g} with epochs={run.epochs} changes nothing: training "
                "ends before the first change; choose fewer lr_schedule.every_epochs, or lr_schedule=constant"
            )

    def shortened(self, step: float) -> LrSchedule:
        return replace(self, every_epochs=step)


def steps_in(epochs: float, run: RunConfig) -> int:
    """Whole steps in so many epochs: at least one, but none in none."""
    return max(1, round(epochs * run.steps_per_epoch)) if epochs else 0


def _rising(step: int, warmup: int) -> float:
    return min(1.0, step / (warmup + 1))


def _check_warmup(epochs: float, run: RunConfig) -> None:
    if steps_in(epochs, run) >= run.epochs * run.steps_per_epoch:
        raise ConfigError(
            f"lr_schedule.warmup_epochs={epochs:g} with epochs={run.epochs} never ends: no step has the rate "
            "optimizer.lr; choose fewer lr_schedule.warmup_epochs, or more epochs"
        )
