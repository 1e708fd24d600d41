"""Parity of a language model that is large: a smaller one of its kind is checked, and what is wrong is seen in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parallelbench.config.components import Arrays, Shard
from parallelbench.config.run import RunConfig
from parallelbench.models.gpt import Gpt
from parallelbench.training.checks import excerpt
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.excerpt import excerpt_of, excerpt_warnings, whole_bytes
from parallelbench.training.checks.parity import as_checked
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import configure
from tests.test_parity_gate import IdleStage, SameShard, UnsummedGradients

DATA = ("data=tokens", "data.sequence=192", "data.train_samples=96", "data.test_samples=40", "data.vocabulary=500")
LARGE = ("model=gpt_tiny", "model.sequence=256", "model.vocabulary=512", "model.layers=6")
EXPERTS = ("model=gpt_moe_tiny", "model.sequence=256", "model.vocabulary=512", "model.shared_width=128")


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other models than those of clusters are too large to be checked whole."""
    monkeypatch.setattr(excerpt, "SMALL_BYTES", 0)


@pytest.mark.parametrize(
    ("layout", "layers", "tokens"),
    [
        ("ddp devices=2", 2, 64),
        ("context_parallel devices=8 strategy.exchange=ring", 2, 64),
        ("context_parallel devices=96 strategy.exchange=ring", 2, 192),
        ("pipeline devices=2 strategy.stages_per_rank=2 strategy.schedule=interleaved_1f1b", 4, 64),
        ("model_parallel devices=8", 6, 64),
        ("dp_pp_tp devices=8 strategy.vocabulary_parallel=true strategy.sequence_parallel=true", 2, 64),
        ("tensor_parallel devices=4 model.mlp=swiglu model.mlp_width=252 model.positions=rope", 2, 64),
    ],
)
@pytest.mark.usefixtures("nothing_is_small")
def test_all_that_the_strategy_cuts_can_be_cut_in_what_is_checked(layout: str, layers: int, tokens: int) -> None:
    run = configure(*DATA, *LARGE, f"strategy={layout.partition(' ')[0]}", *layout.split()[1:], "batch_size=96")
    checked = as_checked(run)
    run.strategy.check(checked, "cuda")
    assert isinstance(checked.model, Gpt)
    assert isinstance(run.model, Gpt)
    assert (checked.model.layers, checked.data.shape) == (layers, (tokens,))
    assert (checked.model.heads, checked.model.key_heads) == (run.model.heads, run.model.key_heads)
    assert checked.model.width < run.model.width
    assert checked.data.vocabulary < run.data.vocabulary
    (said,) = excerpt_warnings(run, checked)
    assert f"{tokens} of 192 tokens" in said or tokens == 192
    assert "32 of 64 values per token" in said


@pytest.mark.usefixtures("nothing_is_small")
def test_buckets_stay_as_many() -> None:
    run = configure(*DATA, *LARGE, "strategy=ddp", "devices=2", "strategy.bucket_mib=0.5")
    checked = as_checked(run)
    buckets = [
        size * each.model.parameters / 2**20 / each.strategy.bucket_mib  # type: ignore[attr-defined]
        for size, each in ((4, run), (8, checked))
    ]
    assert buckets[0] == pytest.approx(buckets[1])


def test_what_is_small_is_checked_whole() -> None:
    run = configure(*DATA, *LARGE, "strategy=ddp", "devices=2")
    checked = as_checked(run)
    assert (checked.model, checked.data, checked.strategy) == (run.model, run.data, run.strategy)
    assert excerpt_warnings(run, checked) == []
    arrays = run.data.load(Path("nowhere"))
    assert excerpt_of(arrays, run, checked) is arrays


def test_long_samples_are_large_as_attention_holds_its_scores() -> None:
    long = ("data=tokens", "data.sequence=65536", "model=gpt_tiny", "model.sequence=65536", "batch_size=1")
    run = configure(*long, "data.train_samples=8", "strategy=context_parallel", "devices=2", "precision=fp64")
    assert whole_bytes(run) > 65536**2 * run.model.heads * 8  # type: ignore[attr-defined]
    assert as_checked(run).data.shape == (64,)


@pytest.mark.parametrize("kind", ["int32", "uint8"])
@pytest.mark.usefixtures("nothing_is_small")
def test_samples_are_the_first_tokens_of_the_first_samples(kind: str) -> None:
    run = configure(*DATA, *LARGE, "strategy=ddp", "devices=2", "batch_size=96", "data.train_samples=192")
    checked, made = as_checked(run), run.data.load(Path("nowhere"))
    whole = Arrays(
        train_images=made.train_images.astype(kind),
        train_labels=made.train_labels % (256 if kind == "uint8" else 500),
        test_images=made.test_images.astype(kind),
        test_labels=made.test_labels,
    )
    few = excerpt_of(whole, run, checked)
    assert few.train_images.shape == few.train_labels.shape == (checked.data.train_samples, 64)
    assert few.test_images.shape == few.test_labels.shape == (37, 64)
    assert (few.train_labels == whole.train_labels[: len(few.train_labels), :64] % 256).all()
    assert (few.train_images[:, 1:] == few.train_labels[:, :-1]).all(), "the label of a token is the next one"


def gate(rank: int, size: int, run: RunConfig, checked: RunConfig) -> list[dict[str, Any]]:
    world = World(rank=rank, size=size, local_rank=rank)
    arrays = excerpt_of(run.data.load(Path("nowhere")), run, checked)

    def loader_of(run: RunConfig, shard: Shard) -> Any:
        return build_loader(arrays, run, world, shard)

    rows = check_parity(build_model(checked), checked, world, loader_of)
    assert rows is not None
    return rows


def passed(run: RunConfig, folder: Path) -> bool:
    rows = run_ranks(gate, run.strategy.processes(run, "cpu"), folder, run, as_checked(run))[0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    return all(row["passed"] for row in rows)


RIGHT = {
    "context": (*LARGE, "strategy=context_parallel", "devices=2", "strategy.exchange=ring"),
    "experts": (*EXPERTS, "strategy=expert_parallel", "devices=2"),
    "gathered": (*LARGE, "strategy=fsdp_cp", "devices=2", "strategy.exchange=all_gather"),
    "interleaved": (
        *(*LARGE, "strategy=pipeline", "devices=2", "strategy.micro_batches=4"),
        *("strategy.stages_per_rank=2", "strategy.schedule=interleaved_1f1b"),
    ),
    "mesh": (*LARGE, "strategy=dp_pp_tp", "devices=4", "strategy.vocabulary_parallel=true"),
    "tensors": (
        *(*LARGE, "strategy=tensor_parallel", "devices=2"),
        *("strategy.vocabulary_parallel=true", "strategy.sequence_parallel=true"),
    ),
}


@pytest.mark.slow
@pytest.mark.cases("tensors")
@pytest.mark.parametrize("layout", RIGHT)
@pytest.mark.usefixtures("nothing_is_small")
def test_right_strategies_pass(layout: str, tmp_path: Path) -> None:
    assert passed(configure(*DATA, *RIGHT[layout], "optimizer=adamw", "batch_size=48"), tmp_path)


@pytest.mark.slow
@pytest.mark.cases("UnsummedGradients")
@pytest.mark.parametrize("wrong", [UnsummedGradients, SameShard, IdleStage])
@pytest.mark.usefixtures("nothing_is_small")
def test_a_wrong_strategy_is_caught(wrong: type, tmp_path: Path) -> None:
    base = "ddp" if issubclass(wrong, (UnsummedGradients, SameShard)) else "model_parallel"
    run = configure(*DATA, *LARGE, f"strategy={base}", "devices=2", "batch_size=48")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    assert not passed(msgspec.structs.replace(run, strategy=wrong(**options)), tmp_path)
