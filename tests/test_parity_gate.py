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
from parallelbench.loaders.resident import ResidentLoader
from parallelbench.strategies.data_parallel import Ddp
from parallelbench.strategies.pipeline import ModelParallel
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.compared import WIDEST_TOLERANCE, as_reference, rounding
from parallelbench.training.checks.parity import as_checked, tolerance_warnings
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import configure

DATA = [
    "data=synthetic",
    "data.channels=1",
    "data.image_size=28",
    "data.train_samples=96",
    "data.test_samples=10",
]


class UnsummedGradients(Ddp, frozen=True, kw_only=True):
    """Every rank keeps its own gradients."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        replica._forward.register_comm_hook(None, _keep)  # type: ignore[attr-defined]
        return replica


def _keep(_state, bucket):  # DDP refuses annotations that are strings
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class SameShard(Ddp, frozen=True, kw_only=True):
    """All ranks read the same part of each batch."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        replica.data_shard = Shard(0, world.size)
        return replica


class IdleStage(ModelParallel, frozen=True, kw_only=True):
    """The second part of the model is never updated."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        if world.rank == 1:
            replica._optimizer.step = lambda: None  # type: ignore[attr-defined]
        return replica


class WrongTargets(ModelParallel, frozen=True, kw_only=True):
    """Two samples' labels are swapped."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        step = replica.step

        def swapped(batch: Any) -> Any:
            if batch.labels is not None:
                first, second = (batch.labels != batch.labels[0]).nonzero()[0].item(), 0
                batch.labels[[first, second]] = batch.labels[[second, first]]
            return step(batch)

        replica.step = swapped  # type: ignore[method-assign]
        return replica


class CountsAShareTwice(Ddp, frozen=True, kw_only=True):
    """Rank 1's part of the test set counts twice."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        evaluate = replica.evaluate
        if world.rank == 1:
            replica.evaluate = lambda batches: 2 * evaluate(batches)  # type: ignore[method-assign,operator]
        return replica


class EvaluatesWhatItStartedWith(Ddp, frozen=True, kw_only=True):
    """Rank 1 evaluates with the initial parameters."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        evaluate, module = replica.evaluate, replica._module  # type: ignore[attr-defined]
        initial = deepcopy(module.state_dict())

        def outdated(batches: Any) -> Any:
            trained = deepcopy(module.state_dict())
            module.load_state_dict(initial)
            result = evaluate(batches)
            module.load_state_dict(trained)
            return result

        if world.rank == 1:
            replica.evaluate = outdated  # type: ignore[method-assign]
        return replica


class ForgetsToTrainOn(Ddp, frozen=True, kw_only=True):
    """After an evaluation, no gradient is averaged any more."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        evaluate, ddp = replica.evaluate, replica._forward  # type: ignore[attr-defined]

        def last(batches: Any) -> Any:
            ddp.require_backward_grad_sync = False
            return evaluate(batches)

        replica.evaluate = last  # type: ignore[method-assign]
        return replica


class ForgetsItsStateEachEpoch(Ddp, frozen=True, kw_only=True):
    """The optimizer starts anew in each epoch."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        step, taken = replica.step, 0

        def forgetful(batch: Any) -> Any:
            nonlocal taken
            if taken % run.steps_per_epoch == 0:
                replica.trained()[1].state.clear()  # type: ignore[attr-defined]
            taken += 1
            return step(batch)

        replica.step = forgetful  # type: ignore[method-assign]
        return replica


class AsksForMuch(UnsummedGradients, frozen=True, kw_only=True):
    """Wrong, with a tolerance that lets everything pass."""

    def parity_tolerance(self) -> float:
        return 10.0


class SummedGradients(Ddp, frozen=True, kw_only=True):
    """The gradients are those of all ranks, not divided by their number."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        full_gradients = replica.full_gradients

        def summed() -> dict[str, torch.Tensor]:
            return {name: world.size * tensor for name, tensor in full_gradients().items()}

        replica.full_gradients = summed  # type: ignore[method-assign]
        return replica


def gate(rank: int, size: int, run: RunConfig) -> list[dict[str, Any]]:
    return gate_and_hints(rank, size, run)[0]


def gate_and_hints(rank: int, size: int, run: RunConfig) -> tuple[list[dict[str, Any]], list[str]]:
    world = World(rank=rank, size=size, local_rank=rank)
    arrays = run.data.load(Path("nowhere"))

    def loader_of(run: RunConfig, shard: Shard) -> ResidentLoader:
        return ResidentLoader(
            arrays,
            run.data,
            device="cpu",
            dtype=torch.float64,
            seed=run.effective_seed,
            global_batch_size=run.global_batch_size,
            shard=shard,
            channels_last=False,
            steps_per_epoch=run.steps_per_epoch,
        )

    checked = as_checked(run)
    hints: list[str] = []
    rows = check_parity(build_model(checked), checked, world, loader_of, hint=hints.append)
    assert rows is not None
    return rows, hints


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
@pytest.mark.parametrize("wrong", [UnsummedGradients, SameShard, IdleStage, WrongTargets])
def test_a_wrong_strategy_is_caught(wrong: type, tmp_path: Path) -> None:
    """In fp64, whatever the run's precision is."""
    base = "ddp" if issubclass(wrong, Ddp) else "model_parallel"
    run = configure(*DATA, f"strategy={base}", "devices=2", "precision=bf16")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    assert not passed(msgspec.structs.replace(run, strategy=wrong(**options)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (UnsummedGradients, "rank 0's own 12 samples, not the mean over all 24: average it over the ranks"),
        (SummedGradients, "the gradient is 2 times the mean over the global batch"),
        (SameShard, "rank 0's own 12 samples"),
        (ForgetsToTrainOn, None),
    ],
)
def test_a_gradient_that_is_no_mean_is_named(wrong: type, says: str | None, tmp_path: Path) -> None:
    run = configure(*DATA, "strategy=ddp", "devices=2")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    (rows, hints), other = run_ranks(
        gate_and_hints, 2, tmp_path, msgspec.structs.replace(run, strategy=wrong(**options))
    )
    assert not all(row["passed"] for row in rows)
    assert other[1] == []
    assert [says is not None and says in hint for hint in hints] == ([] if says is None else [True])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "step", "seen"),
    [
        (CountsAShareTwice, 1, {"evaluation"}),
        (EvaluatesWhatItStartedWith, 1, {"evaluation"}),
        (ForgetsToTrainOn, 2, {"gradient", "parameter", "evaluation"}),
    ],
)
def test_a_wrong_evaluation_is_caught(wrong: type, step: int, seen: set[str], tmp_path: Path) -> None:
    run = configure(*DATA, "strategy=ddp", "devices=2")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    rows = run_ranks(gate, 2, tmp_path, msgspec.structs.replace(run, strategy=wrong(**options)))[0]
    assert [row["passed"] for row in rows] == [number < step for number in (1, 2, 3)]
    differences = ("loss", "gradient", "parameter", "evaluation")
    first = rows[step - 1]
    assert {name for name in differences if not first[f"{name}_difference"] <= first["tolerance"]} == seen


@pytest.mark.slow
def test_a_difference_is_that_of_its_step_alone(tmp_path: Path) -> None:
    """One device takes each step from the parameters that the strategy has reached, however wrong they are."""
    run = configure(*DATA, "strategy=model_parallel", "devices=2")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    rows = run_ranks(gate, 2, tmp_path, msgspec.structs.replace(run, strategy=IdleStage(**options)))[0]
    for row in rows:
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


@pytest.mark.cases("ForgetsItsStateEachEpoch-adam")
@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "optimizer"), [(ForgetsItsStateEachEpoch, "adam"), (AsksForMuch, "sgd")])
def test_forgotten_state_and_a_wide_tolerance_are_caught(wrong: type, optimizer: str, tmp_path: Path) -> None:
    """The check passes from one epoch to the next, and what it tolerates has an end."""
    run = configure(*DATA, "strategy=ddp", "devices=2", f"optimizer={optimizer}", "optimizer.lr=0.05")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    assert not passed(msgspec.structs.replace(run, strategy=wrong(**options)), tmp_path)


def test_what_a_strategy_asks_for_is_said() -> None:
    run = configure(*DATA, "strategy=ddp", "devices=2")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    assert tolerance_warnings(run) == []
    (said,) = tolerance_warnings(msgspec.structs.replace(run, strategy=AsksForMuch(**options)))
    assert "tolerance 10" in said
    assert f"{WIDEST_TOLERANCE:g} was granted" in said
    (said,) = tolerance_warnings(configure(*DATA, "strategy=ddp", "devices=2", "strategy.compression=bf16"))
    assert "granted" not in said


def test_the_rounding_of_a_run_is_that_of_its_coarsest_format() -> None:
    ddp = [*DATA, "strategy=ddp", "devices=2"]
    assert rounding(configure(*ddp)) == 2**-53
    assert rounding(configure(*ddp, "precision=fp32")) == 2**-24
    assert rounding(configure(*ddp, "precision=fp32", "strategy.compression=fp16")) == 1e-2
    assert rounding(configure(*ddp, "data.image_size=32", "model=resnet_tiny", "model.norm=batch")) is None


@pytest.mark.cases("bf16-optimizer1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "optimizer"),
    [("fp16", ["optimizer=adam", "optimizer.lr=0.001"]), ("bf16", ["optimizer=sgd"])],
)
def test_rounded_gradients_pass(compression: str, optimizer: list[str], tmp_path: Path) -> None:
    rounding = f"strategy.compression={compression}"
    assert passed(configure(*DATA, "strategy=ddp", "devices=2", rounding, *optimizer), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
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
