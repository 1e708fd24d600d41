"""Embedding, head and loss divided by vocabulary: the loss of parts, what ranks hold; norms on divided tokens."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from analysis.advisor.strategies import suite_phases
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.models.gpt import Gpt
from parallelbench.strategies.mesh import device_mesh
from parallelbench.strategies.state import local
from parallelbench.strategies.tensor.vocabulary import DividedCrossEntropy
from parallelbench.training.checks.components import check_traits, traits_of
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import loader_of, prepared, small

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


def seen(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """What a step sends, rows of the vocabulary that the rank holds, widths of logits, and tokens that norms see."""
    replica: Any = prepared(run, rank, size)
    module, _ = replica.trained()
    rows = {len(local(each)) for name, each in module.named_parameters() if name in ("embed.tokens.weight", HEAD)}
    widths, tokens = set[int](), set[int]()
    for name, each in module.named_modules():
        if f"{name}.weight" == HEAD:
            each.register_forward_hook(lambda _head, _inputs, logits: widths.add(logits.shape[-1]))
        if name.rpartition(".")[2].startswith("norm"):
            each.register_forward_pre_hook(lambda _norm, inputs: tokens.add(inputs[0].shape[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of names that torch gives up
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    return {"sent": replica.traffic.activation, "rows": rows, "widths": widths, "tokens": tokens}


@pytest.mark.slow
def test_tensor_ranks_hold_and_see_their_part(tmp_path: Path) -> None:
    run = on_least("tensor_parallel", DIVIDED, "strategy.sequence_parallel=true")
    for rank in run_ranks(seen, 2, tmp_path, run):
        assert (rank["rows"], rank["widths"], rank["tokens"]) == ({12}, {12}, {6})


HEAD = "head.linear.weight"


@pytest.mark.exhaustive
def test_stages_count_the_loss_where_it_is(tmp_path: Path) -> None:
    run = on_least("dp_pp_tp", DIVIDED, "strategy.stage_map={embed: 0, block1: 0, block2: 1, head: 1}")
    labels, values = 24 * 12, 24 * 12 * 16
    # Forward the first stage sends its values once, backward the second their gradient.
    first, second = values * (4 + 1), values * (4 + 1) + 4 * labels
    ranks = run_ranks(seen, 4, tmp_path, run)
    assert [rank["sent"] for rank in ranks] == [8 * (values + each) for each in (first, first, second, second)]
    assert [rank["rows"] for rank in ranks] == [{12}] * 4


def test_the_advisor_says_that_it_has_no_formula() -> None:
    class Job:
        run = on_least("tensor_parallel", DIVIDED)

    with pytest.raises(ConfigError, match=r"no formula knows what strategy\.vocabulary_parallel=true"):
        suite_phases(Job(), {})  # type: ignore[arg-type]


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
