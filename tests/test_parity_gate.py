"""The parity gate lets a right strategy pass and stops a wrong one."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.strategies.data_parallel import Ddp
from parallelbench.strategies.pipeline import ModelParallel
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.comparability import WIDEST_TOLERANCE, as_reference, rounding
from parallelbench.training.checks.parity import as_checked, statistics_warnings, tolerance_warnings
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import configure, shard_loader

DATA = ["data=synthetic", "data.channels=1", "data.image_size=28", "data.train_samples=96", "data.test_samples=10"]


# --- wrong strategies: what is done to a right one's replica


def unsummed_gradients(replica: Any, run: RunConfig, world: World) -> None:
    """Every rank keeps its own gradients."""
    replica._forward.register_comm_hook(None, _keep)


def _keep(_state, bucket):  # DDP refuses annotations that are strings
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def same_shard(replica: Any, run: RunConfig, world: World) -> None:
    """All ranks read the same part of each batch."""
    replica.data_shard = Shard(0, world.size)


def idle_stage(replica: Any, run: RunConfig, world: World) -> None:
    """The second part of the model is never updated."""
    if world.rank == 1:
        replica._optimizer.step = lambda: None


def wrong_targets(replica: Any, run: RunConfig, world: World) -> None:
    """Two samples' labels are swapped."""
    step = replica.step

    def swapped(batch: Any) -> Any:
        if batch.labels is not None:
            first, second = (batch.labels != batch.labels[0]).nonzero()[0].item(), 0
            batch.labels[[first, second]] = batch.labels[[second, first]]
        return step(batch)

    replica.step = swapped


def counts_a_share_twice(replica: Any, run: RunConfig, world: World) -> None:
    """Rank 1's part of the test set counts twice."""
    evaluate = replica.evaluate
    if world.rank == 1:
        replica.evaluate = lambda batches: 2 * evaluate(batches)


def evaluates_what_it_started_with(replica: Any, run: RunConfig, world: World) -> None:
    """Rank 1 evaluates with the initial parameters."""
    evaluate, module = replica.evaluate, replica._module
    initial = deepcopy(module.state_dict())

    def outdated(batches: Any) -> Any:
        trained = deepcopy(module.state_dict())
        module.load_state_dict(initial)
        result = evaluate(batches)
        module.load_state_dict(trained)
        return result

    if world.rank == 1:
        replica.evaluate = outdated


def forgets_to_train_on(replica: Any, run: RunConfig, world: World) -> None:
    """After an evaluation, no gradient is averaged any more."""
    evaluate, ddp = replica.evaluate, replica._forward

    def last(batches: Any) -> Any:
        ddp.require_backward_grad_sync = False
        return evaluate(batches)

    replica.evaluate = last


def forgets_its_state_each_epoch(replica: Any, run: RunConfig, world: World) -> None:
    """The optimizer starts anew in each epoch."""
    step, taken = replica.step, 0

    def forgetful(batch: Any) -> Any:
        nonlocal taken
        if taken % run.steps_per_epoch == 0:
            replica.trained()[1].state.clear()
        taken += 1
        return step(batch)

    replica.step = forgetful


def summed_gradients(replica: Any, run: RunConfig, world: World) -> None:
    """The gradients are those of all ranks, not divided by their number."""
    full_gradients = replica.full_gradients
    replica.full_gradients = lambda: {name: world.size * tensor for name, tensor in full_gradients().items()}


class Wrong(Ddp, frozen=True, kw_only=True):
    fault: str

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        globals()[self.fault](replica, run, world)
        return replica


class WrongStages(ModelParallel, frozen=True, kw_only=True):
    fault: str

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        globals()[self.fault](replica, run, world)
        return replica


class AsksForMuch(Wrong, frozen=True, kw_only=True):
    """Wrong, with a tolerance that lets everything pass."""

    def parity_tolerance(self) -> float:
        return 10.0


def wrong(fault: Any, *overrides: str, kind: type = Wrong) -> RunConfig:
    """A run on two devices whose strategy has this fault."""
    strategy = f"strategy={'model_parallel' if kind is WrongStages else 'ddp'}"
    return with_fault(configure(*DATA, strategy, "devices=2", *overrides), fault, kind)


def with_fault(run: RunConfig, fault: Any, kind: type) -> RunConfig:
    """The same run, whose strategy has this fault."""
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    return msgspec.structs.replace(run, strategy=kind(fault=fault.__name__, **options))


def gate(rank: int, size: int, run: RunConfig) -> list[dict[str, Any]]:
    checked = as_checked(run)
    rows = check_parity(build_model(checked), checked, World(rank=rank, size=size, local_rank=rank), shard_loader)
    assert rows is not None
    return rows


def passed(run: RunConfig, folder: Path) -> bool:
    rows = run_ranks(gate, run.devices, folder, run)[0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    return all(row["passed"] for row in rows)


@pytest.mark.cases("ddp-bf16")
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "bf16"), ("model_parallel", "fp32")])
def test_a_right_strategy_passes(strategy: str, precision: str, tmp_path: Path) -> None:
    assert passed(configure(*DATA, f"strategy={strategy}", "devices=2", f"precision={precision}"), tmp_path)


COMMON = {
    "cnn": ["model=cnn", "data.image_size=16"],
    "mlp": ["model=mlp"],
    "resnet_tiny": ["model=resnet_tiny", "data.image_size=32"],
    "vit_tiny": ["model=vit_tiny", "data.image_size=32"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer"), [("cnn", "sgd"), ("resnet_tiny", "adam"), ("vit_tiny", "sgd"), ("mlp", "adagrad")]
)
def test_ddp_passes_with_common_models_as_users_run_them(model: str, optimizer: str, tmp_path: Path) -> None:
    """In fp32 the gate would stop most of these: flipped ReLUs, and Adam's steps along gradients that are noise."""
    options = ["precision=fp32", f"optimizer={optimizer}", "batch_size=48", "strategy=ddp", "devices=2"]
    assert passed(configure(*DATA, *COMMON[model], *options), tmp_path)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (["strategy=ddp", "devices=2", "batch_size=96"], 96),  # one step per epoch: as it is
        (["strategy=ddp", "devices=2", "batch_size=48"], 32),
        (["strategy=ddp", "devices=3", "batch_size=48"], 33),
        (["strategy=ddp", "devices=2", "batch_size=6"], 6),
        (["strategy=ddp", "devices=4", "batch_size=12", "scaling=weak"], 32),
    ],
)
def test_the_check_uses_a_small_batch_that_can_be_split(options: list[str], size: int) -> None:
    run = configure(*DATA, *options)
    checked = as_checked(run)
    assert checked.global_batch_size == size
    assert checked.optimizer.scaled_lr(checked) == pytest.approx(run.optimizer.scaled_lr(run))
    assert (checked.precision, checked.compile) == ("fp64", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (unsummed_gradients, Wrong),
        (summed_gradients, Wrong),
        (same_shard, Wrong),
        (idle_stage, WrongStages),
        (wrong_targets, WrongStages),
    ],
)
def test_a_wrong_strategy_is_caught(fault: Any, kind: type, tmp_path: Path) -> None:
    """In fp64, whatever the run's precision is."""
    assert not passed(wrong(fault, "precision=bf16", kind=kind), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "step", "seen"),
    [
        (counts_a_share_twice, 1, {"evaluation"}),
        (evaluates_what_it_started_with, 1, {"evaluation"}),
        (forgets_to_train_on, 2, {"gradient", "parameter", "evaluation"}),
    ],
)
def test_a_wrong_evaluation_is_caught(fault: Any, step: int, seen: set[str], tmp_path: Path) -> None:
    rows = run_ranks(gate, 2, tmp_path, wrong(fault))[0]
    assert [row["passed"] for row in rows] == [number < step for number in (1, 2, 3)]
    differences = ("loss", "gradient", "parameter", "evaluation")
    first = rows[step - 1]
    assert {name for name in differences if not first[f"{name}_difference"] <= first["tolerance"]} == seen


@pytest.mark.slow
def test_a_difference_is_that_of_its_step_alone(tmp_path: Path) -> None:
    """One device takes each step from the parameters that the strategy has reached, however wrong they are."""
    for row in run_ranks(gate, 2, tmp_path, wrong(idle_stage, kind=WrongStages))[0]:
        assert max(row["loss_difference"], row["gradient_difference"]) <= row["tolerance"] < row["parameter_difference"]


def gate_without_updates(rank: int, size: int, run: RunConfig) -> list[dict[str, Any]]:
    update = ModuleReplica._apply_gradients
    ModuleReplica._apply_gradients = lambda self: None  # type: ignore[method-assign]
    try:
        return gate(rank, size, run)
    finally:
        ModuleReplica._apply_gradients = update  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_fault_that_single_shares_is_caught(tmp_path: Path) -> None:
    """Strategies train with classes that `single` trains with, too; what they are compared with does not."""
    rows = run_ranks(gate_without_updates, 2, tmp_path, configure(*DATA, "strategy=ddp", "devices=2"))[0]
    assert not any(row["passed"] for row in rows)


@pytest.mark.slow
def test_a_state_that_is_forgotten_between_epochs_is_caught(tmp_path: Path) -> None:
    """The check passes from one epoch to the next."""
    assert not passed(wrong(forgets_its_state_each_epoch, "optimizer=adam", "optimizer.lr=0.05"), tmp_path)


@pytest.mark.exhaustive
def test_what_the_check_tolerates_has_an_end(tmp_path: Path) -> None:
    assert not passed(wrong(unsummed_gradients, kind=AsksForMuch), tmp_path)


def test_what_a_strategy_asks_for_is_said() -> None:
    assert tolerance_warnings(configure(*DATA, "strategy=ddp", "devices=2")) == []
    (said,) = tolerance_warnings(wrong(unsummed_gradients, kind=AsksForMuch))
    assert "tolerance 10" in said
    assert f"{WIDEST_TOLERANCE:g} was granted" in said
    (said,) = tolerance_warnings(configure(*DATA, "strategy=ddp", "devices=2", "strategy.compression=bf16"))
    assert "granted" not in said


def test_statistics_of_micro_batches_are_warned_of_as_under_pipelines() -> None:
    resnet = [*DATA, "model=resnet_tiny", "data.image_size=32"]
    in_two = ("strategy=ddp", "devices=2", "strategy.micro_batches=2")
    (said,) = statistics_warnings(configure(*resnet, *in_two, "model.norm=batch"))
    assert "normalises each micro-batch by its own statistics" in said
    assert statistics_warnings(configure(*resnet, *in_two, "model.norm=group")) == []


def test_the_rounding_of_a_run_is_that_of_its_coarsest_format() -> None:
    ddp = [*DATA, "strategy=ddp", "devices=2"]
    assert rounding(configure(*ddp)) == 2**-53
    assert rounding(configure(*ddp, "precision=fp32")) == 2**-24
    assert rounding(configure(*ddp, "precision=fp32", "strategy.compression=fp16")) == 1e-2
    assert rounding(configure(*ddp, "data.image_size=32", "model=resnet_tiny", "model.norm=batch")) is None


@pytest.mark.cases("bf16-optimizer1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "optimizer"), [("fp16", ["optimizer=adam", "optimizer.lr=0.001"]), ("bf16", ["optimizer=sgd"])]
)
def test_rounded_gradients_pass(compression: str, optimizer: list[str], tmp_path: Path) -> None:
    rounding = f"strategy.compression={compression}"
    assert passed(configure(*DATA, "strategy=ddp", "devices=2", rounding, *optimizer), tmp_path)


@pytest.mark.exhaustive
def test_local_batch_statistics_are_checked_with_shared_ones(tmp_path: Path) -> None:
    run = configure(*DATA, "data.image_size=32", "model=resnet_tiny", "model.norm=batch", "strategy=ddp", "devices=2")
    assert as_checked(run).model.norm == "sync"  # type: ignore[attr-defined]
    assert passed(run, tmp_path)


def test_the_reference_does_the_same_work_on_one_device() -> None:
    run = configure(*DATA, "strategy=ddp", "devices=4", "scaling=weak", "batch_size=8", "optimizer.lr_rule=sqrt")
    reference = as_reference(run)
    assert (reference.global_batch_size, reference.devices) == (32, 1)
    assert reference.optimizer.scaled_lr(reference) == pytest.approx(run.optimizer.scaled_lr(run))
    assert reference.optimizer.scaled_lr(reference) == pytest.approx(0.05 * 2)
    assert reference.steps_per_epoch == run.steps_per_epoch


def test_an_evaluation_differs_by_its_loss_or_by_a_single_prediction() -> None:
    from parallelbench.training.checks.parity import _evaluation_difference, _verdict

    others = {"loss_difference": 0.0, "gradient_difference": 0.0, "parameter_difference": 0.0}
    same = _evaluation_difference([80.0, 12.0], [80.0, 12.0], 37)
    one_prediction = _evaluation_difference([80.0, 13.0], [80.0, 12.0], 37)
    loss = _evaluation_difference([80.0, 12.0], [80.1, 12.0], 37)
    nan = _evaluation_difference([float("nan"), 12.0], [80.0, 12.0], 37)
    further = _evaluation_difference([80.0, 12.0, 5.0, 37.0], [80.0, 12.0, 6.0, 37.0], 37)
    metric_nan = _evaluation_difference([80.0, 12.0, float("nan")], [80.0, 12.0, 6.0], 37)
    assert same == _evaluation_difference([80.0, 12.0, 5.0], [80.0, 12.0], 37) == 0.0, "a reference without them"
    assert further == one_prediction
    assert one_prediction == pytest.approx(1 / 370)
    assert loss == pytest.approx(0.1 / 80.1)
    for difference in (one_prediction, loss, nan, further, metric_nan):
        assert not _verdict(others | {"evaluation_difference": difference}, 1e-9)["passed"]


def test_a_difference_of_names_shapes_counters_or_nan_is_never_small() -> None:
    from parallelbench.training.checks.parity import _verdict, largest_difference

    one = {"w": np.ones(2), "n": np.array(3)}
    difference = functools.partial(largest_difference, floor=1.0)
    assert difference(one, one) == 0.0
    assert difference({"w": np.ones(2)}, one) == float("inf")
    assert difference({"w": np.ones(3), "n": np.array(3)}, one) == float("inf")
    assert difference({"w": np.ones(2), "n": np.array(4)}, one) == float("inf")
    nan = difference({"w": np.array([1.0, float("nan")]), "n": np.array(3)}, one)
    columns = {"loss_difference": 0.0, "gradient_difference": 0.0, "evaluation_difference": 0.0}
    assert not _verdict(columns | {"parameter_difference": nan}, 1e9)["passed"]
    assert _verdict(columns | {"parameter_difference": 0.0}, 1e-9)["passed"]
    assert difference({"w": np.array([1.0, 1.5]), "n": np.array(3)}, one) == 0.5
