"""Language models under strategies: bytes of tied weights, and what does not fit; parity: `test_parity_table.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.training.torch_session import build_model
from tests.ranks import run_ranks
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


@pytest.mark.cases("False-True")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_fsdp_gathers_tied_weights_once(reshard: bool, tied: bool, tmp_path: Path) -> None:
    asked = f"strategy.reshard_after_forward={str(reshard).lower()}"
    run = small("fsdp", 2, asked, f"model.tied={str(tied).lower()}")
    sent = [rank["sent"] for rank in run_ranks(sent_in_a_step, 2, tmp_path, run)]
    whole = sum(parameter.numel() * 8 for parameter in build_model(run).parameters())
    ends = sum(parameter.numel() * 8 for parameter in build_model(run)[0].parameters())
    ends += sum(parameter.numel() * 8 for parameter in build_model(run)[-1].norm.parameters())
    gathers = 2 * whole - (ends if tied else 0) if reshard else whole
    # Of every message each of two ranks sends a half; nothing here is padded.
    assert sent == [{"parameter": gathers / 2, "gradient": whole / 2}] * 2


def sent_in_a_step(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    from parallelbench.world.world import World
    from tests.strategies.training import loader_of

    replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    replica.step(next(iter(loader_of(replica, run).train(1))))
    return {"sent": {kind: getattr(replica.traffic, kind) for kind in ("parameter", "gradient")}}


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
