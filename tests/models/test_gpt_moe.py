"""Language models with experts: sizes by formula, routing by hand, and the balance loss wherever it counts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import conf
from parallelbench.config.build import build
from parallelbench.measure.count_layers import model_counts
from parallelbench.measure.layer_memory import model_memory
from parallelbench.models.moe import GptMoe
from parallelbench.models.moe_layers import (
    MixtureOfExperts,
    RoutedBlock,
    begin,
    known,
    leave,
    unbalance,
    with_own_losses,
)
from parallelbench.training.torch_session import build_model
from tests.models.test_gpt import TINY, flop_per_sample, tokens
from tests.strategies.training import configure

ROUTED: dict[str, Any] = {"name": "gpt_moe", "experts": 5, "top_k": 2, "shared_width": None, "balance": 0.1}
LLAMA = {"positions": "rope", "mlp": "swiglu", "kv_heads": 2}


def chosen(**options: Any) -> GptMoe:
    return GptMoe(**{**TINY, "mlp_width": 24, **ROUTED, **options})


def built(model: GptMoe) -> nn.Sequential:
    torch.manual_seed(0)
    return model.build(in_channels=31, image_size=12, num_classes=31).double()


def mixture(model: GptMoe) -> MixtureOfExperts:
    return MixtureOfExperts(model)


def active_parameters(model: GptMoe) -> int:
    """All but those of the experts that were not chosen."""
    return model.parameters - model.layers * (model.experts - model.top_k) * model.expert_parameters


def numbers(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("shared_width", "tied", "others"), [*itertools.product((None, 40), (True, False), ({}, LLAMA))]
)
def test_parameters_are_those_of_the_formula(shared_width: int | None, tied: bool, others: dict[str, Any]) -> None:
    model = chosen(shared_width=shared_width, tied=tied, **others)
    assert model.parameters == numbers(built(model))
    # What computes a token is a model that has no other experts, but for the rows of its router.
    few = msgspec.structs.replace(model, experts=model.top_k)
    routers = model.layers * model.width * (model.experts - model.top_k)
    assert active_parameters(model) == numbers(built(few)) + routers


def test_the_shipped_model_has_the_parameters_that_its_file_names() -> None:
    path = Path(conf.__file__).parent / "model" / "gpt_moe.yaml"
    model = build(yaml.safe_load(path.read_text()), "model")
    assert isinstance(model, GptMoe)
    with torch.device("meta"):
        counted = numbers(model.build(in_channels=1, image_size=1, num_classes=1))
    assert counted == model.parameters
    for number in (model.parameters, active_parameters(model)):
        assert f"{number:,}" in path.read_text()


@pytest.mark.parametrize("options", [[], ["model.shared_width=40", "model.mlp=swiglu", "model.positions=rope"]])
def test_what_a_step_does_is_the_formulas_wherever_tokens_go(options: list[str]) -> None:
    run = configure("data=tokens", "data.sequence=40", "model=gpt_moe_tiny", *options)
    assert isinstance(run.model, GptMoe)
    assert 3 * sum(each.product_flop for each in model_counts(run).layers) == flop_per_sample(run.model, 40)
    matrices = [each for name, each in build_model(run).named_parameters() if each.dim() > 1 and "embed" not in name]
    every = sum(each.numel() for each in matrices)
    idle = run.model.layers * (run.model.experts - run.model.top_k)
    one = (3 if run.model.mlp == "swiglu" else 2) * run.model.width * run.model.hidden_units
    biases = sum(each.numel() for each in matrices if each.dim() == 2 and each.shape[0] == run.model.experts)
    biases -= run.model.layers * run.model.width * run.model.experts  # routers have the shape of stacked biases
    attention = 12 * run.model.layers * run.model.width * 40
    assert flop_per_sample(run.model, 40) == 40 * (6 * (every - biases - idle * one) + attention)


@pytest.mark.parametrize("others", [{}, {**LLAMA, "shared_width": 40}])
def test_no_samples_have_no_logits(others: dict[str, Any]) -> None:
    """A rank's part of the last test samples may be empty."""
    assert built(chosen(**others)).eval()(tokens(0)).shape == (0, 12, 31)


@pytest.mark.parametrize("others", [{}, {**LLAMA, "shared_width": 40}])
def test_each_token_is_computed_by_its_own_experts(others: dict[str, Any]) -> None:
    moe = mixture(chosen(**others)).double().eval()
    nn.init.normal_(moe.router.weight)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    y = moe(x)
    for place in itertools.product(range(3), range(7)):
        token = x[place]
        probabilities = (moe.router.weight @ token).softmax(0)
        best = sorted(range(5), key=lambda index: -probabilities[index])[:2]
        total = sum(probabilities[index] * alone(moe.experts, index, token) for index in best)
        expected = total / probabilities[best].sum()
        if moe.shared is not None:
            expected = expected + moe.shared(token)
        torch.testing.assert_close(y[place], expected, rtol=1e-10, atol=1e-12)


def alone(experts: nn.Module, index: int, token: Tensor) -> Tensor:
    """One expert on one token."""
    weights = {name: each[index] for name, each in experts.named_parameters()}
    first = weights["fc1"] @ token + weights.get("bias1", 0)
    hidden = F.silu(weights["gate"] @ token) * first if "gate" in weights else F.gelu(first)
    return weights["fc2"] @ hidden + weights.get("bias2", 0)


def test_an_expert_that_no_token_chose_has_gradients_of_zero() -> None:
    moe = mixture(chosen(balance=0.0)).double()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:2] = 1.0
    moe(torch.rand(2, 3, 16, dtype=torch.float64)).sum().backward()
    for name, each in moe.experts.named_parameters():
        assert each.grad is not None
        assert each.grad[:2].any(), name
        assert not each.grad[2:].any(), name


def test_the_balance_loss_is_switch_transformers() -> None:
    probabilities = torch.randn(3, 8, 5, dtype=torch.float64).softmax(-1)
    choices = probabilities.topk(2, dim=-1).indices
    for sample in range(3):
        shares = [(choices[sample] == index).sum().item() / 16 for index in range(5)]
        means = probabilities[sample].mean(0)
        by_hand = 5 * sum(share * mean for share, mean in zip(shares, means, strict=True))
        torch.testing.assert_close(unbalance(probabilities, choices)[sample], by_hand)
    even = torch.full((1, 5, 5), 0.2, dtype=torch.float64)
    assert unbalance(even, torch.tensor([[[t, (t + 1) % 5] for t in range(5)]])).item() == pytest.approx(1.0)
    alike = torch.zeros(1, 4, 5, dtype=torch.float64)
    alike[..., 0] = 1.0
    assert unbalance(alike, torch.zeros(1, 4, 1, dtype=torch.int64)).item() == pytest.approx(5.0)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def test_training_losses_have_the_blocks_terms_once_and_test_losses_none() -> None:
    model = chosen(balance=0.5)
    layers, x, labels = built(model), tokens(), tokens(3)
    loss = model.with_own_loss(mean_loss)
    found: list[Tensor] = []
    for block in (layers.block1, layers.block2):
        assert isinstance(block, RoutedBlock)
        block.moe.register_forward_hook(lambda moe, given, _: found.append(by_hand(moe, given[0])))
    logits = layers(x)
    expected = mean_loss(logits, labels) + 0.5 * sum(found)
    assert len(found) == 2
    torch.testing.assert_close(loss(logits, labels), expected)
    assert loss(logits, labels) == mean_loss(logits, labels), "they were taken"
    layers(x)
    layers(x)
    torch.testing.assert_close(loss(logits, labels), expected)
    layers(x)
    logits = layers.eval()(x)
    assert loss(logits, labels) == mean_loss(logits, labels)
    assert chosen(balance=0.0).with_own_loss(mean_loss) is mean_loss


def by_hand(moe: nn.Module, x: Tensor) -> Tensor:
    probabilities = (x @ moe.router.weight.T).softmax(-1)  # type: ignore[operator, union-attr]
    return unbalance(probabilities, probabilities.topk(2, dim=-1).indices).mean()


def test_the_loss_of_a_batch_is_the_mean_of_its_parts() -> None:
    model = chosen(balance=2.0)
    layers, x, labels = built(model), tokens(6), tokens(6)
    nn.init.normal_(layers.block1.moe.router.weight)  # type: ignore[union-attr, arg-type]
    loss = model.with_own_loss(mean_loss)
    whole = loss(layers(x), labels)
    parts = [loss(layers(a), b) for a, b in zip(x.chunk(3), labels.chunk(3), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-12, atol=1e-12)
    assert whole > mean_loss(layers.eval()(x), labels) + 2 * 2 * 0.99, "each of two blocks adds its coefficient or more"


def test_layers_that_backward_computes_once_more_leave_nothing() -> None:
    model = chosen(balance=0.5)
    layers, x, labels = built(model), tokens(), tokens(3)
    loss = model.with_own_loss(mean_loss)

    def gradients(call: Any) -> list[Tensor]:
        layers.zero_grad()
        hidden = layers.embed(x)  # type: ignore[operator]
        for block in (layers.block1, layers.block2):
            hidden = call(block, hidden)
        loss(layers.head(hidden), labels).backward()  # type: ignore[operator]
        return [each.grad.clone() for each in layers.parameters() if each.grad is not None]

    plain = gradients(lambda block, hidden: block(hidden))
    again = gradients(lambda block, hidden: checkpoint(block, hidden, use_reentrant=False))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    nothing = with_own_losses(lambda *_: torch.zeros(()))
    assert nothing(x, labels) == 0, "the second pass over block1 has collected nothing"
    for collects in (True, False):
        begin(collects=collects)
        leave(torch.ones(()))
        assert nothing(x, labels) == collects


@pytest.mark.exhaustive
def test_counts_of_tensors_without_values_are_as_equal_as_can_be() -> None:
    assert known(torch.empty(4, dtype=torch.int64, device="meta"), total=10) == [3, 3, 2, 2]
    assert known(torch.tensor([7, 0, 3]), total=10) == [7, 0, 3]
    assert built(chosen()).to("meta").eval()(tokens().to("meta")).shape == (3, 12, 31)
    small = ("data=tokens", "data.sequence=12", "model=gpt_moe_tiny", "model.layers=1")
    narrow, wide = (model_memory(configure(*small, f"model.top_k={top_k}")) for top_k in (2, 4))
    # Of each further expert per token, the hidden units before and after their activation are kept, in fp64.
    more = wide.layers[1].kept.per_sample - narrow.layers[1].kept.per_sample
    assert more > 2 * 2 * 12 * 128 * 8
