"""Norms and residuals on parts of the sequence: like one device, sent as the formula says, or refused in words."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import nn

from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.models.gpt import Gpt
from parallelbench.strategies.tensor import sequence
from parallelbench.training.checks.components import check_traits, traits_of
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.recorded import Recorded
from tests.strategies.test_fake_groups import failures
from tests.strategies.test_gpt_parity import small
from tests.strategies.test_vocabulary_parallel import DEVICES, DIVIDED, continued, on_least
from tests.strategies.training import configure, loader_of
from tests.test_parity_gate import gate

BY_TOKENS = "strategy.sequence_parallel=true"


def seen_and_counted(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """What a step sends, as counted and as the process groups were asked for; tokens that norms see."""
    replica: Any = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    module, _ = replica.trained()
    tokens: set[int] = set()
    for name, norm in module.named_modules():
        if name.rpartition(".")[2].startswith("norm"):
            norm.register_forward_pre_hook(lambda _norm, inputs: tokens.add(inputs[0].shape[1]))
    with Recorded() as recorded, warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of names that torch gives up
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    carried = dict(recorded.carried)
    return {"recorded": carried, "tokens": tokens, **replica.traffic.take()}


@pytest.mark.cases("True")
@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True])
def test_tensor_ranks_send_what_the_formula_says(divided: bool, tmp_path: Path) -> None:
    """What each all-gather and its reduce-scatter send is what one all-reduce sends."""
    run = on_least("tensor_parallel", BY_TOKENS, *([DIVIDED] if divided else []))
    values, labels = 8 * 24 * 12 * 16, 8 * 24 * 12
    # Each of two blocks gathers and scatters twice forward and backward; the embedding gathers backward, the head's
    # norm forward, and a divided head scatters backward. Each of five norms has 16 weights and biases.
    gathered, scattered = values * (2 * 4 + 2), values * (2 * 4 + divided)
    summed = 8 * 5 * 32 + (values + 4 * labels) * divided
    for rank in run_ranks(seen_and_counted, 2, tmp_path, run):
        found = rank["recorded"]
        assert found["all_gather_into_tensor"] == gathered // 2, "of each rank's part"
        assert found["reduce_scatter_tensor"] == scattered
        assert found["allreduce"] == summed
        assert rank["gradient_bytes_sent"] == 8 * 5 * 32
        assert rank["activation_bytes_sent"] == (gathered + scattered) // 2 + (values + 4 * labels) * divided
        assert rank["tokens"] == {6}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_blocks_send_what_megatrons_tensor_parallelism_sends(tmp_path: Path) -> None:
    """Four all-reduces per block; the suite's own tensor parallelism sums queries, keys and values one by one: six."""
    sent = {}
    for name, more in {"summed": [], "in parts": [BY_TOKENS]}.items():
        ranks = [
            run_ranks(seen_and_counted, 2, tmp_path, on_least("tensor_parallel", f"model.layers={layers}", *more))
            for layers in (1, 2)
        ]
        one, two = (each[0]["activation_bytes_sent"] for each in ranks)
        sent[name] = (two - one) / (8 * 24 * 12 * 16)
    assert sent == {"summed": 6.0, "in parts": 4.0}


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "norms' gradients are not summed": (sequence.NormGradients, "sum_over_ranks", lambda _gradients: None),
    "the embedding's gradient is that of a part": (
        sequence._OwnPart,
        "backward",
        staticmethod(lambda ctx, gradient: (torch.cat([gradient] * ctx.mesh.size(), dim=1), None)),
    ),
}


def broken_gate(rank: int, size: int, run: RunConfig, mutation: str) -> list[dict[str, Any]]:
    with patch.object(*MUTATIONS[mutation]):
        return gate(rank, size, run)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("strategy", ["tensor_parallel", "dp_pp_tp"])
def test_what_is_wrong_is_caught(strategy: str, mutation: str, tmp_path: Path) -> None:
    rows = run_ranks(broken_gate, DEVICES[strategy], tmp_path, on_least(strategy, BY_TOKENS), mutation)[0]
    assert not all(row["passed"] for row in rows)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("strategy", DEVICES)
@pytest.mark.cases("dp_tp")
def test_a_checkpoint_goes_on_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    run = on_least(strategy, BY_TOKENS, DIVIDED, "optimizer=adam")
    assert run_ranks(continued, DEVICES[strategy], tmp_path, run) == [True] * DEVICES[strategy]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_that_are_not_there_train() -> None:
    model = ["model=gpt_tiny", "model.layers=2", "data=tokens", "data.sequence=16", "data.train_samples=256"]
    cases = [
        {"strategy": strategy, "size": size, "rank": rank, "overrides": [*model, BY_TOKENS, *more, "batch_size=128"]}
        for strategy in DEVICES
        for more in ([], [DIVIDED])
        for size in (4, 64)
        for rank in (0, size - 1)
        if strategy != "tensor_parallel" or size == 4
    ]
    three = [*model, BY_TOKENS, "batch_size=120", "model.layers=1", "strategy.stages=3", "strategy.micro_batches=4"]
    cases += [{"strategy": "dp_pp_tp", "size": 6, "rank": rank, "overrides": three} for rank in (0, 2, 5)]
    assert not failures(cases), "the first of three stages has no norm"


@pytest.mark.parametrize("strategy", DEVICES)
def test_what_cannot_be_cut_is_refused_with_the_fix(strategy: str) -> None:
    fix = r"choose strategy\.sequence_parallel=false"
    with pytest.raises(ConfigError, match=rf"samples of 11 tokens .* 2 tensor ranks: {fix}, or data\.sequence=1"):
        on_least(strategy, BY_TOKENS, "data.sequence=11")
    with pytest.raises(ConfigError, match=rf"never tried.*: {fix}, or compile=false"):
        on_least(strategy, BY_TOKENS, "compile=true")
    devices = f"devices={DEVICES[strategy]}"
    with pytest.raises(ConfigError, match=rf"model=mlp names no norms .*: {fix}$"):
        configure("data=synthetic", "model=mlp", f"strategy={strategy}", devices, BY_TOKENS)
    with pytest.raises(ConfigError, match=r"model=gpt_moe_tiny names no norms"):
        configure("data=tokens", "model=gpt_moe_tiny", "model.balance=0", f"strategy={strategy}", devices, BY_TOKENS)


def test_runs_without_it_keep_their_ids() -> None:
    plain, by_tokens = on_least("dp_tp"), on_least("dp_tp", BY_TOKENS)
    assert "sequence_parallel" not in to_mapping(plain)["strategy"]
    assert run_id(plain) != run_id(by_tokens)
    assert from_mapping(to_mapping(by_tokens)) == by_tokens


class Dropping(Gpt, frozen=True, kw_only=True):
    """A model of one's own: GPT with dropout behind its embedding."""

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        model = super().build(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        first = next(iter(model))
        first.register_forward_hook(lambda layer, _, values: nn.functional.dropout(values, 0.5, layer.training))
        return model


@pytest.mark.cases("tensor_parallel")
@pytest.mark.parametrize("strategy", ["tensor_parallel", "dp_tp", "dp_pp_tp"])
def test_ranks_with_other_tokens_do_not_drop_alike(strategy: str) -> None:
    """Tensor ranks draw the same numbers, as they compute the same values; not so where tokens are divided."""
    devices = {"tensor_parallel": 2, "dp_tp": 4, "dp_pp_tp": 8}[strategy]
    for divided in ("true", "false"):
        run = small(strategy, devices, f"strategy.sequence_parallel={divided}")
        check_traits(run, traits_of(run))
        options = {name: getattr(run.model, name) for name in run.model.__struct_fields__}
        run = msgspec.structs.replace(run, model=Dropping(**options))
        traits = traits_of(run)
        assert traits.draws
        if divided == "false":
            check_traits(run, traits)
        else:
            with pytest.raises(ConfigError, match=r"drop alike.* choose strategy\.sequence_parallel=false"):
                check_traits(run, traits)
