"""Every strategy with each optimizer and each precision, on 2 to 64 ranks without their devices: builds and trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.helpers import torchs_strategies

pytestmark = pytest.mark.slow

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
DATA = ["data=synthetic", "data.channels=1", "data.image_size=8", "data.train_samples=256", "data.test_samples=64"]
NOT_POSSIBLE = {
    "single": "there is one rank",
    "data_parallel": "one process drives all devices, which must be there",
    "downpour": "its servers wait for whoever asks next, and nobody does",
    "model_parallel_tutorial": "its first segment's input has the shape that a message says, and there is none",
}
"""What no made-up rank can do; other tests train it on several devices or processes."""
LAST_ONES = ("pipeline", "dp_pp", "dp_pp_tp", "parameter_server")
"""Strategies whose ranks do different things: the last one is tried, too."""
STRATEGIES = [name for name in torchs_strategies() if name not in NOT_POSSIBLE]
SMALLEST = {"hsdp": 4, "dp_tp": 4, "dp_pp": 4, "dp_pp_tp": 4}
NO_FP16 = {"fsdp", "hsdp", "zero1", "tensor_parallel", "dp_tp", "pipeline", "dp_pp", "dp_pp_tp", "model_parallel"}
NO_FP16 |= {"parameter_server", "sandblaster_lbfgs", "expert_parallel", "fsdp_cp"}
"""Whose gradients no process could scale alone."""


SEQUENCES = ["data=tokens", "data.train_samples=256", "data.test_samples=64", "model=gpt_tiny", "model.layers=1"]
EXPERTS = ["data=tokens", "data.sequence=8", "data.train_samples=256", "data.test_samples=64", "model=gpt_moe_tiny"]
EXPERTS += ["model.experts=64", "model.mlp_width=8", "model.layers=1"]
"""For 64 ranks, each with an expert."""


def sequences(size: int) -> list[str]:
    """Of which each rank has two tokens and a head, or more."""
    heads = max(8, size)
    tokens = f"data.sequence={2 * heads}", f"model.sequence={2 * heads}"
    return [*SEQUENCES, *tokens, f"model.width={2 * heads}", f"model.heads={heads}"]


def overrides(strategy: str, size: int, optimizer: str, precision: str) -> list[str]:
    layers = size if strategy in ("pipeline", "model_parallel") else 3
    batch_size = {"parameter_server": 4 * (size - 1), "sandblaster_lbfgs": 256}.get(strategy, 128)
    micro = [f"strategy.micro_batches={size}"] if strategy == "pipeline" else []
    model = ["model=mlp", f"model.hidden={[64] * layers}".replace(" ", "")]
    own = {"context_parallel": sequences(size), "fsdp_cp": sequences(size), "expert_parallel": EXPERTS}
    work = own.get(strategy, [*DATA, *model, *micro])
    return [*work, f"optimizer={optimizer}", f"precision={precision}", f"batch_size={batch_size}"]


def cases(strategy: str, pairs: Iterable[tuple[str, str]], *, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """All sizes with each pair of optimizer and precision."""
    if strategy == "sandblaster_lbfgs":  # a line search resolves nothing in half precisions
        pairs = [("lbfgs", precision) for _, precision in pairs if precision not in ("bf16", "fp16")]
    return [
        {"strategy": strategy, "size": size, "rank": rank, "overrides": overrides(strategy, size, *pair)}
        for size, pair in product(sizes, dict.fromkeys(pairs))
        if size >= SMALLEST.get(strategy, 2)
        for rank in ((0, size - 1) if strategy in LAST_ONES else (0,))
    ]


def tried(wanted: list[dict[str, Any]]) -> list[str]:
    """What came of each case."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.fake_ranks"], input=json.dumps(wanted), capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-3000:]
    texts: list[str] = json.loads(made.stdout.splitlines()[-1])
    return texts


def failures(wanted: list[dict[str, Any]]) -> list[str]:
    """Cases that did not end well, with what came of each; refusals of half precisions are expected."""
    return [
        f"{case['strategy']} × {case['size']}, rank {case['rank']}, {' '.join(case['overrides'][-3:])}: {text}"
        for case, text in zip(wanted, tried(wanted), strict=True)
        if text != "ok" and not (text.startswith("refused: precision=fp16") and case["strategy"] in NO_FP16)
    ]


@pytest.mark.exhaustive
def test_every_strategy_trains_on_64_ranks() -> None:
    assert not failures([case for name in STRATEGIES for case in cases(name, [("sgd", "fp32")], sizes=(64,))])


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_combination_trains(strategy: str) -> None:
    """On as few ranks as it takes, four, or eight: each optimizer and precision; over all strategies each pair."""
    place = STRATEGIES.index(strategy)
    chosen = (OPTIMIZERS[(each + place) % 2 + 2 * ((each // 2 + place // 2) % 2)] for each in range(5))
    pairs = list(zip(chosen, PRECISIONS, strict=True))
    sizes = (SMALLEST.get(strategy, 2), 4, 8)
    assert not failures(
        [case for at, size in enumerate(sizes) for case in cases(strategy, pairs[(at + place) % 3 :: 3], sizes=(size,))]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.cases("64")
def test_groups_of_experts_train(size: int) -> None:
    """Two groups, and groups of two."""
    (case,) = cases("expert_parallel", [("adamw", "bf16")], sizes=(size,))
    options = [f"strategy.expert_ranks={ranks}" for ranks in dict.fromkeys((2, size // 2))]
    assert not failures([case | {"overrides": [option, *case["overrides"]]} for option in options])


@pytest.mark.exhaustive
def test_divided_vocabularies_and_sequences_train() -> None:
    """At 4 and at 64 ranks, the last one too; of three stages the first has no norm."""
    model = ["model=gpt_tiny", "model.layers=2", "data=tokens", "data.sequence=16", "data.train_samples=256"]
    vocabulary, sequence = (f"strategy.{cut}_parallel=true" for cut in ("vocabulary", "sequence"))
    both = [vocabulary, sequence]
    wanted = [
        {"strategy": strategy, "size": size, "rank": rank, "overrides": [*model, *cut, "batch_size=128"]}
        for strategy in ("tensor_parallel", "dp_tp", "dp_pp_tp")
        for size, cut in ((4, [sequence]), (4, both), (64, both))
        for rank in (0, size - 1)
        if strategy != "tensor_parallel" or size == 4
    ]
    three = [*model, sequence, "batch_size=120", "model.layers=1", "strategy.stages=3", "strategy.micro_batches=4"]
    assert not failures(
        [*wanted, *({"strategy": "dp_pp_tp", "size": 6, "rank": rank, "overrides": three} for rank in (0, 2, 5))]
    )


def families(layers: int) -> dict[str, list[str]]:
    return {
        "mlp": [*DATA, "model=mlp", f"model.hidden={[64] * layers}".replace(" ", "")],
        "cnn": ["data=synthetic", "model=cnn_small"],
        "resnet": ["data=synthetic", "model=resnet_tiny", "model.norm=sync"],
        "vit": ["data=synthetic", "model=vit_tiny", "model.heads=8", f"model.depth={layers}"],
        "gpt": ["data=tokens", "model=gpt_tiny", "model.heads=8", f"model.layers={layers}"],
        "experts": ["data=tokens", "model=gpt_moe_tiny", "model.experts=8", f"model.layers={layers}"],
    }


ALL = {*families(1)}
SHORT = ("data.train_samples=256", "data.test_samples=64", "batch_size=64")
OF_SOME_FAMILIES = {
    "context_parallel": {"gpt"},
    "fsdp_cp": {"gpt"},
    "model_parallel_tutorial": {"mlp"},
    **dict.fromkeys(("tensor_parallel", "dp_tp"), ALL - {"resnet"}),
    "dp_pp_tp": ALL - {"resnet", "experts"},
    **dict.fromkeys(("pipeline", "dp_pp", "model_parallel", "data_parallel"), ALL - {"experts"}),
}
"""Strategies that refuse the others, whatever the number of GPUs."""
STAGE_EACH = ("pipeline", "model_parallel")
"""Strategies of which each device has layers of its own."""
LAYERS = {"model_parallel_tutorial": 3}
"""The tutorial's number; others train one."""
NOT_ON_MADE_UP_GPUS = {
    "downpour": NOT_POSSIBLE["downpour"],
    "expert_parallel": "how many rows go to whom is a value, and there are none",
    "sandblaster_lbfgs": "its vectors are a subclass of tensors, which torch does not lay over those without values",
}
"""Ranks of the last two are tried on CPUs above."""


ON_MADE_UP_GPUS = [name for name in torchs_strategies() if name not in NOT_ON_MADE_UP_GPUS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", range(4))
def test_every_family_of_models_trains_on_gpus(place: int) -> None:
    """On 1, 2 and 4 GPUs and on two nodes of 4: tensors without values, which torch never lets meet across devices.

    What torch does not allow without a GPU: DDP's reducer, which needs memory (a stand-in wraps the model), its threads
    of the backward pass (the test walks the graph), and replays of CUDA graphs.
    """
    strategies = ON_MADE_UP_GPUS[place::4]
    cells = list(product(strategies, families(1), (1, 2, 4, 8)))
    wanted = [
        {
            "strategy": strategy,
            "size": size,
            "rank": size - 1 if strategy in LAST_ONES else size // 2,
            "on_gpus": True,
            "overrides": [
                *families(max(2, size) if strategy in STAGE_EACH else LAYERS.get(strategy, 1))[family],
                *SHORT,
                *(["nodes=2"] if size == 8 else []),
                *([f"strategy.micro_batches={max(2, size)}"] if strategy == "pipeline" else []),
            ],
        }
        for strategy, family, size in cells
    ]
    one = {"strategy": "single", "size": 1, "rank": 0, "on_gpus": True, "forked": False}
    first = [one | {"overrides": [*words, *SHORT]} for words in families(1).values()]  # torch learns each operation
    found = tried([*first, *wanted])
    assert found[: len(first)] == ["ok"] * len(first)
    texts = dict(zip(cells, found[len(first) :], strict=True))
    assert {cell: text for cell, text in texts.items() if text != "ok" and not text.startswith("refused")} == {}
    trained: dict[str, set[str]] = {strategy: set() for strategy in strategies}
    for (strategy, family, _), text in texts.items():
        trained[strategy] |= {family} if text == "ok" else set()
    assert trained == {strategy: OF_SOME_FAMILIES.get(strategy, ALL) for strategy in strategies}, texts
