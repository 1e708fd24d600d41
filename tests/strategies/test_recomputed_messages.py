"""Recomputation beside what sends messages inside of layers, adds losses to them, or cuts batches into pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelbench.errors import ConfigError
from tests.ranks import run_ranks
from tests.strategies.test_gpt_parity import small
from tests.strategies.test_moe_parity import routed
from tests.strategies.test_recomputation import FULL, bytes_of_a_step

BY_TOKENS, DIVIDED = "strategy.sequence_parallel=true", "strategy.vocabulary_parallel=true"


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


def test_a_loss_from_parts_of_logits_takes_no_other() -> None:
    with pytest.raises(ConfigError, match=r"model\.balance=0\.7 adds to a loss computed from parts"):
        routed("tensor_parallel", DIVIDED)
