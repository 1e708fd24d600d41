"""Schedules, and optimizers and strategies under them, that are refused before anything trains."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.optim.optimizers import Sgd
from parallelbench.optim.schedules import Cosine
from parallelbench.strategies.single import Single
from parallelbench.training.checks.components import check_rate
from tests.strategies.training import configure

RUN = ("data=synthetic", "data.train_samples=96", "batch_size=24", "epochs=5")


class OwnFactor(Cosine, frozen=True, kw_only=True):
    """A user's schedule: `name` says which factors it has in the first, the middle and the last of 20 steps."""

    def factor(self, step: int, run: RunConfig) -> float:
        return {"late": [1.0, 1.0, 0.0], "zero": [0.0], "nan": [0.5, math.nan], "large": [1.0, 1.5], "short": [1.0]}[
            self.name
        ][{1: 0, 10: 1, 20: 2}[step]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("zero", r"OwnFactor.factor is 0 in step 1 of 20, but must be above 0 and at most 1: return a share"),
        ("nan", "OwnFactor.factor is nan in step 10 of 20"),
        ("large", r"OwnFactor.factor is 1.5 in step 10 of 20"),
        ("late", "lr_schedule=late: OwnFactor.factor is 0 in step 20 of 20"),
        ("short", r"OwnFactor.factor fails in step 10 of 20: .*test_schedule_refusals.py:\d+: IndexError: list index"),
    ],
)
def test_a_schedule_of_other_factors_is_refused_before_anything_starts(kind: str, message: str) -> None:
    run = configure(*RUN)
    with pytest.raises(ConfigError, match=message):
        check_run(msgspec.structs.replace(run, lr_schedule=OwnFactor(name=kind, warmup_epochs=0.0, least=0.0)), "cpu")


def test_no_rate_of_a_long_cosine_is_rounded_to_zero() -> None:
    run = msgspec.structs.replace(configure(*RUN, "lr_schedule=cosine"), epochs=1_000_000_000)
    assert 0 < run.rate_factor(run.epochs * run.steps_per_epoch) <= 1e-16


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (["lr_schedule=step"], "with one rate: choose lr_schedule=constant, or strategy=single$"),
        (["clip_norm=1.0"], "which clip nothing: choose clip_norm=null, or strategy=single$"),
    ],
)
def test_who_has_updates_of_its_own_is_told_all_that_helps(options: list[str], instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        configure(*RUN, *options, "strategy=tf_single", "model=mlp")
    run = msgspec.structs.replace(configure(*RUN, *options), strategy=OwnUpdates(name="mine"))
    with pytest.raises(ConfigError, match=rf"the ClassVar updates_as_asked of OwnUpdates is True, .*{instead}"):
        check_run(run, "cpu")


class OwnUpdates(Single, frozen=True, kw_only=True):
    """A user's strategy that does not say how it updates."""

    updates_as_asked: ClassVar[bool] = False


class OwnSgd(Sgd, frozen=True, kw_only=True):
    """An optimizer of a user's; `name` says what it does with the rate of its group."""

    def build(self, parameters: Any, run: RunConfig, device_type: str) -> Any:
        return _Descent(parameters, self.lr, kind=self.name)


class _Descent(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, *, kind: str) -> None:
        super().__init__(parameters, {} if kind == "rateless" else {"lr": lr})
        self._lr, self._kind = lr, kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self._kind == "fails":
            raise RuntimeError("not on a CPU")
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.rand_like(parameter) if self._kind == "noisy" else 1.0
                rate = group["lr"] if self._kind == "follows" else self._lr
                parameter.sub_(rate * noise * parameter.grad)


@pytest.mark.parametrize("kind", ["ignores", "noisy", "rateless"])
def test_an_optimizer_that_takes_no_notice_of_the_rate_is_refused_before_training(kind: str) -> None:
    run = configure(*RUN, "lr_schedule=cosine")
    options = {field: getattr(run.optimizer, field) for field in run.optimizer.__struct_fields__} | {"name": kind}
    run = msgspec.structs.replace(run, optimizer=OwnSgd(**options))
    with pytest.raises(ConfigError, match=rf"lr_schedule=cosine with optimizer={kind} is refused: .*lr_schedule=const"):
        check_rate(run)
    check_rate(msgspec.structs.replace(run, lr_schedule=configure(*RUN).lr_schedule))
    for other in ("follows", "fails"):
        check_rate(msgspec.structs.replace(run, optimizer=OwnSgd(**options | {"name": other})))


@pytest.mark.parametrize("name", ["adagrad", "adam", "adam_keras", "adamw", "sgd"])
def test_every_optimizer_of_the_suite_follows_the_rate(name: str) -> None:
    check_rate(configure(*RUN, "lr_schedule=cosine", f"optimizer={name}"))
