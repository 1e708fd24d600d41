"""Context parallelism: parts of sequences train like whole ones, faults are seen, bytes are those of the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from launch.sweep import one_run
from parallelbench.config.check import check_run
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.models.gpt_layers import CausalAttention, TokenEmbed, attended
from parallelbench.strategies.context import ContextParallel, blocks
from parallelbench.strategies.context.tokens import own_places
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_attribution import shares, with_a_slow_rank
from tests.strategies.test_recomputation import same_bits
from tests.strategies.training import configure, loader_of, train
from tests.test_checkpoint import equal, interrupted
from tests.test_closing import failed, on_ranks, passed
from tests.test_parity_gate import gate

TOKENS = ("data=tokens", "data.sequence=16", "data.vocabulary=20", "data.train_samples=96", "data.test_samples=13")
SMALL = ("model=gpt_tiny", "model.layers=2", "model.width=32", "model.sequence=20", "model.vocabulary=24")
LLAMA = ("model.positions=rope", "model.mlp=swiglu", "model.mlp_width=40", "model.kv_heads=2")
EXCHANGES = ("ring", "all_gather", "all_to_all")
FP64 = 8
BATCH, TOKENS_EACH, WIDTH, LAYERS = 24, 16, 32, 2


def small(exchange: str, devices: int, *options: str) -> RunConfig:
    asked = ("strategy=context_parallel", f"strategy.exchange={exchange}", f"devices={devices}")
    return configure(*TOKENS, *SMALL, *asked, *options)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", ["full", "selective"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.cases("ring-full", "all_gather-selective", "all_to_all-full")
def test_attention_that_backward_computes_again_gives_the_same_bits(
    exchange: str, recomputed: str, tmp_path: Path
) -> None:
    runs = [small(exchange, 2, *LLAMA, f"activation_recomputation={value}") for value in ("none", recomputed)]
    for plain, again in run_ranks(both_trained, 2, tmp_path, runs):
        same_bits(again, plain)


def both_trained(rank: int, size: int, runs: list[RunConfig]) -> list[dict[str, Any]]:
    return [train(rank, size, run) for run in runs]


def _layers(replica: Any, kind: type[nn.Module]) -> list[Any]:
    return [layer for layer in replica.trained()[0].modules() if isinstance(layer, kind)]


def counts_positions_from_zero(replica: Any) -> None:
    for layer in (*_layers(replica, TokenEmbed), *_layers(replica, CausalAttention)):
        layer.places = None


def attends_to_own_tokens_only(replica: Any) -> None:
    for layer in _layers(replica, CausalAttention):
        layer.join = attended


def halves_a_gradient(replica: Any) -> None:
    for layer in _layers(replica, CausalAttention):
        layer.join = lambda q, k, v, attend=layer.join: attend(q, (k + k.detach()) / 2, v)


def averages_no_gradients(replica: Any) -> None:
    replica._forward.require_backward_grad_sync = False


def reads_the_same_part_everywhere(replica: Any) -> None:
    replica._tokens.places = torch.arange(len(replica._tokens.places))


def counts_its_tokens_twice(replica: Any) -> None:
    sums = replica._owned_sums
    replica._owned_sums = lambda loss, logits, labels: sums(loss * 2, logits, labels)


FAULTS: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "learned positions from zero": (counts_positions_from_zero, ()),
    "rotary positions from zero": (counts_positions_from_zero, LLAMA),
    "attends to own tokens only": (attends_to_own_tokens_only, ()),
    "halves the gradient of keys": (halves_a_gradient, ()),
    "averages no gradients": (averages_no_gradients, ()),
    "reads the same part everywhere": (reads_the_same_part_everywhere, ()),
    "counts its tokens twice": (counts_its_tokens_twice, ()),
}
"""What is done to a replica, and to which model's."""


class FaultyContextParallel(ContextParallel, frozen=True, kw_only=True):
    """With one of `FAULTS`."""

    fault: str

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        FAULTS[self.fault][0](replica)
        return replica


def gates(rank: int, size: int, runs: list[RunConfig]) -> list[bool]:
    """Which runs the parity gate lets pass."""
    return [all(row["passed"] for row in gate(rank, size, run)) for run in runs]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_parity_gate_sees_every_fault(exchange: str, tmp_path: Path) -> None:
    right = small(exchange, 2)
    wrong = {}
    for name, (_, options) in FAULTS.items():
        run = small(exchange, 2, *options)
        chosen = {key: getattr(run.strategy, key) for key in ("exchange", "bucket_mib", "gradient_as_bucket_view")}
        faulty = FaultyContextParallel(name="context_parallel", fault=name, **chosen)
        wrong[name] = msgspec.structs.replace(run, strategy=faulty)
    lets_pass = run_ranks(gates, 2, tmp_path, [right, *wrong.values()])[0]
    assert dict(zip(["right", *wrong], lets_pass, strict=True)) == {"right": True, **dict.fromkeys(wrong, False)}


def sent_in_a_step(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    replica = new_replica(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    batches = loader_of(replica, run).train(1)
    replica.step(next(batches))  # DDP lays its buckets out
    replica.traffic.take()
    with CountedBytes() as counted:
        replica.step(next(batches))
    assert not counted.unknown
    # Smaller messages are DDP's own: how it has laid its buckets out.
    return {"said": replica.traffic.take(), "passed_through": counted.sent_bytes}


def values_sent(exchange: str, ranks: int, *, keys: int, repeats: bool = False) -> float:
    """By each rank, forward and back, of all layers: `keys` is the width of keys or of values.

    `repeats`: backward computes attention again, and sends again what forward sent.
    """
    own = BATCH * TOKENS_EACH / ranks
    of_keys_and_values = own * 2 * keys
    if exchange == "all_to_all":
        forward = (ranks - 1) / ranks * (own * 2 * WIDTH + of_keys_and_values)
        passes = 2  # as gradients the same way back
    else:
        forward, passes = (ranks - 1) * of_keys_and_values, 3  # again in backward, and their gradients
    return LAYERS * (passes + repeats) * forward


@pytest.mark.cases("all_gather-2-2")
@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "ranks", "kv_heads"), list(itertools.product(EXCHANGES, (2, 4), (4, 2))))
def test_bytes_are_those_of_the_formulas(exchange: str, ranks: int, kv_heads: int, tmp_path: Path) -> None:
    run = small(exchange, ranks, f"model.kv_heads={kv_heads}")
    # all_to_all repeats heads of keys that are fewer than ranks.
    keys = WIDTH if exchange == "all_to_all" and kv_heads % ranks else WIDTH * kv_heads // 4
    parameters = sum(parameter.numel() for parameter in build_model(run).parameters())
    gradients = 2 * (ranks - 1) / ranks * parameters * FP64
    values = values_sent(exchange, ranks, keys=keys) * FP64
    expected = {"gradient_bytes_sent": gradients, "activation_bytes_sent": values, "parameter_bytes_sent": 0}
    for sent in run_ranks(sent_in_a_step, ranks, tmp_path, run):
        assert sent == {"said": expected, "passed_through": gradients + values}


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", ["full", "selective"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.cases("ring-full", "all_gather-full", "all_to_all-selective")
def test_attention_that_is_computed_again_sends_again_what_forward_sent(
    exchange: str, recomputed: str, tmp_path: Path
) -> None:
    run = small(exchange, 2, f"activation_recomputation={recomputed}")
    values = values_sent(exchange, 2, keys=WIDTH, repeats=True) * FP64
    for sent in run_ranks(sent_in_a_step, 2, tmp_path, run):
        assert sent["said"]["activation_bytes_sent"] == values
        assert sent["passed_through"] == values + sent["said"]["gradient_bytes_sent"]


@pytest.mark.cases("all_to_all")
@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_training_that_was_interrupted_is_bitwise_the_same(exchange: str, tmp_path: Path) -> None:
    run = small(exchange, 2, "optimizer.momentum=0.9")
    for losses, state, losses_resumed, state_resumed in run_ranks(interrupted, 2, tmp_path, run):
        assert losses_resumed == losses
        assert equal(state_resumed, state)


@pytest.mark.cases("all_to_all")
@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_closing_check_passes_and_evaluates_every_sample_once(exchange: str, tmp_path: Path) -> None:
    run = small(exchange, 2, "precision=fp32", "epochs=1", *LLAMA)
    (rows,) = run_ranks(on_ranks, 2, tmp_path, run, None)[0]
    assert not failed(rows), [row for row in rows if row["passed"] is False]
    expected = {"evaluation loss", "evaluation accuracy", "loss", "gradients", "update", "rounding"}
    assert expected | {"bytes", "settled", "exchanges", "samples"} <= passed(rows)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_half_precision_trains_within_its_rounding(tmp_path: Path) -> None:
    runs = [small(exchange, 2, "precision=bf16", "epochs=1", *LLAMA) for exchange in EXCHANGES]
    for number, run in enumerate(runs):
        (folder := tmp_path / str(number)).mkdir()
        (rows,) = run_ranks(on_ranks, 2, folder, run, None)[0]
        assert not failed(rows), [row for row in rows if row["passed"] is False]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slow_rank_is_what_the_other_waits_for(tmp_path: Path) -> None:
    runs = {exchange: small(exchange, 2) for exchange in EXCHANGES}
    ranks = run_ranks(with_a_slow_rank, 2, tmp_path, runs, dict.fromkeys(runs, 1))
    assert {name: share for name in runs if (share := shares(ranks[0][name], "communication_s")) < 0.5} == {}
    assert {name: share for name in runs if (share := shares(ranks[1][name], "forward_s")) < 0.5} == {}


@pytest.mark.parametrize(
    ("exchange", "devices", "overrides", "words"),
    [
        ("ring", 1, [], ["strategy=context_parallel", "two devices", "devices=2"]),
        ("ring", 3, [], ["data.sequence=16", "6 equal parts", "devices=3"]),
        ("all_gather", 3, [], ["data.sequence=16", "6 equal parts"]),
        ("all_to_all", 3, [], ["data.sequence=16", "3 equal parts"]),
        ("ring", 2, ["data.sequence=3"], ["data.sequence=3 ", "4 equal parts"]),
        ("ring", 2, ["data.sequence=18", "model.sequence=18"], ["data.sequence=18"]),
        ("ring", 2, ["data.sequence=3", "model.sequence=3"], ["choose data.sequence=4 model.sequence=4"]),
        ("all_to_all", 8, [], ["devices=8", "model.heads=4"]),
        ("all_to_all", 2, ["model.heads=1"], ["model.heads=1"]),
    ],
)
def test_what_can_not_be_cut_is_refused_with_the_nearest_choice(
    exchange: str, devices: int, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        small(exchange, devices, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


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
