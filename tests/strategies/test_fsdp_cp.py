"""FSDP × context parallelism: what does not fit."""

from __future__ import annotations

import pytest

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests.strategies.test_context_parallel import SMALL, TOKENS
from tests.strategies.training import configure


def meshed(exchange: str, devices: int, *options: str) -> RunConfig:
    asked = ("strategy=fsdp_cp", f"strategy.exchange={exchange}", f"devices={devices}")
    return configure(*TOKENS, *SMALL, *asked, *options)


@pytest.mark.parametrize(
    ("exchange", "devices", "overrides", "words"),
    [
        ("ring", 1, [], ["strategy.context=2", "multiple of 2 devices", "devices=1"]),
        ("ring", 3, [], ["strategy.context=2", "multiple of 2 devices", "devices=3"]),
        ("ring", 4, ["strategy.context=1"], ["strategy.context=1 leaves"]),
        ("ring", 6, ["strategy.context=3"], ["6 equal parts", "strategy.context=3", "data.sequence=18 or 12"]),
        ("all_to_all", 6, ["strategy.context=3"], ["3 equal parts"]),
        ("all_to_all", 8, ["strategy.context=8"], ["model.heads=4"]),
        ("ring", 4, ["strategy.micro_batches=5"], ["batch of 12 samples", "strategy.micro_batches=4 or 6"]),
        ("ring", 4, ["batch_size=23"], ["batch_size=23", "2 equal parts", "choose batch_size=22 or 24"]),
        ("ring", 2, ["precision=fp16"], ["precision=fp16"]),
        ("ring", 2, ["strategy.gather=bf16"], ["strategy.gather=bf16 with precision=fp64"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(
    exchange: str, devices: int, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        meshed(exchange, devices, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_models_of_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no such attention"):
        configure("model=mlp", "data=synthetic", "strategy=fsdp_cp", "devices=2")
