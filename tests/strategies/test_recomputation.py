"""Training with `activation_recomputation`: the same bits, fewer kept activations, statistics updated once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallelbench.measure.layer_memory import model_memory
from parallelbench.models.recomputation import recomputing, repeats_forward
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.strategies.test_parity import SYNTHETIC
from tests.strategies.training import configure, kept_bytes, loader_of, small, train

FULL, SELECTIVE = "activation_recomputation=full", "activation_recomputation=selective"
RESNET = [*SYNTHETIC, "model=resnet_tiny", "data.image_size=32"]
VIT = [*SYNTHETIC, "model=vit_tiny", "data.image_size=32"]


def alone(*overrides: str) -> dict[str, Any]:
    return train(0, 1, configure(*overrides, "strategy=single", "devices=1"))


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["steps"] == other["steps"]
    assert one["evaluated"] == other["evaluated"]
    for kind in ("gradients", "state"):
        torch.testing.assert_close(one[kind], other[kind], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "precision"),
    [([*RESNET, "model.norm=batch", FULL], "fp32"), ([*VIT, FULL], "bf16"), ([*VIT, SELECTIVE], "fp64")],
    ids=["resnet", "vit", "selective"],
)
def test_one_device_trains_the_same_bits(work: list[str], precision: str) -> None:
    """Among them BatchNorm's running statistics and its count of batches, which a second update would change."""
    *plain, _ = work
    same_bits(alone(*work, f"precision={precision}"), alone(*plain, f"precision={precision}"))


class Dropping(nn.Module):
    """Keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(8, 8), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand(4))
        return nn.functional.dropout(self.linear(x).relu(), 0.5)


def test_random_numbers_are_drawn_again_and_the_next_ones_are_not_changed() -> None:
    def step(*options: str) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Dropping(), Dropping(), nn.Linear(8, 2))
        recomputing(model, configure(*VIT, *options))
        model(torch.ones(5, 8)).sum().backward()
        return [*model[0].drawn, *model[1].drawn], [p.grad for p in model.parameters()], torch.rand(3)

    drawn, gradients, following = step(FULL)
    once, expected, after = step()
    assert len(once) == 2
    torch.testing.assert_close(drawn, [once[0], once[0], once[1], once[1]], rtol=0, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    torch.testing.assert_close(following, after, rtol=0, atol=0)


def test_every_layer_but_the_last_is_computed_twice_and_evaluation_once() -> None:
    run, seen = small("single", 1, FULL), list[str]()
    model = build_model(run)
    for name, layer in model.named_children():
        next(iter(layer.modules() if name == "head" else layer.children())).register_forward_hook(
            lambda *_, name=name: seen.append(name)
        )
    replica = new_replica(model, run, World())
    replica.step(next(loader_of(replica, run).train(1)))
    assert sorted(seen) == sorted(["embed", "block1", "block2"] * 2 + ["head"])
    assert [name for name in run.model.layer_names if repeats_forward(run, name)] == ["embed", "block1", "block2"]
    seen.clear()
    replica.evaluate(loader_of(replica, run).test(4))
    assert sorted(seen) == ["block1", "block2", "embed", "head"]


@pytest.mark.exhaustive
def test_kept_activations_are_the_values_between_layers() -> None:
    """What is kept for backward, counted on allocations: full keeps each block's output only, and random states."""
    kept = {
        name: {layer.name: layer.kept.per_sample for layer in model_memory(run).layers} for name, run in RUNS.items()
    }
    boundary = 12 * 16 * 8
    assert kept["full"]["block1"] == kept["full"]["block2"] == boundary
    assert kept["none"]["block1"] > kept["selective"]["block1"] > 4 * boundary
    assert kept["full"]["head"] == kept["none"]["head"], "its backward begins at once"


RUNS = {name: small("single", 1, f"activation_recomputation={name}") for name in ("none", "selective", "full")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_autograd_keeps_what_the_advisor_counts(name: str) -> None:
    """But for the logits, which the advisor counts too: the step holds them during backward, autograd does not."""
    sequence, batch = 128, 8
    tokens = ["data=tokens", f"data.sequence={sequence}", f"data.train_samples={2 * batch}", f"batch_size={batch}"]
    model = ["model=gpt_tiny", f"model.sequence={sequence}", "precision=fp32", f"activation_recomputation={name}"]
    run: Any = configure(*tokens, *model, "strategy=single")
    memory = model_memory(run)
    logits = 4 * batch * sequence * run.model.vocabulary
    counted = sum(part.kept.at(batch) for part in (*memory.layers, memory.loss)) - logits
    assert kept_bytes(0, 1, run) == pytest.approx(counted, rel=0.05)
