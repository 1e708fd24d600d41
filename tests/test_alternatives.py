"""What messages propose by name in place of "another": each of the names is taken, and none is missing."""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec
import pytest

from launch.sweep import one_run
from launch.sweep.compose import group_choices
from parallelbench.config import alternatives
from parallelbench.config.check import check_run
from parallelbench.config.components import Kind
from parallelbench.errors import ConfigError
from parallelbench.models.mlp import Mlp

SMALL = ("batch_size=24", "epochs=1")
OWN_DATA = {"torch_dataset"}
"""Data sets that nobody can choose by name alone."""


def refusal(*overrides: str) -> str:
    try:
        check_run(one_run([*SMALL, *overrides]).run, "cpu")
    except ConfigError as error:
        return str(error)
    return ""


def proposed(message: str, key: str) -> list[str]:
    """The names that a message says to choose for a key."""
    found = re.search(rf"choose .*?\b{key}=(.*?)(?:, or \S+=|; |$)", message)
    return re.split(r", | or ", found[1]) if found else []


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [("gpt_tiny", "digits"), ("cnn", "breast_cancer"), ("vit_tiny", "tokens")])
def test_exactly_the_models_and_data_sets_that_go_together_are_proposed(model: str, data: str) -> None:
    message = refusal(f"model={model}", f"data={data}")
    models = [each for each in group_choices()["model"] if not refusal(f"model={each}", f"data={data}")]
    named = [each for each in group_choices()["data"] if each not in OWN_DATA]
    sets = [each for each in named if not refusal(f"model={model}", f"data={each}")]
    assert models
    assert sets
    assert (proposed(message, "model"), proposed(message, "data")) == (models, sets)


class OnPositionsOfVectors(Mlp, frozen=True, kw_only=True):
    """A user's model, for which nothing that is shipped has samples."""

    takes: ClassVar[tuple[Kind, ...]] = ("vectors",)
    predicts_positions: ClassVar[bool] = True


def test_where_nothing_shipped_goes_together_nothing_is_proposed() -> None:
    run = one_run(["model=mlp", "data=breast_cancer"]).run
    own = msgspec.structs.replace(run, model=OnPositionsOfVectors(name="mine", hidden=(8,)))
    assert alternatives.that_go_together(own) == "model=logistic_regression or mlp", "for its data; no data for it"
    with pytest.raises(ConfigError, match=r"predicts a label at each position, .*: choose model=logistic_reg"):
        check_run(own, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["strategy=model_parallel", "devices=2", "model=logistic_regression"], "model"),
        (["strategy=model_parallel", "devices=4", "model=cnn_small"], "model"),
        (["strategy=pipeline", "devices=4", "model=cnn_small"], "model"),
        (["strategy=dp_pp_tp", "devices=8", "strategy.stages=4", "model=cnn_small"], "model"),
        (["strategy=pipeline", "devices=2", "strategy.stages_per_rank=2", "model=mlp"], "strategy.schedule"),
        (["strategy=tf_mirrored", "devices=2", "model=mlp", "clip_norm=1.0", "optimizer=sgd"], "strategy"),
        (["strategy=ddp", "devices=2", "model=mlp", "optimizer=lbfgs"], "optimizer"),
        (["strategy=hsdp", "devices=9", "batch_size=27"], "strategy.shard"),
        (["activation_recomputation=full", "model=logistic_regression"], "model"),
    ],
)
def test_all_that_is_proposed_by_name_is_taken(overrides: list[str], key: str) -> None:
    names = proposed(refusal(*overrides), key)
    assert names, refusal(*overrides)
    kept = [text for text in overrides if not text.startswith(f"{key}=")]
    assert {name: refusal(*kept, f"{key}={name}") for name in names} == dict.fromkeys(names, "")


def test_models_that_are_deep_enough_may_be_missing() -> None:
    message = refusal("strategy=model_parallel", "devices=8", "data=breast_cancer", "model=mlp")
    assert message.endswith("choose devices=4 or fewer")


def test_no_number_of_micro_batches_suits_a_small_batch() -> None:
    pipeline = ["strategy=dp_pp", "devices=4", "strategy.stages=2", "model=mlp"]
    message = refusal(*pipeline, "batch_size=2")
    assert message.endswith(
        "no number suits the batch of 1 samples: choose batch_size=4 strategy.micro_batches=2, or fewer devices"
    )
    assert not refusal(*pipeline, "batch_size=4", "strategy.micro_batches=2")
