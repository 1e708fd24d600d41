"""Gradients of micro-batches add up to those of the batch, under data parallel strategies, for one average per step."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelbench.config.build import completed, to_mapping, whole_mapping
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.training.checks.parity import statistics_warnings
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_parity import SYNTHETIC
from tests.strategies.training import configure, loader_of

MLP = [*SYNTHETIC, "model=mlp", "data.image_size=32"]
RESNET = [*SYNTHETIC, "model=resnet_tiny", "data.image_size=32"]
DEVICES = {"ddp": 2, "ring_ddp": 2, "zero1": 2, "fsdp": 2, "hsdp": 4}


def accumulating(strategy: str, micro_batches: int, *options: str) -> RunConfig:
    asked = [f"strategy={strategy}", f"devices={DEVICES[strategy]}", f"strategy.micro_batches={micro_batches}"]
    return configure(*(options if any(each.startswith("model=") for each in options) else (*MLP, *options)), *asked)


def bytes_of_a_step(rank: int, size: int, run: RunConfig) -> dict[str, float]:
    replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    batches = loader_of(replica, run).train(epoch=1)
    replica.step(next(batches))
    replica.traffic.take()
    with CountedBytes() as counted:
        replica.step(next(batches))
    return {**replica.traffic.take(), "counted": counted.sent_bytes + counted.control_bytes}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DEVICES)
@pytest.mark.cases("ddp", "fsdp")
def test_gradients_are_sent_once_and_gathered_parameters_for_each(strategy: str, tmp_path: Path) -> None:
    devices = DEVICES[strategy]
    one, three = (run_ranks(bytes_of_a_step, devices, tmp_path, accumulating(strategy, count)) for count in (1, 3))
    gathers = 3 if strategy in ("fsdp", "hsdp") else 1
    for before, after in zip(one, three, strict=True):
        assert after["gradient_bytes_sent"] == before["gradient_bytes_sent"] > 0
        assert after["parameter_bytes_sent"] == gathers * before["parameter_bytes_sent"]
    for ranks in (one, three):
        reported = sum(sum(value for name, value in rank.items() if name != "counted") for rank in ranks)
        assert reported == pytest.approx(sum(rank["counted"] for rank in ranks), rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["strategy.micro_batches=5"],
            ["micro_batches=5 doesn't divide", "batch of 12 samples", "micro_batches=4 or 6"],
        ),
        (["strategy.micro_batches=24"], ["strategy.micro_batches=12 or 6"]),
        (["strategy.micro_batches=2", "compile=true"], ["compile=true is refused", "compile=false"]),
        (["strategy.micro_batches=2", "strategy.static_graph=true"], ["static_graph=true", "static_graph=false"]),
    ],
)
def test_what_can_not_be_cut_is_refused_with_the_nearest_choice(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        configure(*MLP, "strategy=ddp", "devices=2", *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_statistics_of_micro_batches_are_warned_of_as_under_pipelines() -> None:
    (said,) = statistics_warnings(accumulating("ddp", 2, *RESNET, "model.norm=batch"))
    assert "normalises each micro-batch by its own statistics" in said
    assert statistics_warnings(accumulating("ddp", 2, *RESNET, "model.norm=group")) == []


def test_ids_of_runs_without_it_stay_and_pipelines_always_had_it() -> None:
    plain = configure(*MLP, "strategy=ddp", "devices=2")
    assert "micro_batches" not in to_mapping(plain)["strategy"]
    assert completed(to_mapping(plain)) == whole_mapping(plain)
    assert run_id(plain) != run_id(accumulating("ddp", 2))
    one = configure(*MLP, "strategy=pipeline", "devices=2", "strategy.schedule=gpipe", "strategy.micro_batches=1")
    assert to_mapping(one)["strategy"]["micro_batches"] == 1
