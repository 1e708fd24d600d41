"""Parity of a language model that is large: a smaller one of its kind is checked, and what is wrong is seen in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from analysis import load
from parallelbench.config.components import Arrays, Shard
from parallelbench.config.run import RunConfig
from parallelbench.measure import environment
from parallelbench.models.gpt import Gpt
from parallelbench.strategies.data_parallel import Ddp
from parallelbench.training import torch_session
from parallelbench.training.checks import excerpt
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.excerpt import Excerpt, whole_bytes
from parallelbench.training.checks.parity import as_checked
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import configure
from tests.test_parity_gate import Wrong, WrongStages, idle_stage, same_shard, unsummed_gradients, with_fault
from tests.test_phases import published_here

DATA = ("data=tokens", "data.sequence=192", "data.train_samples=96", "data.test_samples=40", "data.vocabulary=500")
LARGE = ("model=gpt_tiny", "model.sequence=256", "model.vocabulary=512", "model.layers=6")
EXPERTS = ("model=gpt_moe_tiny", "model.sequence=256", "model.vocabulary=512", "model.shared_width=128")


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other models than those of clusters are too large to be checked whole."""
    monkeypatch.setattr(excerpt, "SMALL_BYTES", 2**29)


def part_of(run: RunConfig) -> Excerpt:
    """What is checked of it."""
    return excerpt.excerpt(as_checked(run))


@pytest.mark.parametrize(
    ("layout", "layers", "tokens"),
    [
        ("ddp devices=2", 2, 64),
        ("context_parallel devices=8 strategy.exchange=ring", 2, 64),
        ("context_parallel devices=96 strategy.exchange=ring", 2, 192),
        ("pipeline devices=2", 4, 64),
        ("pipeline devices=2 strategy.stages_per_rank=2 strategy.schedule=interleaved_1f1b", 6, 64),
        ("model_parallel devices=8", 6, 64),
        ("dp_pp_tp devices=8 strategy.vocabulary_parallel=true strategy.sequence_parallel=true", 4, 64),
        ("ddp devices=96", 2, 64),
        ("tensor_parallel devices=4 model.mlp=swiglu model.mlp_width=252 model.positions=rope", 2, 64),
    ],
)
@pytest.mark.usefixtures("nothing_is_small")
def test_all_that_the_strategy_cuts_can_be_cut_in_what_is_checked(layout: str, layers: int, tokens: int) -> None:
    run = configure(*DATA, *LARGE, f"strategy={layout.partition(' ')[0]}", *layout.split()[1:], "batch_size=96")
    part = part_of(run)
    checked = part.run
    run.strategy.check(checked, "cuda")
    assert isinstance(checked.model, Gpt)
    assert isinstance(run.model, Gpt)
    assert (checked.model.layers, checked.data.shape) == (layers, (tokens,))
    assert (checked.model.heads, checked.model.key_heads) == (run.model.heads, run.model.key_heads)
    assert checked.model.width < run.model.width
    assert checked.data.vocabulary < run.data.vocabulary
    (said,) = part.warnings()
    assert part.smaller is not None
    assert part.smaller in said
    assert f"{tokens} of 192 tokens" in said or tokens == 192
    assert "32 of 64 values per token" in said


@pytest.mark.parametrize("devices", [2, 3, 7, 8])
@pytest.mark.usefixtures("nothing_is_small")
def test_uneven_parts_stay_uneven_and_even_ones_even(devices: int) -> None:
    sizes = ("data.vocabulary=509", "model.vocabulary=509", "model.mlp_width=250", "batch_size=168")
    run = configure(*DATA, *LARGE, *sizes, "data.train_samples=168", "strategy=fsdp", f"devices={devices}")
    whole, small = run.model, part_of(run).run.model
    assert isinstance(whole, Gpt)
    assert isinstance(small, Gpt)
    for many, few in ((whole.vocabulary, small.vocabulary), (whole.hidden_units, small.hidden_units)):
        assert few < many
        assert (many - few) % devices == 0


@pytest.mark.usefixtures("nothing_is_small")
def test_stages_of_as_many_blocks_are_as_uneven() -> None:
    run = configure(*DATA, *LARGE[:-1], "model.layers=11", "strategy=pipeline", "devices=2", "batch_size=96")
    assert part_of(run).run.model.layers == 5  # type: ignore[attr-defined]


def test_stages_have_one_block_where_two_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    run = configure(*DATA, *LARGE[:-1], "model.layers=8", "strategy=pipeline", "devices=4", "batch_size=96")
    monkeypatch.setattr(excerpt, "SMALL_BYTES", 2**20)
    assert part_of(run).run.model.layers == 4  # type: ignore[attr-defined]


class OfTheWhole(Ddp, frozen=True, kw_only=True):
    """A user's own, whose option names a layer that a smaller model lacks."""

    layer: str = "block6"

    def prepare(self, model: torch.nn.Sequential, run: RunConfig, world: World) -> Any:
        assert hasattr(model, self.layer)
        return super().prepare(model, run, world)


@pytest.mark.usefixtures("nothing_is_small")
def test_a_strategy_of_ones_own_gets_the_whole_model() -> None:
    shipped = configure(*DATA, *LARGE, "strategy=ddp", "devices=2", "batch_size=96")
    options = {field: getattr(shipped.strategy, field) for field in shipped.strategy.__struct_fields__}
    assert part_of(shipped).smaller is not None
    own = as_checked(msgspec.structs.replace(shipped, strategy=OfTheWhole(**options)))
    assert excerpt.excerpt(own) == Excerpt(own, None)


def buckets(rank: int, size: int, run: RunConfig, kind: str) -> int:
    """How many torch makes of the gradients: counted once it has ordered them anew, after the first step."""
    world = World(rank=rank, size=size, local_rank=rank)
    ddp = run.strategy.in_ddp(build_model(run).to(getattr(torch, kind)), run, world)  # type: ignore[attr-defined]
    for _ in range(3):
        ddp(torch.zeros(1, *run.data.shape, dtype=torch.int64)).sum().backward()
    return len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_small")
def test_gradients_fill_several_buckets_where_the_whole_models_do(tmp_path: Path) -> None:
    run = configure(*DATA, *LARGE, "strategy=ddp", "devices=2", "strategy.bucket_mib=0.5", "batch_size=96")
    pair = ((run, "float32"), (part_of(run).run, "float64"))
    whole, small = (run_ranks(buckets, 1, tmp_path, each, kind)[0] for each, kind in pair)
    assert whole > 1
    assert small > 1


def test_what_is_small_is_checked_whole() -> None:
    run = configure(*DATA, *LARGE, "strategy=ddp", "devices=2")
    part = part_of(run)
    assert part == Excerpt(as_checked(run), None)
    assert part.warnings() == []
    arrays = run.data.load(Path("nowhere"))
    assert part.arrays(arrays) is arrays


def test_long_samples_are_large_as_attention_holds_its_scores() -> None:
    long = ("data=tokens", "data.sequence=65536", "model=gpt_tiny", "model.sequence=65536", "batch_size=1")
    run = configure(*long, "data.train_samples=8", "strategy=context_parallel", "devices=2", "precision=fp64")
    assert whole_bytes(run) > 65536**2 * run.model.heads * 8  # type: ignore[attr-defined]
    assert part_of(run).run.data.shape == (64,)


@pytest.mark.parametrize("kind", ["int32", "uint8"])
@pytest.mark.usefixtures("nothing_is_small")
def test_samples_are_the_first_tokens_of_the_first_samples(kind: str) -> None:
    run = configure(*DATA, *LARGE, "strategy=ddp", "devices=2", "batch_size=96", "data.train_samples=192")
    part, made = part_of(run), run.data.load(Path("nowhere"))
    whole = Arrays(
        train_images=made.train_images.astype(kind),
        train_labels=made.train_labels % (256 if kind == "uint8" else 500),
        test_images=made.test_images.astype(kind),
        test_labels=made.test_labels,
    )
    few = part.arrays(whole)
    assert few.train_images.shape == few.train_labels.shape == (part.run.data.train_samples, 64)
    assert few.test_images.shape == few.test_labels.shape == (37, 64)
    assert (few.train_labels == whole.train_labels[: len(few.train_labels), :64] % 256).all()
    assert (few.train_images[:, 1:] == few.train_labels[:, :-1]).all(), "the label of a token is the next one"


@pytest.mark.slow
def test_a_training_set_that_is_one_batch_is_checked_by_its_first_samples(tmp_path: Path) -> None:
    """As L-BFGS takes it: all of MNIST would take a device several times its training's memory."""
    data = ("data=synthetic", "data.channels=1", "data.image_size=8", "data.train_samples=960", "batch_size=960")
    small = ("model=mlp", "model.hidden=[24]", "strategy=sandblaster_lbfgs", "optimizer=lbfgs", "devices=2")
    run = configure(*data, "data.test_samples=74", *small)
    part, whole = part_of(run), run.data.load(Path("nowhere"))
    assert (part.smaller, part.warnings()) == (None, [])
    assert (part.run.global_batch_size, part.run.steps_per_epoch, part.run.data.train_samples) == (32, 1, 32)
    few = part.arrays(whole)
    assert (few.train_images == whole.train_images[:32]).all()
    assert (few.test_labels == whole.test_labels[:37]).all()
    rows = run_ranks(gate, 2, tmp_path, run, part)[0]
    assert rows
    assert all(row["passed"] for row in rows)


def gate(rank: int, size: int, run: RunConfig, part: Excerpt) -> list[dict[str, Any]]:
    world, checked = World(rank=rank, size=size, local_rank=rank), part.run
    arrays = part.arrays(run.data.load(Path("nowhere")))

    def loader_of(run: RunConfig, shard: Shard) -> Any:
        return build_loader(arrays, run, world, shard)

    rows = check_parity(build_model(checked), checked, world, loader_of)
    assert rows is not None
    return rows


def passed(run: RunConfig, folder: Path, part: Excerpt) -> bool:
    assert part.smaller is not None
    rows = run_ranks(gate, run.strategy.processes(run, "cpu"), folder, run, part)[0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    return all(row["passed"] for row in rows)


RIGHT = {
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
    run = configure(*DATA, *RIGHT[layout], "optimizer=adamw", "batch_size=48")
    assert passed(run, tmp_path, part_of(run))


@pytest.mark.slow
@pytest.mark.cases("unsummed_gradients-Wrong")
@pytest.mark.parametrize(
    ("fault", "kind"), [(unsummed_gradients, Wrong), (same_shard, Wrong), (idle_stage, WrongStages)]
)
@pytest.mark.usefixtures("nothing_is_small")
def test_a_wrong_strategy_is_caught(fault: Any, kind: type, tmp_path: Path) -> None:
    base = "model_parallel" if kind is WrongStages else "ddp"
    part = part_of(run := configure(*DATA, *LARGE, f"strategy={base}", "devices=2", "batch_size=48"))
    # A strategy of one's own is checked with the whole.
    assert not passed(run, tmp_path, part._replace(run=with_fault(part.run, fault, kind)))


@pytest.mark.slow
def test_the_run_says_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session in this process, on one device, which is compared with itself."""
    monkeypatch.setattr(excerpt, "SMALL_BYTES", 2**20)
    monkeypatch.setattr(torch_session, "checks_parity", lambda _: True)
    monkeypatch.setattr(environment, "capture", lambda *_, **__: {})
    few = ("data.sequence=64", "data.train_samples=16", "data.test_samples=8", "batch_size=8", "epochs=1")
    run = configure(*DATA, *LARGE, *few, "measure.telemetry_hz=0", "measure.probe=false", f"results={tmp_path}")
    published_here(run)
    (row,) = load(tmp_path).run.to_dicts()
    assert row["parity_model"]
    assert row["parity_model"] == part_of(run).smaller
    assert row["parity_passed"]
