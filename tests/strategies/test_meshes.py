"""Tensor parallelism alone and in meshes: copies of pipelines, and what ranks hold."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelbench.config.components import Anatomy, Linears, Model, Shard
from parallelbench.config.rule import enforce
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.models.modules import Dense, sequence
from parallelbench.strategies.fsdp import shards as fsdp_shards
from parallelbench.strategies.mesh import Mesh
from parallelbench.strategies.tensor import even_shards
from parallelbench.strategies.tensor import shards as tensor_shards
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_parity import assert_equal
from tests.strategies.training import configure, drive, loader_of, one_device, prepared

DATA = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37", "data.image_size=8"]
MLP = [*DATA, "model=mlp", "model.hidden=[24,20,16]"]
DEEP = [*DATA, "model=mlp", "model.hidden=[24,20,16,12,20,24,16]"]
CNN = [*DATA, "model=cnn_small"]


def train_and_send(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """What a rank reads, trains, and sends in one step more."""
    replica = prepared(run, rank, size)
    result = drive(replica, run)
    replica.traffic.take()
    replica.step(next(loader_of(replica, run).train(epoch=2)))
    return {**result, **replica.traffic.take(), "shard": replica.data_shard}


WIDTHS = (64, 24, 20, 16, 12, 20, 24, 16, 10)
"""Of the images of DEEP, and of what its layers give. Of two ranks each has half of all but every second's bias."""


def held_by(layers: range, *, shards: int) -> float:
    """Parameters of so many of DEEP's layers that a rank holds; odd ones are cut by inputs, the bias stays whole."""
    biases = [WIDTHS[i + 1] / (1 if i % 2 else shards) for i in layers]
    return sum(WIDTHS[i] * WIDTHS[i + 1] / shards for i in layers) + sum(biases)


@pytest.mark.cases("dp_pp-4-1")
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices", "shards"), [("dp_pp", 4, 1), ("dp_pp_tp", 8, 2)])
def test_copies_of_pipelines_send_what_the_formulas_say(
    strategy: str, devices: int, shards: int, tmp_path: Path
) -> None:
    """All three dimensions on eight ranks, rank = 4·copy + 2·stage + shard; and without the last."""
    stages = "strategy.stage_map={fc1: 0, fc2: 0, fc3: 0, fc4: 1, fc5: 1, fc6: 1, fc7: 1, fc8: 1}"
    run = configure(*DEEP, f"strategy={strategy}", f"devices={devices}", stages)
    ranks = run_ranks(train_and_send, devices, tmp_path, run)
    assert_equal(ranks, one_device(run), tolerance=1e-9)
    # Layers cut by inputs, numbered from 0, give whole values; layers cut by outputs take whole values but for images.
    summed = [[WIDTHS[2], WIDTHS[2]], [WIDTHS[4], WIDTHS[4], WIDTHS[6], WIDTHS[6], WIDTHS[8]]]
    for rank, result in enumerate(ranks):
        copy, stage, shard = rank // (2 * shards), rank // shards % 2, rank % shards
        assert result["shard"] == Shard(copy, 2, images=stage == 0, labels=stage == 1)
        assert (result["steps"][0] is not None) == (stage == 1 and shard == 0)
        held = held_by(range(3) if stage == 0 else range(3, 8), shards=shards)
        assert result["gradient_bytes_sent"] == 2 * (2 - 1) / 2 * held * 8
        # What leaves fc3 is a shard where layers are cut.
        over_tensor = 2 * (shards - 1) / shards * sum(summed[stage])
        assert result["activation_bytes_sent"] == 12 * 8 * (WIDTHS[3] / shards + over_tensor)
        assert result["parameter_bytes_sent"] == 0


class Apart(Model, frozen=True, kw_only=True):
    """An activation that is a layer of its own, between a pair; a pair in one layer; a plan in no order."""

    layer_names = ("inputs", "act", "hidden", "pair", "out")

    def anatomy(self) -> Anatomy:
        return Anatomy(
            Linears({"hidden": "row", "inputs.linear": "column", "pair.down": "row", "pair.up": "column"}, units=24)
        )

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        pair = nn.Sequential(OrderedDict(up=nn.Linear(12, 24), down=nn.Linear(24, 12)))
        inputs = Dense(in_channels * image_size**2, 24, relu=False)
        return sequence(self.layer_names, [inputs, nn.ReLU(), nn.Linear(24, 12), pair, nn.Linear(12, num_classes)])


def test_shards_go_on_from_a_column_layer_to_the_row_layer_that_sums_them() -> None:
    run = msgspec.structs.replace(configure(*MLP, "strategy=tensor_parallel", "devices=2"), model=Apart(name="apart"))
    values = [torch.empty(2, width, device="meta") for width in (64, 24, 24, 12, 12, 10)]
    local = tensor_shards.local_values(values, build_model(run), run, 2)
    assert [value.shape[1] for value in local] == [64, 12, 12, 12, 12, 10]


def spoil_and_evaluate(rank: int, size: int, run: RunConfig, tensor: int) -> dict[str, torch.Tensor]:
    """What a rank holds whole after an evaluation, before which all but the first of the tensor ranks had drifted."""
    replica: Any = prepared(run, rank, size)
    replica.step(next(loader_of(replica, run).train(epoch=1)))
    module = replica._layers if hasattr(replica, "_layers") else replica._module
    plan, kept = run.model.anatomy().linears.plan, {}
    for name, parameter in module.named_parameters():
        layer, _, kind = name.rpartition(".")
        if layer not in plan or (plan[layer], kind) == ("row", "bias"):
            kept[name] = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    with torch.no_grad():
        for values in kept.values():
            values.add_(1e-3 * (rank % tensor))
    replica.evaluate(loader_of(replica, run).test())
    return {name: values.detach().clone() for name, values in kept.items()}


@pytest.mark.cases("tensor_parallel-2")
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("tensor_parallel", 2), ("dp_tp", 4), ("dp_pp_tp", 4)])
def test_what_tensor_ranks_hold_whole_is_the_same_after_an_evaluation(
    strategy: str, devices: int, tmp_path: Path
) -> None:
    """On CUDA each rank's own convolutions may round in another way."""
    run = configure(*CNN, f"strategy={strategy}", f"devices={devices}", "channels_last=true")
    ranks = run_ranks(spoil_and_evaluate, devices, tmp_path, run, 2)
    assert {name for rank in ranks for name in rank} == {"conv1.conv.weight", "conv1.conv.bias", "fc2.linear.bias"}
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


def most_whole_at_once(rank: int, size: int, run: RunConfig) -> int:
    """The most layers that are whole on the device when one is sharded; fp64 tells that a layer has left the host."""
    model, counts = build_model(run), []

    def counting(shard: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            whole = [p for p in model.parameters() if p.dtype == torch.float64 and not isinstance(p, DTensor)]
            counts.append(len(whole) / 2)
            return shard(*args, **options)

        return counted

    shard_linear = patch.object(tensor_shards, "parallelize_module", counting(tensor_shards.parallelize_module))
    with shard_linear, patch.object(fsdp_shards, "fully_shard", counting(fsdp_shards.fully_shard)):
        run.strategy.prepare(model, run, World(rank=rank, size=size, local_rank=rank))
    return max(counts)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "dp_tp", "dp_pp_tp"])
@pytest.mark.cases("fsdp", "dp_pp_tp")
def test_no_device_ever_holds_more_than_one_whole_layer(strategy: str, tmp_path: Path) -> None:
    run = configure(*MLP, f"strategy={strategy}", "devices=4")
    assert run_ranks(most_whole_at_once, 4, tmp_path, run) == [1] * 4


def test_the_data_dimension_follows() -> None:
    assert Mesh(8, {"stages": 2, "tensor": 2}).data == 2
    assert Mesh(8, {"stages": 2}).data == 4
    assert Mesh(3, {"stages": 4}).data == 1


@pytest.mark.parametrize("of_ones_own", [False, True])
def test_a_model_of_ones_own_without_a_plan_is_told_how_to_give_one(
    of_ones_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = configure(*MLP, "strategy=tensor_parallel", "devices=2")
    monkeypatch.setattr(type(run.model), "anatomy", lambda _: Anatomy())
    if of_ones_own:
        monkeypatch.setattr(type(run.model), "__module__", "mine.models")
    with pytest.raises(ConfigError, match="finds nothing to shard in model=mlp") as refusal:
        enforce(even_shards(run, shards=2, option="devices"))
    advice = "a model of your own names what is cut in the `linears` of its `anatomy` (docs/adding-a-model.md)"
    assert (advice in str(refusal.value)) == of_ones_own
