"""Bytes that strategies say they send in a step: those of formulas, and those that pass through torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from parallelbench.config.run import RunConfig
from parallelbench.training.torch_session import build_model
from tests.helpers import TINY
from tests.launch.programs import completed
from tests.ranks import run_ranks
from tests.strategies.test_parity import run_of
from tests.strategies.training import sent_in_a_step

pytestmark = pytest.mark.slow

FP64, BATCH = 8, 24


def model_bytes(run: RunConfig) -> int:
    """All parameters."""
    return FP64 * sum(parameter.numel() for parameter in build_model(run).parameters())


def padded_bytes(run: RunConfig, shards: int) -> int:
    """The same where the first dimension of each grows to a multiple of the shards."""
    shapes = [parameter.shape for parameter in build_model(run).parameters()]
    return FP64 * sum(math.ceil(shape[0] / shards) * shards * math.prod(shape[1:]) for shape in shapes)


def summed(ranks: int, size_bytes: float) -> float:
    """What each of so many ranks sends in a ring's all-reduce."""
    return 2 * (ranks - 1) / ranks * size_bytes


Sent = tuple[float, float, float]
"""Bytes of gradients, activations and parameters that each rank sends."""


def copies(run: RunConfig) -> Sent:
    return summed(run.devices, model_bytes(run)), 0, 0


def rounded_copies(run: RunConfig) -> Sent:
    """Two bytes each."""
    return summed(run.devices, model_bytes(run) * 2 / FP64), 0, 0


def sharded(shards: int, gathers: int) -> Callable[[RunConfig], Sent]:
    def sent(run: RunConfig) -> Sent:
        travels, replicas = padded_bytes(run, shards), run.devices // shards
        share = (shards - 1) / shards * travels
        return share + summed(replicas, travels / shards), 0, gathers * share

    return sent


def tied(run: RunConfig) -> Sent:
    """Embedding and head are gathered together with the last norm: once in a step."""
    model: Any = build_model(run)
    ends = FP64 * sum(p.numel() for part in (model[0], model[-1].norm) for p in part.parameters())
    return model_bytes(run) / 2, 0, (2 * model_bytes(run) - ends) / 2


def over_tensors(values: int) -> Callable[[RunConfig], Sent]:
    """Of two ranks, where so many values of each sample are summed."""
    return lambda _: (0, summed(2, BATCH * values * FP64), 0)


TOKEN = 12 * 16
"""Values of a sample of language between layers."""
BLOCKS = 2 * 4 * TOKEN
"""qkv and fc1 of each of two blocks take them, out and fc2 give them."""
LABELS = 12


def by_tokens(*, divided: bool) -> Callable[[RunConfig], Sent]:
    """What each all-gather and its reduce-scatter send is what one all-reduce sends.

    Each of two blocks gathers and scatters twice forward and backward; the embedding gathers backward, the head's norm
    forward, and a divided head scatters backward. Each of five norms has 16 weights and biases.
    """
    gathered, scattered = TOKEN * (2 * 4 + 2), TOKEN * (2 * 4 + divided)
    values = (gathered + scattered) / 2 + (TOKEN + 4 * LABELS) * divided
    return lambda _: (FP64 * 5 * 32, BATCH * values * FP64, 0)


def attention(exchange: str, ranks: int, *, keys: int = 32, samples: int = BATCH, repeats: bool = False) -> float:
    """Bytes that each rank sends forward and back, of two layers: `keys` is the width of keys or of values.

    `repeats`: backward computes attention again, and sends again what forward sent.
    """
    own = samples * 16 / ranks
    of_keys_and_values = own * 2 * keys
    if exchange == "all_to_all":
        forward = (ranks - 1) / ranks * (own * 2 * 32 + of_keys_and_values)
        passes = 2  # as gradients the same way back
    else:
        forward, passes = (ranks - 1) * of_keys_and_values, 3  # again in backward, and their gradients
    return 2 * (passes + repeats) * forward * FP64


def parts(exchange: str, **options: Any) -> Callable[[RunConfig], Sent]:
    return lambda run: (copies(run)[0], attention(exchange, run.devices, **options), 0)


def parts_of_slices(exchange: str, gathers: int, **options: Any) -> Callable[[RunConfig], Sent]:
    """Two slices by two parts: all four ranks share the state, two the sequences of half of the batch."""

    def sent(run: RunConfig) -> Sent:
        gradient, _, parameter = sharded(4, gathers)(run)
        return gradient, attention(exchange, 2, samples=BATCH // 2, **options), parameter

    return sent


WIDTHS = (64, 24, 20, 16, 12, 20, 24, 16, 10)
"""Of the images of deep_mlp, and of what its layers give."""


def sliced_tensors(run: RunConfig) -> Sent:
    """Each of two tensor ranks holds half of all but every second layer's bias, of which two copies hold halves."""
    held = sum(WIDTHS[i] * WIDTHS[i + 1] / 2 + WIDTHS[i + 1] / (1 if i % 2 else 2) for i in range(8)) * FP64
    return held / 2, BATCH // 2 * FP64 * DEEP, 2 * held / 2


DEEP = 20 + 20 + 12 + 12 + 24 + 24 + 10
"""Every second layer of deep_mlp gives whole values, every second but the first takes them."""
VIT_HELD = 9_866 + (1 + 5) * 32
"""Of vit_8, with the class token and the position embedding twice: `fully_shard` pads their first dimension of 1."""
CUT = 32 * 14 * 14
"""Values per image between conv1 (with its pooling) and fc1 of cnn_small; as many gradients come back."""
KEYS_OF_TWO = "model.kv_heads=2"
ROWS: list[tuple[str, Callable[[RunConfig], Sent]]] = [
    ("!cnn_small 2 ddp", copies),
    ("cnn_small 3 ddp", copies),
    ("cnn_small 4 ddp", copies),
    ("cnn_small 2 ddp strategy.compression=bf16", rounded_copies),
    ("!mlp 2 ddp strategy.micro_batches=3", copies),
    ("!mlp 2 fsdp", sharded(2, 2)),
    ("mlp 2 fsdp kept", sharded(2, 1)),
    ("!mlp 2 fsdp strategy.micro_batches=3", sharded(2, 6)),
    ("vit_tiny 4 fsdp", sharded(4, 2)),
    ("mlp 4 hsdp strategy.micro_batches=3", sharded(2, 6)),
    ("vit_tiny 4 hsdp kept", sharded(2, 1)),
    ("gpt 2 fsdp full", sharded(2, 2)),
    ("!gpt 2 fsdp tied", tied),
    ("gpt 2 fsdp tied kept", sharded(2, 1)),
    (
        "cnn_small 2 model_parallel strategy.device_map={conv1:0,fc1:1,fc2:1}",
        lambda _: (0, BATCH * 32 * 14 * 14 * FP64, 0),
    ),
    # fc1 takes 32·4·4, fc2 gives 10; two blocks on 5 tokens of 32.
    ("!cnn_8 2 tensor_parallel", over_tensors(32 * 4 * 4 + 10)),
    ("vit_8 2 tensor_parallel", over_tensors(2 * 6 * 5 * 32)),
    ("deep_mlp 2 tensor_parallel", over_tensors(DEEP)),
    # Attention's and the perceptron's outputs of two blocks once more.
    ("gpt 2 tensor_parallel full", over_tensors(BLOCKS + 2 * 2 * TOKEN)),
    # The embedding gives, the head takes. Then the loss.
    ("!gpt 2 tensor_parallel by_vocabulary", over_tensors(BLOCKS + 2 * TOKEN + 4 * LABELS)),
    ("gpt 2 tensor_parallel by_vocabulary smoothed", over_tensors(BLOCKS + 2 * TOKEN + 5 * LABELS)),
    ("gpt 2 tensor_parallel by_tokens", by_tokens(divided=False)),
    ("!gpt 2 tensor_parallel by_tokens by_vocabulary", by_tokens(divided=True)),
    ("!deep_mlp 4 dp_tp", sliced_tensors),
    ("vit_8 4 dp_tp kept", lambda _: (VIT_HELD * FP64 / 2, 12 * 2 * 6 * 5 * 32 * FP64, VIT_HELD * FP64 / 2)),
    ("gpt_32 2 context_parallel strategy.exchange=ring", parts("ring")),
    (f"gpt_32 4 context_parallel strategy.exchange=ring {KEYS_OF_TWO}", parts("ring", keys=16)),
    (f"!gpt_32 2 context_parallel strategy.exchange=all_gather {KEYS_OF_TWO}", parts("all_gather", keys=16)),
    ("gpt_32 4 context_parallel strategy.exchange=all_gather", parts("all_gather")),
    (f"gpt_32 2 context_parallel strategy.exchange=all_to_all {KEYS_OF_TWO}", parts("all_to_all", keys=16)),
    # Heads of keys that are fewer than ranks are repeated.
    (f"gpt_32 4 context_parallel strategy.exchange=all_to_all {KEYS_OF_TWO}", parts("all_to_all")),
    ("!gpt_32 2 context_parallel strategy.exchange=ring full", parts("ring", repeats=True)),
    ("gpt_32 2 context_parallel strategy.exchange=all_gather full", parts("all_gather", repeats=True)),
    ("gpt_32 2 context_parallel strategy.exchange=all_to_all selective", parts("all_to_all", repeats=True)),
    ("gpt_32 4 fsdp_cp strategy.exchange=ring", parts_of_slices("ring", 2)),
    ("gpt_32 4 fsdp_cp strategy.exchange=ring kept selective", parts_of_slices("ring", 1, repeats=True)),
    (
        f"gpt_32 4 fsdp_cp strategy.exchange=all_gather strategy.micro_batches=2 {KEYS_OF_TWO}",
        parts_of_slices("all_gather", 4, keys=16),
    ),
    (
        "gpt_32 4 fsdp_cp strategy.exchange=all_to_all full strategy.micro_batches=3",
        parts_of_slices("all_to_all", 6, repeats=True),
    ),
]
"""Model, devices, strategy, options, as in the table of trainings; with a ! `make test` has it, too."""


@pytest.mark.parametrize(
    ("row", "formula"),
    [
        pytest.param(
            row.lstrip("!"), formula, id=row.lstrip("!"), marks=[] if row[0] == "!" else pytest.mark.exhaustive
        )
        for row, formula in ROWS
    ],
)
def test_a_step_sends_what_the_formulas_say(row: str, formula: Callable[[RunConfig], Sent], tmp_path: Path) -> None:
    model, devices, strategy, *options = row.split()
    run = run_of(model, strategy, int(devices), " ".join(options))
    expected = dict(zip(("gradient", "activation", "parameter"), formula(run), strict=True))
    for sent in run_ranks(sent_in_a_step, run.devices, tmp_path, run):
        assert {kind: sent[kind] for kind in expected} == pytest.approx(expected, abs=0.5)
        assert sent["passed"] == pytest.approx(sum(expected.values()), rel=1e-12)
        assert not sent["unknown"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "devices", "options"),
    [
        ("tensor_parallel", 2, "by_tokens"),
        ("tensor_parallel", 2, "by_vocabulary"),
        ("tensor_parallel", 2, "by_tokens by_vocabulary"),
        ("dp_pp_tp", 4, ""),
    ],
)
def test_messages_that_are_sent_again_are_counted(strategy: str, devices: int, options: str, tmp_path: Path) -> None:
    plain, again = (
        run_ranks(sent_in_a_step, devices, tmp_path, run_of("gpt", strategy, devices, f"{options} {more}"))
        for more in ("", "full")
    )
    for once, twice in zip(plain, again, strict=True):
        assert twice["said"] == pytest.approx(twice["passed"], rel=1e-9)
        assert twice["said"] > 1.05 * once["said"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["zero1", "ring_ddp"])
def test_micro_batches_send_no_more(strategy: str, tmp_path: Path) -> None:
    one, three = (
        run_ranks(sent_in_a_step, 2, tmp_path, run_of("mlp", strategy, 2, f"strategy.micro_batches={count}"))
        for count in (1, 3)
    )
    assert three == one
    assert all(rank["said"] == pytest.approx(rank["passed"], rel=1e-9) for rank in one)


@pytest.mark.exhaustive
def test_a_run_is_published_with_parity_passed_and_its_traffic(tmp_path: Path) -> None:
    options = ("strategy=fsdp", "devices=2", "launcher.oversubscribe=true", "epochs=1")
    code, text = completed("run", *TINY, *options, results=tmp_path)
    assert code == 0, text
    result = next(tmp_path.glob("*/*/result"))
    run, ranks = (pl.read_parquet(result / f"{table}.parquet") for table in ("run", "ranks"))
    assert (run["outcome"].to_list(), run["parity_passed"].to_list()) == (["ok"], [True])
    steps, size_bytes = 2, 4 * (64 + 1) * 10
    assert ranks["gradient_bytes_sent"].to_list() == [steps * size_bytes / 2] * 2
    assert ranks["parameter_bytes_sent"].to_list() == [steps * size_bytes * 2 / 2] * 2
