"""Learning-rate schedules: torch's own rates, in every strategy, through a checkpoint, or refused before training."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch.optim import lr_scheduler

from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.optim.optimizers import Sgd
from parallelbench.optim.schedules import Cosine, LinearWarmup, StepDecay
from parallelbench.strategies.data_parallel import Ddp
from parallelbench.strategies.replica import ScheduledRate
from parallelbench.strategies.single import Single
from parallelbench.training.checks.components import check_rate, check_update
from parallelbench.training.checks.parity import as_checked
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_parity import MODELS, SYNTHETIC
from tests.strategies.training import configure
from tests.test_checkpoint import equal, interrupted, small
from tests.test_closing import SMALL, TRAINED, closed, failed
from tests.test_parity_gate import gate

COSINE = ("lr_schedule=cosine", "lr_schedule.warmup_epochs=0.25", "epochs=1")
"""One step of warm-up, and another rate in each of the four steps of the run."""
RUN = ("data=synthetic", "data.train_samples=96", "batch_size=24", "epochs=5")


def factors(*overrides: str) -> list[float]:
    """Of all steps of a run with four steps in each of five epochs."""
    run = configure(*RUN, *overrides)
    return [run.rate_factor(step) for step in range(1, 21)]


def of_torch(scheduler: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = scheduler(optimizer), []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_rates_are_those_of_torchs_schedulers() -> None:
    step = functools.partial(lr_scheduler.StepLR, step_size=6, gamma=0.5)
    assert factors("lr_schedule=step", "lr_schedule.every_epochs=1.5", "lr_schedule.decay=0.5") == of_torch(step)
    cosine = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=20, eta_min=0.1)
    found = factors("lr_schedule=cosine", "lr_schedule.least=0.1")
    assert found == pytest.approx(of_torch(cosine), rel=1e-12)
    rising = functools.partial(lr_scheduler.LinearLR, start_factor=1 / 5, total_iters=4)
    assert factors("lr_schedule=linear_warmup") == pytest.approx(of_torch(rising), rel=1e-12)
    assert factors("lr_schedule=constant") == [1.0] * 20


def test_a_cosine_begins_where_its_warm_up_ends() -> None:
    found = factors("lr_schedule=cosine", "lr_schedule.warmup_epochs=0.5")
    assert found[:3] == [1 / 3, 2 / 3, 1.0]
    assert found[2:] == pytest.approx([(1 + math.cos(math.pi * t / 18)) / 2 for t in range(18)], rel=1e-12)
    assert 0 < found[-1] < 0.01


def test_steps_after_the_last_have_the_full_rate() -> None:
    """An update at the rate of a cosine's end could not be seen by the closing check."""
    run = configure(*RUN, "lr_schedule=cosine")
    assert [run.rate_factor(step) for step in (21, 22, 1000)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "length"), [("linear_warmup", "warmup_epochs"), ("cosine", "warmup_epochs"), ("step", "every_epochs")]
)
def test_the_parity_check_sees_rates_change_however_long_the_run(kind: str, length: str) -> None:
    slow = [f"lr_schedule={kind}", f"lr_schedule.{length}=50"]
    run = configure(*RUN[:3], "epochs=1000", "strategy=ddp", "devices=2", *slow)
    checked = as_checked(run)
    assert len({checked.rate_factor(step) for step in range(1, checked.measure.parity_steps + 1)}) >= 2
    assert checked.epochs * checked.steps_per_epoch >= checked.measure.parity_steps, "no step is after the last"


def test_every_schedule_of_the_suite_is_shortened_to_steps() -> None:
    warmup, cosine = LinearWarmup(name="w", warmup_epochs=9), Cosine(name="c", warmup_epochs=9, least=0.1)
    flat, decay = Cosine(name="c", warmup_epochs=0, least=0.1), StepDecay(name="s", every_epochs=30, decay=0.1)
    assert warmup.shortened(0.5) == LinearWarmup(name="w", warmup_epochs=0.5)
    assert cosine.shortened(0.5) == Cosine(name="c", warmup_epochs=0.5, least=0.1)
    assert flat.shortened(0.5) == flat
    assert decay.shortened(1) == StepDecay(name="s", every_epochs=1, decay=0.1)


# --- on ranks


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp", "parameter_server"])
@pytest.mark.cases("single")
def test_a_resumed_run_goes_on_at_its_step(strategy: str, tmp_path: Path) -> None:
    run = small(strategy, "lr_schedule=cosine", "lr_schedule.warmup_epochs=1.5", "epochs=4")
    size = run.strategy.processes(run, "cpu")
    for losses, state, losses_resumed, state_resumed in run_ranks(interrupted, size, tmp_path, run):
        assert losses_resumed == losses
        assert equal(state_resumed, state)


class OneRate(Ddp, frozen=True, kw_only=True):
    """Rank 1 does not follow the schedule; or all ranks do, but a step late."""

    def prepare(self, model: Any, run: RunConfig, world: Any) -> Any:
        replica = super().prepare(model, run, world)
        replica._rate._taken = -1 if self.name == "late" else 0  # type: ignore[attr-defined]
        if self.name == "ignores":
            replica._rate = None  # type: ignore[attr-defined]
        return replica


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ignores", "late", "right"])
def test_the_parity_check_finds_who_does_not_follow(name: str, tmp_path: Path) -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], "strategy=ddp", "devices=2", "lr_schedule=cosine", "epochs=9")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__} | {"name": name}
    rows = run_ranks(gate, 2, tmp_path, msgspec.structs.replace(run, strategy=OneRate(**options)))[0]
    assert all(row["passed"] for row in rows) == (name == "right")


@pytest.mark.exhaustive
def test_the_closing_check_knows_the_schedule() -> None:
    run = configure(*SMALL, "strategy=single", "optimizer.lr=0.01", "lr_schedule=cosine")
    assert failed(closed(World(), run)) == set()


def forgets_its_step(replica: Any, k: int) -> None:
    """As a replica that was resumed without the number of its step: the closing check's steps are in mid-schedule."""
    count, steps = replica._rate, 0
    next_step = count.next_step

    def anew(optimizer: Any) -> None:
        nonlocal steps
        steps += 1
        count._taken = 0 if steps == TRAINED + 1 else count._taken
        next_step(optimizer)

    count.next_step = anew


@pytest.mark.exhaustive
def test_a_lost_step_number_is_found_after_training() -> None:
    run = configure(*SMALL, "strategy=single", "optimizer.lr=0.01", "lr_schedule=cosine", "lr_schedule.warmup_epochs=1")
    assert failed(closed(World(), run, forgets_its_step)) == {"update"}


def test_groups_of_parameters_keep_their_own_rates() -> None:
    run = configure(*RUN, "lr_schedule=step", "lr_schedule.every_epochs=0.25", "lr_schedule.decay=0.5")
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1.0, 0.1)]
    optimizer, rate = torch.optim.SGD(groups), ScheduledRate(run)
    rates = []
    for _ in range(3):
        rate.next_step(optimizer)
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[1.0, 0.1], [0.5, 0.05], [0.25, 0.025]]
    assert rate.local_state() == {"taken": 3}


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
        ("short", r"OwnFactor.factor fails in step 10 of 20: .*test_schedules.py:\d+: IndexError: list index"),
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


class SecondLoss(Sgd, frozen=True, kw_only=True):
    """An optimizer of a user's that computes the loss again: torch's L-BFGS, or one as SAM is published."""

    def build(self, parameters: Any, run: RunConfig, device_type: str) -> Any:
        return torch.optim.LBFGS(parameters, self.lr) if self.name == "own_lbfgs" else _Sharp(parameters, self.lr)


class _Sharp(_Descent):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, kind="follows")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "sharpness-aware minimization needs a closure"
        with torch.enable_grad():
            closure()
        super().step()


@pytest.mark.parametrize("name", ["own_lbfgs", "sharp"])
def test_an_optimizer_that_needs_a_closure_is_refused_before_training(name: str) -> None:
    run = configure(*RUN)
    options = {field: getattr(run.optimizer, field) for field in run.optimizer.__struct_fields__} | {"name": name}
    with pytest.raises(ConfigError, match=rf"optimizer={name} is refused: .*closure.*; choose optimizer=lbfgs, or "):
        check_update(msgspec.structs.replace(run, optimizer=SecondLoss(**options)))
    for other in ("follows", "fails"):
        check_update(msgspec.structs.replace(run, optimizer=OwnSgd(**options | {"name": other})))


@pytest.mark.parametrize("name", ["adagrad", "adam", "adam_keras", "adamw", "sgd"])
def test_every_optimizer_of_the_suite_follows_the_rate(name: str) -> None:
    check_rate(configure(*RUN, "lr_schedule=cosine", f"optimizer={name}"))
