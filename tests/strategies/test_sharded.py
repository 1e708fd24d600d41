"""fsdp, hsdp and zero1: what is sharded, what is sent, and that training goes on after an evaluation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.config.run import RunConfig
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.strategies.state import local
from parallelbench.training.checks.comparability import as_reference
from parallelbench.training.torch_session import build_model
from tests.ranks import run_ranks
from tests.strategies.test_context_parallel import SMALL, TOKENS
from tests.strategies.test_parity import assert_equal
from tests.strategies.training import configure, drive, loader_of, prepared

DATA = ["data=synthetic", "data.channels=1", "data.image_size=32", "data.train_samples=96", "data.test_samples=25"]
MLP = [*DATA, "model=mlp", "optimizer=adam"]


def held(rank: int, size: int, run: RunConfig) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that a rank holds after a step."""
    replica: Any = prepared(run, rank, size)
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
@pytest.mark.parametrize(
    ("strategy", "ranks", "optimizer"),
    [
        *[("ddp", 2, "sgd"), ("zero1", 2, "adam"), ("zero1", 2, "adagrad"), ("fsdp", 2, "adam"), ("fsdp", 2, "sgd")],
        *[("hsdp", 4, "adagrad"), ("fsdp_cp", 4, "adam")],
    ],
)
@pytest.mark.cases("zero1-2-adam", "fsdp-2-adam")
def test_a_rank_holds_what_the_formula_says(strategy: str, ranks: int, optimizer: str, tmp_path: Path) -> None:
    work = [*DATA, "model=mlp", "model.hidden=[1024,1024]"] if strategy != "fsdp_cp" else [*TOKENS, *SMALL]
    run = configure(*work, f"strategy={strategy}", f"devices={ranks}", f"optimizer={optimizer}")
    ranks_hold = [sum(parts.values()) for parts in run_ranks(held, ranks, tmp_path, run)]
    formula = run.strategy.state_bytes(run, sum(parameter.numel() for parameter in build_model(run).parameters()))
    assert formula is not None
    if strategy == "zero1":  # whole tensors have owners: what all hold together is that of the formula
        ranks_hold = [sum(ranks_hold) // ranks] * ranks
    assert ranks_hold == pytest.approx([formula] * ranks, rel=0.02 if strategy == "fsdp_cp" else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "model_parallel", "tensor_parallel", "parameter_server"])
def test_where_devices_hold_different_things_there_is_no_formula(strategy: str) -> None:
    run = configure(*MLP, f"strategy={strategy}", "devices=2")
    assert run.strategy.state_bytes(run, 1000) is None


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    run = configure(*MLP, "strategy=ddp", "devices=2", "optimizer=adam")
    assert run.strategy.state_bytes(run, 100, frozen=900) == 8 * (4 * 100 + 900)  # in fp64
    sharded = configure(*MLP, "strategy=fsdp", "devices=2", "optimizer=adam")
    assert sharded.strategy.state_bytes(sharded, 100, frozen=900) == 8 * (4 * 100 + 900) // 2


def test_an_optimizer_whose_memory_grows_has_no_formula() -> None:
    run = configure(*DATA, "model=mlp", "optimizer=lbfgs", "batch_size=96")
    assert run.strategy.state_bytes(run, 1000) is None


def train_on(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Two evaluations, each after some steps; then the replica is given back."""
    replica = prepared(run, rank, size)
    drive(replica, run)
    result = drive(replica, run)
    replica.close()
    dist.barrier()
    return result


@pytest.mark.cases("zero1-2-*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        ("fsdp", 2, "model=cnn_small strategy.reshard_after_forward=false optimizer=adagrad channels_last=true"),
        ("hsdp", 4, "model=vit_tiny strategy.reshard_after_forward=false optimizer=adamw"),
        ("zero1", 2, "model=cnn_small optimizer.momentum=0.9 channels_last=true"),
        ("zero1", 4, "model=logistic_regression optimizer=adagrad"),  # fewer tensors than ranks
    ],
)
def test_training_goes_on_after_evaluation(strategy: str, ranks: int, options: str, tmp_path: Path) -> None:
    run = configure(*DATA, f"strategy={strategy}", f"devices={ranks}", *options.split())
    alone = as_reference(run)
    reference = prepared(alone)
    drive(reference, alone)
    assert_equal(run_ranks(train_on, ranks, tmp_path, run), drive(reference, alone), tolerance=1e-9)


@pytest.mark.exhaustive
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


OF_IMAGES = ("data=synthetic", "data.image_size=16", "data.train_samples=96", "data.test_samples=13")
KEPT = {
    "gpt": (*TOKENS, *SMALL),
    "gpt_tied": (*TOKENS, *SMALL, "model.tied=true"),
    "gpt_rope": (*TOKENS, *SMALL, "model.positions=rope", "model.mlp=swiglu"),
    "gpt_recomputed": (*TOKENS, *SMALL, "activation_recomputation=full"),
    "vit": (*OF_IMAGES, "model=vit_tiny"),
    "resnet_batch": (*OF_IMAGES, "model=resnet_tiny", "model.norm=batch"),
    "resnet_sync": (*OF_IMAGES, "model=resnet_tiny", "model.norm=sync"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", KEPT)
@pytest.mark.cases("gpt", "resnet_batch")
def test_activations_have_the_types_that_they_have_under_ddp(model: str, tmp_path: Path) -> None:
    """Gathering in bf16 rounds parameters: neither what is between layers nor what backward keeps is another type."""
    options = [*KEPT[model], "devices=2", "precision=bf16"]
    ddp = configure(*options, "strategy=ddp")
    sharded = [configure(*options, "strategy=fsdp", f"strategy.gather={how}") for how in ("stored", "bf16")]
    expected, *found = run_ranks(_types_of_activations, 2, tmp_path, [ddp, *sharded])[0]
    assert found[0] == expected, "of parameters as they are stored"
    assert found[1] == expected, "of parameters in bf16"
    between, kept = expected
    residual = {torch.float32} if model.startswith(("gpt", "vit")) else {torch.bfloat16}
    assert {*list(between.values())[:-1]} == residual, "by autocast's rules"
    assert torch.bfloat16 in {dtype for (_, dtype) in kept}


Types = tuple[dict[str, torch.dtype], Counter[tuple[tuple[int, ...], torch.dtype]]]


def _types_of_activations(rank: int, size: int, runs: list[RunConfig]) -> list[Types]:
    """Of each run's second step, the type of what each layer gives, and shapes and types of what backward keeps but for
    parameters, which FSDP keeps itself.
    """
    found = []
    for run in runs:
        replica: Any = prepared(run, rank, size)
        module, _ = replica.trained()
        between: dict[str, torch.dtype] = {}
        kept: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
        shapes = {tuple(each.shape) for each in module.parameters()}
        shapes |= {shape[::-1] for shape in shapes}

        def note(tensor: torch.Tensor, shapes: Any = shapes, kept: Any = kept) -> torch.Tensor:
            if tensor.is_floating_point() and tensor.dim() > 1 and tuple(tensor.shape) not in shapes:
                kept[tuple(tensor.shape), tensor.dtype] += 1
            return tensor

        for name, layer in module.named_children():
            layer.register_forward_hook(lambda _, __, y, name=name, to=between: to.update({name: y.dtype}))
        batches = loader_of(replica, run).train(epoch=1)
        replica.step(next(batches))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            replica.step(next(batches))
        found.append((between, kept))
    return found


GATHERED = ["data=synthetic", "data.channels=1", "data.image_size=8", "data.train_samples=96", "model=mlp"]


def _trained_and_sent(rank: int, size: int, run: RunConfig) -> tuple[list[float], dict[str, float]]:
    replica = prepared(run, rank, size)
    with (counted := CountedBytes()):
        results = [replica.step(batch) for batch in loader_of(replica, run).train(epoch=1)]
    assert not counted.unknown
    sent = counted.sent_bytes + counted.control_bytes
    return [result[0].item() for result in results if result is not None], replica.traffic.take() | {"counted": sent}
