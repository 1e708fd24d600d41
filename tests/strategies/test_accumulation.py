"""Micro-batches under data parallel strategies: what is refused and warned of; bytes and parity are in the tables."""

from __future__ import annotations

import pytest

from parallelbench.config.build import completed, to_mapping, whole_mapping
from parallelbench.config.identity import run_id
from parallelbench.errors import ConfigError
from parallelbench.training.checks.parity import statistics_warnings
from tests.strategies.test_parity import SYNTHETIC
from tests.strategies.training import configure

MLP = [*SYNTHETIC, "model=mlp", "data.image_size=32"]
RESNET = [*SYNTHETIC, "model=resnet_tiny", "data.image_size=32"]


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
    in_two = ("strategy=ddp", "devices=2", "strategy.micro_batches=2")
    (said,) = statistics_warnings(configure(*RESNET, *in_two, "model.norm=batch"))
    assert "normalises each micro-batch by its own statistics" in said
    assert statistics_warnings(configure(*RESNET, *in_two, "model.norm=group")) == []


def test_ids_of_runs_without_it_stay_and_pipelines_always_had_it() -> None:
    plain = configure(*MLP, "strategy=ddp", "devices=2")
    assert "micro_batches" not in to_mapping(plain)["strategy"]
    assert completed(to_mapping(plain)) == whole_mapping(plain)
    assert run_id(plain) != run_id(configure(*MLP, "strategy=ddp", "devices=2", "strategy.micro_batches=2"))
    one = configure(*MLP, "strategy=pipeline", "devices=2", "strategy.schedule=gpipe", "strategy.micro_batches=1")
    assert to_mapping(one)["strategy"]["micro_batches"] == 1
