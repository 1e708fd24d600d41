"""Layers that get their values when a strategy moves them train as those that are built with them: the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.models.initial import fill, unfilled
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model, new_model
from parallelbench.world.world import World
from tests.helpers import torchs_strategies
from tests.ranks import run_ranks
from tests.strategies.training import configure, drive

pytestmark = pytest.mark.slow

TOKENS = ("data=tokens", "data.vocabulary=32", "data.sequence=16", "data.train_samples=32", "data.test_samples=8")
SIZES = ("model.vocabulary=32", "model.sequence=16", "model.width=32", "model.heads=4", "model.layers=2")
GPT = (*TOKENS, "model=gpt_tiny", *SIZES)
LLAMA = (*GPT, "model.positions=rope", "model.mlp=swiglu", "model.kv_heads=4")
EXPERTS = (*TOKENS, "model=gpt_moe_tiny", *SIZES, "model.experts=4")
CNN = ("model=cnn", "data=synthetic", "data.image_size=16", "data.train_samples=96", "data.test_samples=24")
DIVIDED = ("strategy.vocabulary_parallel=true", "strategy.sequence_parallel=true")
KINDS: dict[str, tuple[str, ...]] = {
    "tied": (*GPT, "model.tied=true"),
    "clipped": (*GPT, "precision=fp32", "clip_norm=0.5", "activation_recomputation=full"),
    "llama": LLAMA,
    "experts": EXPERTS,
    "divided": (*GPT, *DIVIDED),
    "divided, tied": (*GPT, *DIVIDED, "model.tied=true"),
    "cnn": (*CNN, "model.widths=[8,16]"),
}


def possible(size: int, kinds: dict[str, tuple[str, ...]]) -> dict[str, RunConfig]:
    """Each strategy × kind of model that so many ranks can train."""
    runs = {}
    for strategy in torchs_strategies():
        micro_batches = {"pipeline": size, "dp_pp": 2, "dp_pp_tp": 2}.get(strategy)
        own = (f"strategy.micro_batches={micro_batches}",) if micro_batches else ()
        own = ("optimizer=lbfgs",) if strategy == "sandblaster_lbfgs" else own
        for kind, words in kinds.items():
            try:
                runs[f"{strategy}, {kind}"] = configure(f"strategy={strategy}", f"devices={size}", *words, *own)
            except ConfigError:
                continue
    return runs


def unlike(rank: int, size: int, runs: dict[str, RunConfig]) -> list[str]:
    """Those whose loss, gradients, next weights or their sums depend on when values are drawn."""
    world = World(rank=rank, size=size, local_rank=rank)
    found = []
    for name, run in runs.items():
        model = new_model(run)
        assert all(each.is_meta for each in model.parameters()) or run.data.kind != "tokens"
        late = drive(new_replica(model, run, world), run, steps=1)
        if not same(late, drive(new_replica(build_model(run), run, world), run, steps=1)):
            found.append(name)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "among"),
    [(2, {"ddp", "fsdp", "tensor_parallel", "pipeline", "model_parallel"}), (4, {"hsdp", "dp_tp", "dp_pp_tp"})],
)
def test_training_does_not_depend_on_when_values_are_drawn(tmp_path: Path, size: int, among: set[str]) -> None:
    """Of four ranks, what two can't train, and the kinds that differ in what is drawn where."""
    less = possible(2, KINDS) if size > 2 else {}
    kinds = {kind: KINDS[kind] for kind in ("tied", "experts", "divided", "cnn")} if size > 2 else KINDS
    runs = {name: run for name, run in possible(size, kinds).items() if name not in less}
    assert {name.partition(",")[0] for name in runs} >= among
    assert run_ranks(unlike, size, tmp_path, runs) == [[]] * size


@pytest.mark.parametrize("kind", ["tied", "llama", "experts"])
def test_layers_get_the_values_of_the_seed_in_any_order(kind: str) -> None:
    run = configure(*KINDS[kind], "seed=3")
    whole = build_model(run)
    expected, names = whole.state_dict(), [name for name, _ in whole.named_parameters()]
    for order in (list, reversed):
        model = unfilled(run)
        for layer in order(list(model)):
            fill(layer)
        values = model.state_dict()
        assert list(values) == list(expected)
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert [name for name, _ in model.named_parameters()] == names


LARGE = ("data=tokens", "data.vocabulary=50257", "data.sequence=2048", "batch_size=8", "optimizer=adamw", "devices=8")


@pytest.mark.parametrize(
    "words",
    [
        ("model=mpt_30b", "strategy=fsdp"),
        ("model=mpt_70b", "strategy=tensor_parallel", "strategy.vocabulary_parallel=true"),
        ("model=mpt_70b", "strategy=pipeline", "model.tied=false"),
        ("model=mpt_30b", "model.layers=4", "strategy=fsdp", "model.tied=false"),
    ],
    ids=["fsdp", "tensor", "pipeline", "four layers"],
)
@pytest.mark.exhaustive
def test_large_models_start_and_step_with_a_share_and_a_layer_in_host_memory(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.large_ranks"]
    done = subprocess.run(command, input=json.dumps([*LARGE, *words]), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["share"] <= 1.1 * found["whole"] / 8
    assert found["peak"] <= 1.3 * found["share"] + found["layer"]
