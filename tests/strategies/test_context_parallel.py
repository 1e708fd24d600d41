"""Context parallelism: places of tokens, blocks of attention, and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.strategies.context import blocks
from parallelbench.strategies.context.tokens import own_places
from tests.ranks import run_ranks
from tests.strategies.training import configure, kept_bytes

TOKENS = ("data=tokens", "data.sequence=16", "data.vocabulary=20", "data.train_samples=96", "data.test_samples=13")
SMALL = ("model=gpt_tiny", "model.layers=2", "model.width=32", "model.sequence=20", "model.vocabulary=24")


def small(exchange: str, devices: int, *options: str) -> RunConfig:
    asked = ("strategy=context_parallel", f"strategy.exchange={exchange}", f"devices={devices}")
    return configure(*TOKENS, *SMALL, *asked, *options)


@pytest.mark.exhaustive
def test_two_ranks_keep_half_of_one_devices_activations_each(tmp_path: Path) -> None:
    """Under `all_to_all` each keeps its tokens' results beside those of its heads."""
    whole = kept_bytes(0, 1, configure(*TOKENS, *SMALL, "strategy=single"))
    runs = {exchange: small(exchange, 2) for exchange in ("ring", "all_gather", "all_to_all")}
    shares = {name: max(run_ranks(kept_bytes, 2, tmp_path, run)) / whole for name, run in runs.items()}
    results = 24 * 16 * 32 * 2 * 8 / whole
    assert shares == pytest.approx({"ring": 0.5, "all_gather": 0.5, "all_to_all": 0.5 + results / 2}, abs=0.005)


@pytest.mark.parametrize(("ranks", "zig_zag"), [(2, True), (3, False)])
def test_places_of_all_ranks_are_those_of_the_sequence(ranks: int, zig_zag: bool) -> None:
    held = [own_places(24, rank=rank, ranks=ranks, zig_zag=zig_zag) for rank in range(ranks)]
    assert torch.cat(held).sort().values.tolist() == list(range(24))
    seen = {int((each + 1).sum()) for each in held}
    assert {len(each) for each in held} == {24 // ranks}
    assert (len(seen) == 1) == zig_zag, "in zig-zag order every rank's queries see as many keys"


@pytest.mark.parametrize("causal", [True, False])
def test_plain_blocks_are_those_of_torchs_kernel(causal: bool) -> None:
    """Devices without a kernel that gives the log-sum-exp compute in plain products, some rows at a time."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 300, 8, dtype=torch.float64) for _ in range(3))
    of_kernel = blocks.block(q, k, v, causal=causal)
    torch.testing.assert_close(blocks.plain_block(q, k, v, causal=causal), of_kernel, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(q)
    found = blocks.plain_gradients(gradient, (q, k, v), of_kernel, causal=causal)
    expected = blocks.block_gradients(gradient, (q, k, v), of_kernel, causal=causal)
    torch.testing.assert_close(found, tuple(expected), rtol=1e-10, atol=1e-10)
