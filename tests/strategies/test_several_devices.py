"""One process that drives several GPUs: what is on which device, on CUDA tensors without values."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from launch.sweep import one_run
from parallelbench.config.components import Batch
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.strategies.pipeline import ModelParallel
from parallelbench.strategies.pipeline.partition import assign
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.training.checks.before_training import Initial
from parallelbench.training.checks.copies import Copies
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.fake_devices import without_values

GPUS = 2


def on_gpus(*overrides: str) -> RunConfig:
    chosen = ["strategy=model_parallel", f"devices={GPUS}", "batch_size=8", "data=synthetic", "data.channels=1"]
    run = one_run([*chosen, "optimizer.implementation=foreach", *overrides]).run
    check_run(run, "cuda")
    assert run.strategy.processes(run, "cuda") == 1
    assert isinstance(run.strategy, ModelParallel)
    layers = assign(build_model(run), run, run.strategy.device_map)  # counted on tensors of their own kind
    return msgspec.structs.replace(run, strategy=msgspec.structs.replace(run.strategy, device_map=layers))


def batch_of(run: RunConfig) -> Batch:
    samples = torch.zeros(run.global_batch_size, *run.data.shape, device="cuda:0")
    return Batch(samples, torch.zeros(len(samples), dtype=torch.int64, device="cuda:0"), len(samples))


@pytest.mark.cases("cnn-adam")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mlp", "strategy=model_parallel_tutorial"],
        ["model=resnet_tiny", "data.image_size=32", "model.norm=batch"],
        ["model=vit_tiny", "data.image_size=32", "precision=bf16", "clip_norm=1.0"],
        ["model=cnn_small", "data.image_size=28", "clip_norm=1.0"],
    ],
    ids=["mlp", "resnet", "vit", "cnn"],
)
def test_nothing_adds_numbers_of_two_devices(overrides: list[str], optimizer: str) -> None:
    run = on_gpus(*overrides, f"optimizer={optimizer}")
    model = build_model(run)
    with without_values():
        train(model, run)


def train(model: nn.Sequential, run: RunConfig) -> None:
    """Two steps, an evaluation, and every check and record of them that walks over parameters."""
    devices = tuple(torch.device("cuda", index) for index in range(GPUS))
    world = World(device_type="cuda", devices=devices)
    initial = Initial(model, run, world)
    replica = run.strategy.prepare(model, run, world)
    assert isinstance(replica, ModuleReplica)
    module, _ = replica.trained()
    assert {parameter.device for parameter in module.parameters()} == set(devices)
    initial.finding(replica)
    results = [replica.step(batch_of(run)) for _ in range(2)]
    assert results[0] is not None
    assert results[1] is not None
    results[0] += results[1]
    results[0].tolist()
    copies = Copies(replica, run, world)
    copies.epoch_starts(run.epochs)
    copies.epoch_trained(results[0])
    replica.evaluate([batch_of(run)])
    copies.epoch_evaluated(None)
    list(copies.epoch_summed(world.total(copies.sums())))
    for tensors in (replica.full_state_dict(), replica.full_gradients(), replica.full_optimizer_state("exp_avg")):
        assert tensors
        assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
    replica.take_norms()
    replica.load_local_state(replica.local_state())
