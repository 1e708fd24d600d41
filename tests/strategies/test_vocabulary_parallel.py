"""Embedding, head and loss divided by vocabulary: like whole ones, sent as the formula says, or refused in words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from analysis.advisor.strategies import suite_phases
from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.strategies.mesh import device_mesh
from parallelbench.strategies.state import local
from parallelbench.strategies.tensor import vocabulary
from parallelbench.strategies.tensor.vocabulary import DividedCrossEntropy
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.recorded import Recorded
from tests.strategies.test_fake_groups import failures
from tests.strategies.test_gpt_parity import SMALL, TIED, TOKENS, small
from tests.strategies.training import configure, loader_of
from tests.test_parity_gate import gate

DIVIDED = "strategy.vocabulary_parallel=true"
DEVICES = {"tensor_parallel": 2, "dp_tp": 4, "dp_pp_tp": 4}


def on_least(strategy: str, *options: str) -> RunConfig:
    return small(strategy, DEVICES[strategy], *options)


def logits_and_labels(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 5 samples of 3 tokens, 8 entries: any, so large that exp overflows, or so coarse that many are equal."""
    torch.manual_seed(3)
    logits, labels = torch.randn(5, 3, 8, dtype=torch.float64), torch.randint(8, (5, 3))
    return {"any": logits, "large": 1e4 * logits, "equal": logits.round()}[kind], labels


def of_parts(rank: int, size: int, kind: str, smoothing: float) -> dict[str, torch.Tensor]:
    mesh = device_mesh(World(rank=rank, size=size, local_rank=rank), tensor=size)
    logits, labels = logits_and_labels(kind)
    part = logits.chunk(size, dim=-1)[rank].clone().requires_grad_()
    loss = DividedCrossEntropy(mesh, label_smoothing=smoothing)
    mean = loss(part, labels)
    mean.backward()
    assert part.grad is not None
    assert loss.correct_from_parts is not None
    return {"loss": mean.detach(), "gradient": part.grad, "correct": loss.correct_from_parts}


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["any", "large", "equal"])
@pytest.mark.cases("any-*", "equal-0.0")
def test_the_loss_of_parts_is_that_of_the_whole(kind: str, smoothing: float, tmp_path: Path) -> None:
    logits, labels = logits_and_labels(kind)
    logits.requires_grad_()
    whole = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    whole.backward()
    assert logits.grad is not None
    ranks = run_ranks(of_parts, 4, tmp_path, kind, smoothing)
    for found, gradient in zip(ranks, logits.grad.chunk(4, dim=-1), strict=True):
        torch.testing.assert_close(found["loss"], whole.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found["gradient"], gradient, rtol=0, atol=1e-9)
        assert torch.equal(found["correct"], logits.argmax(-1) == labels), "of equal logits the first is predicted"


def seen_and_counted(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """What a step sends, as counted and as the process groups were asked for; and what the rank holds and computes."""
    replica: Any = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    module, _ = replica.trained()
    rows = {len(local(each)) for name, each in module.named_parameters() if name in ("embed.tokens.weight", HEAD)}
    widths: list[int] = []
    heads = [each for name, each in module.named_modules() if f"{name}.weight" == HEAD]
    for head in heads:
        head.register_forward_hook(lambda _head, _inputs, logits: widths.append(logits.shape[-1]))
    with Recorded() as recorded:
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    sent = replica.traffic.activation
    return {"sent": sent, "recorded": dict(recorded.carried), "rows": rows, "widths": set(widths)}


HEAD = "head.linear.weight"


@pytest.mark.cases("0")
@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0, 1])
def test_tensor_ranks_send_what_the_formula_says_and_hold_their_part(smoothing: int, tmp_path: Path) -> None:
    run = on_least("tensor_parallel", DIVIDED, f"loss.label_smoothing={0.1 * smoothing}")
    labels = 24 * 12
    # Each block takes values four times and gives them twice, the embedding gives, the head takes them. Then the loss.
    summed = 8 * labels * (16 * (2 * 6 + 2) + 4 + smoothing)
    for rank in run_ranks(seen_and_counted, 2, tmp_path, run):
        assert rank["recorded"] == {"allreduce": summed}
        assert rank["sent"] == 2 * (2 - 1) / 2 * summed
        assert (rank["rows"], rank["widths"]) == ({12}, {12})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_stages_count_the_loss_where_it_is(tmp_path: Path) -> None:
    run = on_least("dp_pp_tp", DIVIDED, "strategy.stage_map={embed: 0, block1: 0, block2: 1, head: 1}")
    labels, values = 24 * 12, 24 * 12 * 16
    # Forward the first stage sends its values once, backward the second their gradient.
    first, second = values * (6 + 1), values * (6 + 1) + 4 * labels
    ranks = run_ranks(seen_and_counted, 4, tmp_path, run)
    assert [rank["sent"] for rank in ranks] == [8 * (values + each) for each in (first, first, second, second)]
    assert [rank["rows"] for rank in ranks] == [{12}] * 4


def unsummed(how: str) -> Any:
    genuine = vocabulary._reduced
    return lambda values, asked, mesh: values if asked == how else genuine(values, asked, mesh)


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "each rank has its own greatest logit": (vocabulary, "_reduced", lambda: unsummed("max")),
    "parts are not summed": (vocabulary, "_reduced", lambda: unsummed("sum")),
    "gradients are not summed": (
        vocabulary._Copied,
        "backward",
        lambda: staticmethod(lambda _ctx, gradient: (gradient, None)),
    ),
    "each rank takes the first part": (
        vocabulary,
        "_own",
        lambda: lambda tokens, width, _mesh: (tokens.clamp(0, width - 1), tokens >= width),
    ),
}


def broken_gate(rank: int, size: int, run: RunConfig, mutation: str) -> list[dict[str, Any]]:
    owner, name, make = MUTATIONS[mutation]
    with patch.object(owner, name, make()):
        return gate(rank, size, run)


@pytest.mark.cases("parts are not summed")
@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_is_wrong_is_caught(mutation: str, tmp_path: Path) -> None:
    rows = run_ranks(broken_gate, 2, tmp_path, on_least("tensor_parallel", DIVIDED), mutation)[0]
    assert not all(row["passed"] for row in rows)


def continued(rank: int, size: int, run: RunConfig) -> bool:
    """Whether a replica that loads another's state goes on as that does, bit for bit."""
    world, losses = World(rank=rank, size=size, local_rank=rank), []
    replica = run.strategy.prepare(build_model(run), run, world)
    batches = loader_of(replica, run).train(epoch=1)
    replica.step(next(batches))
    state = copy.deepcopy(replica.local_state())
    again = run.strategy.prepare(build_model(run), run, world)
    again.load_local_state(state)
    second = next(batches)
    for each in (replica, again):
        result = each.step(second)
        losses.append(None if result is None else result.tolist())
    mine, its = (each.local_state()["tensors"] for each in (replica, again))
    return losses[0] == losses[1] and all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("strategy", DEVICES)
@pytest.mark.cases("dp_tp")
def test_a_checkpoint_goes_on_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    tied = () if strategy == "dp_pp_tp" else TIED
    run = on_least(strategy, DIVIDED, *tied, "optimizer=adam")
    assert run_ranks(continued, DEVICES[strategy], tmp_path, run) == [True] * DEVICES[strategy]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_that_are_not_there_train() -> None:
    """At 4 and at 64 ranks, the last one too; on what GPUs would do."""
    model = ["model=gpt_tiny", "model.layers=2", "data=tokens", "data.sequence=16", "data.train_samples=256"]
    cases = [
        {"strategy": strategy, "size": size, "rank": rank, "overrides": [*model, *more, DIVIDED, "batch_size=128"]}
        for strategy, more in (("tensor_parallel", ["model.heads=4"]), ("dp_tp", []), ("dp_pp_tp", []))
        for size in (4, 64)
        for rank in (0, size - 1)
        if strategy != "tensor_parallel" or size == 4
    ]
    assert not failures(cases)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.vocabulary=25"], ["model.vocabulary=25", "among 2 tensor ranks"]),
        (["loss=mse"], ["loss=mse"]),
        (["compile=true"], ["never tried"]),
    ],
)
@pytest.mark.parametrize("strategy", DEVICES)
def test_what_cannot_be_divided_is_refused_with_the_fix(strategy: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"vocabulary_parallel=true is refused.*: choose strategy\.vocab.*=false, or"
    ) as error:
        on_least(strategy, DIVIDED, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_model_without_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model=mlp has no vocabulary to divide"):
        configure("data=synthetic", "model=mlp", "strategy=tensor_parallel", "devices=2", DIVIDED)


@pytest.mark.parametrize("strategy", DEVICES)
def test_runs_without_it_keep_their_ids(strategy: str) -> None:
    plain, divided = on_least(strategy), on_least(strategy, DIVIDED)
    assert "vocabulary_parallel" not in to_mapping(plain)["strategy"]
    assert to_mapping(divided)["strategy"]["vocabulary_parallel"] is True
    assert run_id(plain) != run_id(divided)
    assert [from_mapping(to_mapping(run)) for run in (plain, divided)] == [plain, divided]


def test_the_advisor_says_that_it_has_no_formula() -> None:
    class Job:
        run = on_least("tensor_parallel", DIVIDED)

    with pytest.raises(ConfigError, match=r"no formula knows what strategy\.vocabulary_parallel=true"):
        suite_phases(Job(), {})  # type: ignore[arg-type]


def test_shapes_are_those_of_the_suite() -> None:
    assert "model.vocabulary=24" in SMALL, "what the bytes above rest on"
    assert "data.sequence=12" in TOKENS
