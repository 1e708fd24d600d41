"""Language models under strategies: what does not fit."""

from __future__ import annotations

import pytest

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests.strategies.test_parity import OVERRIDES
from tests.strategies.training import configure

pytestmark = pytest.mark.slow

TOKENS = ("data=tokens", "data.sequence=12", "data.vocabulary=20", "data.train_samples=96", "data.test_samples=13")
SMALL = ("model=gpt_tiny", "model.layers=2", "model.width=16", "model.sequence=12", "model.vocabulary=24")
LLAMA = ("model.positions=rope", "model.mlp=swiglu", "model.mlp_width=40", "model.kv_heads=2")
TIED = ("model.tied=true",)
PARTED = ("model_parallel", "pipeline", "dp_pp", "dp_pp_tp")
"""Strategies that would put embedding and head on different devices."""


def small(strategy: str, devices: int, *options: str) -> RunConfig:
    return configure(
        *TOKENS, *SMALL, f"strategy={strategy}", f"devices={devices}", *OVERRIDES.get(strategy, []), *options
    )


def on_some_devices(strategy: str, *options: str) -> RunConfig:
    """On two devices or, where the strategy needs more, on four."""
    try:
        return small(strategy, 2, *options)
    except ConfigError:
        return small(strategy, 4, *options)


@pytest.mark.parametrize("strategy", PARTED)
def test_tied_weights_on_two_devices_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"embed and head of model=gpt_tiny on one .* each.*model\.tied=false"):
        on_some_devices(strategy, *TIED)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=tensor_parallel", "devices=3"], ["3 equal shards", "devices=3"]),
        (["strategy=tensor_parallel", "devices=4", *LLAMA], ["model.kv_heads=2", "4 equal shards"]),
        (["data.sequence=13"], ["13 tokens", "model.sequence=12", "choose model.sequence=13"]),
        (["data.vocabulary=25"], ["model.vocabulary=24", "25", "choose model.vocabulary=25"]),
        (["data=digits"], ["model=gpt_tiny takes tokens", "data=digits holds images"]),
        (["model=mlp"], ["model=mlp takes", "data=tokens holds tokens"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        configure(*(text for text in (*TOKENS, *SMALL) if not clashes(text, overrides)), *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def clashes(text: str, overrides: list[str]) -> bool:
    """Whether an override chooses another model or data set than the one that has this option."""
    group = text.partition("=")[0].partition(".")[0]
    return any(each.partition("=")[0] == group for each in overrides)
