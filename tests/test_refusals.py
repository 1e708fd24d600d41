"""What a refusal proposes works: what it says to choose is accepted by all checks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from launch.sweep import one_run
from launch.sweep.compose import group_choices
from parallelbench.config import check
from parallelbench.config.check import UnfitError, check_run
from parallelbench.config.rules import Refusal
from parallelbench.errors import MOST_REFUSALS, ConfigError, Refusals
from tests.docs import OPTIMIZERS, model_and_devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.config.run import RunConfig

IMAGES = ("data=synthetic", "data.channels=1", "data.train_samples=96", "batch_size=96", "epochs=2", "model=mlp")
TOKENS = ("data=tokens", "data.train_samples=96", "batch_size=96", "epochs=2", "model=gpt_tiny")


def refused(overrides: list[str], device_type: str = "cpu") -> UnfitError | None:
    try:
        check_run(one_run(overrides).run, device_type)
    except UnfitError as error:
        return error
    return None


def chosen(overrides: list[str], fix: str) -> list[str]:
    """The overrides with what a fix says in place of what they say of its keys: all others stay, as they are typed."""
    keys = {text.partition("=")[0] for text in fix.split()}
    return [*(text for text in overrides if text.partition("=")[0] not in keys), *fix.split()]


def rejected(error: UnfitError, overrides: list[str], device_type: str) -> list[str]:
    """What it proposes, and is refused in turn."""
    each = [fix for fixes in error.fixes() for fix in fixes]
    proposals = each if len(error.refusals) == 1 else [" ".join(each)]
    wrong = []
    for proposal in filter(None, proposals):
        devices = [text.partition("=")[2] for text in proposal.split() if text.startswith("device=")]
        again = refused(chosen(overrides, proposal), *devices or [device_type])
        wrong += [f"{error.reason!r}, but {proposal} gives {again.reason!r}"] if again else []
    return wrong


@pytest.mark.parametrize(
    ("overrides", "fixes"),
    [
        ("strategy=ddp devices=2 batch_size=95", ["batch_size=94", "batch_size=96"]),
        ("strategy=single batch_size=2000", ["batch_size=96"]),
        ("strategy=ddp devices=1", ["devices=2", "strategy=single devices=1"]),
        ("strategy=single devices=2", ["devices=1", "strategy=ddp"]),
        ("strategy=ddp devices=2 strategy.micro_batches=7", ["strategy.micro_batches=6", "strategy.micro_batches=8"]),
        ("strategy=hsdp devices=3", ["devices=4", "devices=6"]),
        ("strategy=hsdp devices=12 strategy.shard=5", ["strategy.shard=4", "strategy.shard=6"]),
        ("strategy=hsdp devices=2", ["devices=4", "devices=6"]),
        ("strategy=fsdp devices=2 precision=fp16", ["precision=bf16", "precision=fp64"]),
        ("strategy=dp_pp_tp devices=4 precision=fp16", ["precision=bf16", "precision=fp64"]),
        ("strategy=fsdp devices=2 strategy.gather=bf16", ["precision=bf16", "strategy.gather=stored"]),
        ("strategy=tensor_parallel devices=3", ["devices=2", "devices=4"]),
        ("strategy=dp_tp devices=6 strategy.tensor=4", ["devices=8", "devices=12"]),
        ("strategy=dp_tp devices=4 strategy.tensor=1", ["strategy.tensor=2"]),
        ("strategy=model_parallel devices=8", ["devices=4", "devices=3"]),
        ("strategy=pipeline devices=2 strategy.micro_batches=1", ["strategy.micro_batches=2"]),
        ("strategy=pipeline devices=2 strategy.schedule=zbv", ["strategy.stages_per_rank=2"]),
        ("strategy=parameter_server devices=2 strategy.servers=2", ["strategy.servers=1", "devices=3"]),
        ("strategy=parameter_server devices=8", ["batch_size=91", "batch_size=84"]),
        ("strategy=downpour devices=2 optimizer=adam", ["optimizer=adagrad", "optimizer=sgd optimizer.momentum=0.0"]),
        ("strategy=tf_mirrored devices=2 clip_norm=1.0", ["clip_norm=null", "strategy=ddp"]),
        ("strategy=ddp devices=2 optimizer=lbfgs", ["optimizer=adagrad", "strategy=sandblaster_lbfgs"]),
        ("strategy=single devices=1 optimizer=lbfgs batch_size=24", ["batch_size=96"]),
        ("launcher=inline strategy=ddp devices=2", ["launcher=local"]),
        ("data=tokens strategy=context_parallel devices=3 model=gpt_tiny", ["data.sequence=60", "data.sequence=54"]),
        ("data=tokens model=gpt_tiny strategy=expert_parallel devices=2", ["model=gpt_moe", "strategy=ddp"]),
        ("data=tokens model=gpt_moe_tiny strategy=expert_parallel devices=6", ["devices=4", "devices=8"]),
        ("data=tokens model=gpt_moe_tiny strategy=expert_parallel devices=4 strategy.expert_ranks=3",
         ["strategy.expert_ranks=null", "strategy.expert_ranks=2"]),
        ("data=tokens model=gpt_moe_tiny strategy=pipeline devices=2", ["model.balance=0", "strategy=ddp"]),
        ("data=tokens model=gpt_tiny strategy=pipeline devices=2 model.tied=true", ["model.tied=false"]),
    ],
)  # fmt: skip
def test_the_nearest_values_that_work_are_named(overrides: str, fixes: list[str]) -> None:
    given = overrides.split()
    keys = {text.partition("=")[0] for text in given}
    base = TOKENS if "data=tokens" in given else IMAGES
    whole = [*(text for text in base if text.partition("=")[0] not in keys), *given]
    error = refused(whole)
    assert error is not None
    assert error.fixes()[0][: len(fixes)] == fixes
    assert not rejected(error, whole, "cpu")
    assert ": choose " in str(error)


OPTIONS = (
    *(f"{group}={name}" for group in ("lr_schedule", "metric", "loss", "optimizer") for name in group_choices()[group]),
    *("precision=fp16", "precision=bf16", "precision=fp64", "precision=tf32", "clip_norm=1.0", "nodes=2"),
    *("compile=true", "compile_scope=step", "graph=true", "cudnn_benchmark=true", "channels_last=true"),
    *("activation_recomputation=full", "scaling=weak", "loader=arrow", "measure.attribution_steps=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", group_choices()["strategy"])
def test_what_a_refusal_proposes_is_accepted(strategy: str) -> None:
    device_type = "cuda" if strategy == "data_parallel" else "cpu"
    model, _ = model_and_devices(strategy)
    work = (*IMAGES[:-1], f"model={model}") if model == "mlp" else (*TOKENS[:-1], f"model={model}")
    drawn, wrong, proposed = random.Random(strategy), list[str](), 0
    for _ in range(25):
        options = [f"devices={drawn.choice([1, 2, 3, 4, 8])}", f"batch_size={drawn.choice([96, 96, 95, 24, 1])}"]
        options += drawn.sample(OPTIONS, drawn.choice([0, 1, 1, 2]))
        options += [] if any(text.startswith("optimizer=") for text in options) else [
            f"optimizer={OPTIMIZERS.get(strategy, 'adam')}"
        ]  # fmt: skip
        keys = {text.partition("=")[0] for text in options}
        overrides = [*(text for text in work if text.partition("=")[0] not in keys), f"strategy={strategy}", *options]
        try:
            error = refused(overrides, device_type)
        except ConfigError:  # devices that nodes don't divide are no run
            continue
        if error is not None:
            proposed += any(error.fixes())
            wrong += rejected(error, overrides, device_type)
    assert wrong == []
    assert proposed, "else nothing can fail here"


def test_all_refusals_come_together_and_what_they_propose_works_together() -> None:
    overrides = [*IMAGES, "strategy=ddp", "devices=2", "batch_size=95", "precision=tf32", "nccl.per_edge=true"]
    error = refused(overrides)
    assert error is not None
    assert error.fixes() == [["batch_size=94"], ["nccl.per_edge=false"], ["precision=fp32"]]
    assert not rejected(error, overrides, "cpu")
    assert [line.rpartition(": ")[2] for line in str(error).splitlines()] == [
        "choose batch_size=94",
        "choose nccl.per_edge=false",
        "choose precision=fp32",
    ]


@pytest.mark.parametrize("key", ["batch_size", "strategy", "model.no_such_option", "precision=fp32"])
def test_where_no_neighbour_works_nothing_is_proposed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("batch_size=95 suits nobody", (key,))
    monkeypatch.setattr(check, "refusals", lambda _run, _device_type: [refusal])
    with pytest.raises(UnfitError) as error:
        check_run(one_run([*IMAGES, "strategy=ddp", "devices=2"]).run, "cpu")
    assert error.value.fixes() == [[]]
    assert str(error.value) == error.value.reason == "batch_size=95 suits nobody"


def test_fixes_are_searched_only_for_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[RunConfig] = []

    def search(run: RunConfig, _device_type: str, found: Sequence[Refusal], _judge: object) -> list[list[str]]:
        searched.append(run)
        return [[] for _ in found]

    monkeypatch.setattr(check, "fixes", search)
    collected = Refusals()
    for batch_size in range(101, 201, 2):
        with collected:
            check_run(
                one_run([*IMAGES[:3], "model=mlp", "strategy=ddp", "devices=2", f"batch_size={batch_size}"]).run, "cpu"
            )
    assert searched == []
    with pytest.raises(ConfigError, match="more refusals"):
        collected.raise_any()
    assert 0 < len(searched) <= MOST_REFUSALS
