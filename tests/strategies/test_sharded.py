"""fsdp, hsdp and zero1: what is sharded, what is sent, and that training goes on after an evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.config.replica import Replica
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.strategies.replica import gradient_bytes
from parallelbench.training.checks.compared import as_reference
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.recorded import Recorded
from tests.strategies.test_parity import assert_equal
from tests.strategies.training import configure, drive, loader_of

DATA = ["data=synthetic", "data.channels=1", "data.image_size=32", "data.train_samples=96", "data.test_samples=25"]
MLP = [*DATA, "model=mlp", "optimizer=adam"]
VIT = [*DATA, "model=vit_tiny", "optimizer=adam"]
"""Its class token and position embedding have a first dimension of 1, its head of 10."""


def prepared(rank: int, size: int, run: RunConfig) -> Replica:
    return run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))


def one_step(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """What the third step sends, as counted and as the library was asked for; and what the rank keeps.

    DDP arranges its buckets anew in the second.
    """
    replica = prepared(rank, size, run)
    batches = loader_of(replica, run).train(epoch=1)
    for _ in range(2):
        replica.step(next(batches))
    replica.traffic.take()
    with Recorded() as recorded:
        replica.step(next(batches))
    optimizer: Any = replica._optimizer  # type: ignore[attr-defined]
    state = getattr(optimizer, "optim", optimizer).state.values()
    kept = [value for values in state for value in values.values() if value.dim() > 0]
    return {
        **replica.traffic.take(),
        "recorded": dict(recorded.carried),
        "model": gradient_bytes(build_model(run).double()),
        "state": sum(local(value).numel() * value.element_size() for value in kept),
    }


def held(rank: int, size: int, run: RunConfig) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that a rank holds after a step."""
    replica: Any = prepared(rank, size, run)
    batches = loader_of(replica, run).train(epoch=1)
    replica.step(next(batches))
    ((module, optimizer),) = [replica.trained()]
    parameters = list(module.parameters())
    states = [value for values in getattr(optimizer, "optim", optimizer).state.values() for value in values.values()]
    return {
        "parameters": sum(local(parameter).nbytes for parameter in parameters),
        "gradients": sum(local(parameter.grad).nbytes for parameter in parameters if parameter.grad is not None),
        "states": sum(local(value).nbytes for value in states if value.dim() > 0),
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("ring_ddp", 2), ("zero1", 2), ("fsdp", 2), ("hsdp", 4)])
@pytest.mark.cases("*-adam")
def test_a_rank_holds_what_the_formula_says(strategy: str, ranks: int, optimizer: str, tmp_path: Path) -> None:
    layers = "model.hidden=[1024,1024]"
    run = configure(*DATA, "model=mlp", layers, f"strategy={strategy}", f"devices={ranks}", f"optimizer={optimizer}")
    ranks_hold = [sum(parts.values()) for parts in run_ranks(held, ranks, tmp_path, run)]
    formula = run.strategy.state_bytes(run, sum(parameter.numel() for parameter in build_model(run).parameters()))
    assert formula is not None
    if strategy == "zero1":  # whole tensors have owners: what all hold together is that of the formula
        ranks_hold = [sum(ranks_hold) // ranks] * ranks
    assert ranks_hold == pytest.approx([formula] * ranks, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "model_parallel", "tensor_parallel", "parameter_server"])
def test_where_devices_hold_different_things_there_is_no_formula(strategy: str) -> None:
    run = configure(*MLP, f"strategy={strategy}", "devices=2")
    assert run.strategy.state_bytes(run, 1000) is None


def test_an_optimizer_whose_memory_grows_has_no_formula() -> None:
    run = configure(*DATA, "model=mlp", "optimizer=lbfgs", "batch_size=96")
    assert run.strategy.state_bytes(run, 1000) is None


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def padded_bytes(run: RunConfig, shard: int) -> int:
    """Bytes of the model when the first dimension of each parameter grows to a multiple of the shards."""
    shapes = [parameter.shape for parameter in build_model(run).parameters()]
    return 8 * sum(math.ceil(shape[0] / shard) * shard * math.prod(shape[1:]) for shape in shapes)


@pytest.mark.cases("fsdp-mlp-False")
@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("strategy", "ranks", "shard", "model"),
    [("fsdp", 2, 2, MLP), ("hsdp", 4, 2, MLP), ("fsdp", 4, 4, VIT), ("hsdp", 4, 2, VIT)],
    ids=["fsdp-mlp", "hsdp-mlp", "fsdp-vit", "hsdp-vit"],
)
def test_a_step_sends_what_the_formulas_say(
    strategy: str, ranks: int, shard: int, model: list[str], reshard: bool, tmp_path: Path
) -> None:
    again = f"strategy.reshard_after_forward={str(reshard).lower()}"
    run = configure(*model, f"strategy={strategy}", f"devices={ranks}", again)
    travels, replicas, gathers = padded_bytes(run, shard), ranks // shard, 2 if reshard else 1
    found = run_ranks(one_step, ranks, tmp_path, run)
    for rank in found:
        carried = {"allgather_base": gathers * travels, "reduce_scatter_base": travels}
        assert rank["recorded"] == carried | ({"allreduce": travels / shard} if replicas > 1 else {})
        assert rank["parameter_bytes_sent"] == gathers * (shard - 1) / shard * travels
        across = 2 * (replicas - 1) / replicas * travels / shard
        assert rank["gradient_bytes_sent"] == (shard - 1) / shard * travels + across
        assert rank["activation_bytes_sent"] == 0
        assert rank["state"] < 2 * rank["model"], "no rank has all of Adam's two moments"
    assert sum(rank["state"] for rank in found) == 2 * found[0]["model"] * replicas


@pytest.mark.exhaustive
@pytest.mark.slow
def test_zero1_sends_gradients_and_parameters_and_shares_out_the_optimizers_state(tmp_path: Path) -> None:
    run = configure(*MLP, "strategy=zero1", "devices=2")
    ranks = run_ranks(one_step, 2, tmp_path, run)
    model = ranks[0]["model"]
    for rank in ranks:
        assert rank["recorded"] == {"allreduce": model, "broadcast": model}
        owned = rank["state"] / 2  # Adam keeps two numbers for each parameter that the rank owns
        assert (rank["gradient_bytes_sent"], rank["parameter_bytes_sent"]) == (model, owned)
        assert 0 < rank["state"] < 2 * model
    assert sum(rank["state"] for rank in ranks) == 2 * model


def train_on(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Two evaluations, each after some steps; then the replica is given back."""
    replica = prepared(rank, size, run)
    drive(replica, run)
    result = drive(replica, run)
    replica.close()
    dist.barrier()
    return result


@pytest.mark.cases("zero1-2-model=cnn_small optimizer.momentum=0.9 channels_last=true")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        ("fsdp", 2, "model=resnet_tiny model.norm=sync"),
        ("fsdp", 2, "model=cnn_small strategy.reshard_after_forward=false optimizer=adagrad channels_last=true"),
        ("hsdp", 4, "model=vit_tiny strategy.reshard_after_forward=false optimizer=adamw"),
        ("zero1", 2, "model=cnn_small optimizer.momentum=0.9 channels_last=true"),
        ("zero1", 4, "model=logistic_regression optimizer=adagrad"),  # fewer tensors than ranks
    ],
)
def test_training_goes_on_after_evaluation(strategy: str, ranks: int, options: str, tmp_path: Path) -> None:
    run = configure(*DATA, f"strategy={strategy}", f"devices={ranks}", *options.split())
    alone = as_reference(run)
    reference = prepared(0, 1, alone)
    drive(reference, alone)
    assert_equal(run_ranks(train_on, ranks, tmp_path, run), drive(reference, alone), tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("strategy=fsdp devices=1", "needs two devices or more"),
        ("strategy=zero1 devices=1", "needs two devices or more"),
        ("strategy=hsdp devices=3", "shard=2 does not divide devices=3"),
        ("strategy=hsdp devices=2", "leaves one copy of the model"),
        (
            "strategy=hsdp devices=4 strategy.shard=1",
            "shards nothing",
        ),
        ("strategy=hsdp devices=4 strategy.shard=0", "strategy.shard=0"),
        ("strategy=fsdp devices=2 precision=fp16", "precision=fp16 with strategy=fsdp"),
        ("strategy=hsdp devices=4 precision=fp16", "precision=fp16 with strategy=hsdp"),
    ],
)
def test_what_can_not_work_is_refused_with_the_fix(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(*MLP, *overrides.split())


@pytest.mark.slow
def test_zero1_refuses_what_would_wait_for_the_gpu() -> None:
    run = configure(*MLP, "strategy=zero1", "devices=2", "precision=fp16")
    with pytest.raises(ConfigError, match=r"makes the host wait"):
        run.strategy.check(run, "cuda")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gathering_in_bf16_sends_half_and_trains_alike(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Autocast rounds parameters for the layers anyway, so the losses are the same. Bytes are those that are sent."""
    options = [*GATHERED, "strategy=fsdp", "devices=2", "precision=bf16"]
    stored, rounded = (
        run_ranks(_trained_and_sent, 2, folder, configure(*options, f"strategy.gather={how}"))
        for how, folder in (("stored", tmp_path), ("bf16", tmp_path_factory.mktemp("rounded")))
    )
    for (losses, sent), (others, less) in zip(stored, rounded, strict=True):
        assert others == pytest.approx(losses, rel=2e-2)
        assert less["parameter_bytes_sent"] * 2 == sent["parameter_bytes_sent"]
        assert less["gradient_bytes_sent"] == sent["gradient_bytes_sent"]
        assert less["counted"] == pytest.approx(less["parameter_bytes_sent"] + less["gradient_bytes_sent"], rel=0.01)
        assert sent["counted"] == pytest.approx(sent["parameter_bytes_sent"] + sent["gradient_bytes_sent"], rel=0.01)


GATHERED = ["data=synthetic", "data.channels=1", "data.image_size=8", "data.train_samples=96", "model=mlp"]


def _trained_and_sent(rank: int, size: int, run: RunConfig) -> tuple[list[float], dict[str, float]]:
    replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    with (counted := CountedBytes()):
        results = [replica.step(batch) for batch in loader_of(replica, run).train(epoch=1)]
    assert not counted.unknown
    sent = counted.sent_bytes + counted.control_bytes
    return [result[0].item() for result in results if result is not None], replica.traffic.take() | {"counted": sent}
