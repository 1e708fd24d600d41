"""What a rank of context parallelism keeps from forward to backward: its part of what one device keeps."""

from __future__ import annotations

import pytest

from tests.bench.context import kept_bytes
from tests.strategies.test_context_parallel import (
    BATCH,
    EXCHANGES,
    FP64,
    LAYERS,
    SMALL,
    TOKENS,
    TOKENS_EACH,
    WIDTH,
    small,
)
from tests.strategies.training import configure


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_ranks_keep_half_of_one_devices_activations_each() -> None:
    """Under `all_to_all` each keeps its tokens' results beside those of its heads."""
    whole = kept_bytes(configure(*TOKENS, *SMALL, "strategy=single"))
    shares = {exchange: kept_bytes(small(exchange, 2)) / whole for exchange in EXCHANGES}
    results = BATCH * TOKENS_EACH * WIDTH * LAYERS * FP64 / whole
    assert shares["ring"] == pytest.approx(0.5, abs=0.005)
    assert shares["all_gather"] == pytest.approx(0.5, abs=0.005)
    assert shares["all_to_all"] == pytest.approx(0.5 + results / 2, abs=0.005)
