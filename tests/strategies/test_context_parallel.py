"""Context parallelism: places of tokens, blocks of attention, and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
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
@pytest.mark.slow
def test_two_ranks_keep_half_of_one_devices_activations_each(tmp_path: Path) -> None:
    """Under `all_to_all` each keeps its tokens' results beside those of its heads."""
    whole = kept_bytes(0, 1, configure(*TOKENS, *SMALL, "strategy=single"))
    runs = {exchange: small(exchange, 2) for exchange in ("ring", "all_gather", "all_to_all")}
    shares = {name: max(run_ranks(kept_bytes, 2, tmp_path, run)) / whole for name, run in runs.items()}
    results = 24 * 16 * 32 * 2 * 8 / whole
    assert shares == pytest.approx({"ring": 0.5, "all_gather": 0.5, "all_to_all": 0.5 + results / 2}, abs=0.005)


@pytest.mark.parametrize("model", [["model=mlp"], ["model=vit_tiny", "data=cifar10"], ["model=logistic_regression"]])
def test_models_whose_tokens_meet_elsewhere_are_refused(model: list[str]) -> None:
    run = one_run([*model, "strategy=context_parallel", "devices=2"]).run
    with pytest.raises(ConfigError, match=r"no such attention"):
        check_run(run, "cpu")


@pytest.mark.parametrize("zig_zag", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_places_of_all_ranks_are_those_of_the_sequence(ranks: int, zig_zag: bool) -> None:
    held = [own_places(24, rank=rank, ranks=ranks, zig_zag=zig_zag) for rank in range(ranks)]
    assert torch.cat(held).sort().values.tolist() == list(range(24))
    seen = {int((each + 1).sum()) for each in held}
    assert {len(each) for each in held} == {24 // ranks}
    assert (len(seen) == 1) == zig_zag, "in zig-zag order every rank's queries see as many keys"


def three(heads: int, tokens: int = 300) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, each, tokens, 8, dtype=torch.float64) for each in (4, heads, heads))


def test_blocks_of_keys_merge_to_all_of_them() -> None:
    q, k, v = three(heads=2)
    merged = blocks.Merged(*blocks.block(q, k, v, causal=True))
    more_keys, more_values = three(heads=2)[1:]
    merged.add(slice(100, None), *blocks.block(q[:, :, 100:], more_keys, more_values, causal=False))
    seen = torch.cat([torch.ones(300, 300).tril(), torch.ones(300, 300)], dim=1).bool()
    seen[:100, 300:] = False
    both = (
        torch.cat([one, other], dim=2).repeat_interleave(2, dim=1) for one, other in ((k, more_keys), (v, more_values))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, *both, attn_mask=seen)
    torch.testing.assert_close(merged.taken(torch.float64)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_plain_blocks_are_those_of_torchs_kernel(causal: bool) -> None:
    """Devices without a kernel that gives the log-sum-exp compute in plain products, some rows at a time."""
    q, k, v = three(heads=4)
    of_kernel = blocks.block(q, k, v, causal=causal)
    torch.testing.assert_close(blocks.plain_block(q, k, v, causal=causal), of_kernel, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(q)
    found = blocks.plain_gradients(gradient, (q, k, v), of_kernel, causal=causal)
    expected = blocks.block_gradients(gradient, (q, k, v), of_kernel, causal=causal)
    torch.testing.assert_close(found, tuple(expected), rtol=1e-10, atol=1e-10)
