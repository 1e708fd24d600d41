"""Recomputation beside what sends messages inside of layers, adds losses to them, or cuts batches into pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests.ranks import run_ranks
from tests.strategies.test_gpt_parity import small
from tests.strategies.test_moe_parity import routed
from tests.strategies.test_parity import assert_equal
from tests.strategies.test_recomputation import FULL, SELECTIVE, bytes_of_a_step, trained
from tests.strategies.training import one_device

BY_TOKENS, DIVIDED = "strategy.sequence_parallel=true", "strategy.vocabulary_parallel=true"


def assert_like_one_device(run: RunConfig, folder: Path) -> None:
    assert_equal(run_ranks(trained, run.devices, folder, run), one_device(run), tolerance=1e-9)


@pytest.mark.cases("options1")
@pytest.mark.slow
@pytest.mark.parametrize("options", [(BY_TOKENS,), (DIVIDED,), (BY_TOKENS, DIVIDED)])
def test_divided_tokens_and_vocabularies_train_like_one_device(options: tuple[str, ...], tmp_path: Path) -> None:
    assert_like_one_device(small("tensor_parallel", 2, FULL, *options), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("options", [(BY_TOKENS,), (DIVIDED,), (BY_TOKENS, DIVIDED)])
def test_messages_that_are_sent_again_are_counted(options: tuple[str, ...], tmp_path: Path) -> None:
    reported = {}
    for recomputation in ("activation_recomputation=none", FULL):
        run = small("tensor_parallel", 2, recomputation, *options)
        ranks = run_ranks(bytes_of_a_step, 2, tmp_path, run)
        reported[recomputation] = sum(rank["reported"] for rank in ranks)
        assert reported[recomputation] == pytest.approx(sum(rank["counted"] for rank in ranks), rel=0.01)
    assert reported[FULL] > 1.05 * reported["activation_recomputation=none"]


@pytest.mark.cases("ddp-options1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ddp", (FULL,)), ("ddp", ("strategy.micro_batches=3",)), ("fsdp", (FULL, "strategy.micro_batches=2")),
     ("expert_parallel", (SELECTIVE,)), ("expert_parallel", (FULL,))],
)  # fmt: skip
def test_a_balance_loss_counts_once(strategy: str, options: tuple[str, ...], tmp_path: Path) -> None:
    assert_like_one_device(routed(strategy, *options), tmp_path)


def test_a_loss_from_parts_of_logits_takes_no_other() -> None:
    with pytest.raises(ConfigError, match=r"model\.balance=0\.7 adds to a loss computed from parts"):
        routed("tensor_parallel", DIVIDED)
