"""Losses: torch's own values, in every strategy like on one device, known to the checks, or refused in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F

from parallelbench.config.components import Batch
from parallelbench.errors import ConfigError
from parallelbench.optim.losses import CrossEntropy, MeanSquaredError
from parallelbench.training.checks.components import check_scores
from parallelbench.training.checks.plain import PlainModel
from parallelbench.training.torch_session import build_model
from parallelbench.world.numerics import Numerics, sums
from parallelbench.world.world import World
from tests.strategies.test_parity import MODELS, SYNTHETIC
from tests.strategies.training import configure
from tests.test_closing import SMALL, closed, failed, passed

PLAIN, SMOOTH = (CrossEntropy(name="x", label_smoothing=smoothing) for smoothing in (0.0, 0.1))
SQUARES = MeanSquaredError(name="x")
CHOICES = (["loss=mse"], ["loss.label_smoothing=0.1"])


def a_batch(*positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of 12 samples of 5 classes, at so many positions, and labels."""
    torch.manual_seed(0)
    return torch.randn(12, *positions, 5, dtype=torch.float64), torch.randint(5, (12, *positions))


def test_values_are_torchs() -> None:
    logits, labels = a_batch()
    one_hot = F.one_hot(labels, 5).double()
    torch.testing.assert_close(PLAIN.build()(logits, labels), torch.nn.CrossEntropyLoss()(logits, labels))
    smooth = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(SMOOTH.build()(logits, labels), smooth(logits, labels))
    torch.testing.assert_close(SQUARES.build()(logits, labels), torch.nn.MSELoss()(logits, one_hot))
    by_hand = sum(
        (row[c] - float(c == label)) ** 2 for row, label in zip(logits, labels, strict=True) for c in range(5)
    )
    assert SQUARES.build()(logits, labels).item() == pytest.approx(float(by_hand) / 60)


@pytest.mark.parametrize("loss", [PLAIN, SMOOTH, SQUARES])
def test_a_mean_is_over_all_positions_and_that_of_its_parts(loss: Any) -> None:
    mean = loss.build()
    logits, labels = a_batch(3)
    each = [mean(logits[:, place], labels[:, place]) for place in range(3)]
    torch.testing.assert_close(mean(logits, labels), torch.stack(each).mean())
    parts = [mean(*part) for part in zip(logits.chunk(4), labels.chunk(4), strict=True)]
    torch.testing.assert_close(mean(logits, labels), torch.stack(parts).mean())


def test_correct_predictions_are_counted_at_every_position() -> None:
    logits, labels = a_batch(3)
    loss = PLAIN.build()(logits, labels)
    loss_sum, correct = sums(loss, logits, labels).tolist()
    assert loss_sum == pytest.approx(12 * loss.item())
    assert correct == sum(int(logits[n, p].argmax() == labels[n, p]) for n in range(12) for p in range(3))
    both = sums(loss, logits, labels)
    both += sums(loss, logits, labels)
    assert both.tolist() == pytest.approx([24 * loss.item(), 2 * correct]), "added up at once"


def test_half_types_are_widened_first() -> None:
    logits, labels = a_batch()
    numerics = Numerics("bf16", "cpu", loss=SQUARES.build())
    assert numerics.loss(logits.bfloat16(), labels).dtype == torch.float32


class Reduced(CrossEntropy, frozen=True, kw_only=True):
    """Cross entropy as a user may have written it; `name` says how."""

    def build(self) -> Any:
        weight = torch.arange(1.0, 11.0, dtype=torch.float64) if self.name == "weighted" else None
        reduction = "mean" if self.name in ("weighted", "logarithm") else self.name
        if self.name == "number":
            return lambda logits, labels: F.cross_entropy(logits, labels).item()
        if self.name == "detached":
            return lambda logits, labels: F.cross_entropy(logits, labels).detach()
        if self.name == "logarithm":
            return lambda logits, labels: F.nll_loss((logits - 2).log(), labels)
        return lambda logits, labels: F.cross_entropy(logits, labels, weight=weight, reduction=reduction)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sum", r"but it gives \d.*, and by its two halves "),
        ("weighted", "and by its two halves "),
        ("none", r"but it gives \(8,\)"),
        ("number", "but it gives float"),
        ("detached", r"detached from the logits, .*without detach\(\)"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused_before_training(name: str, found: str) -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], "strategy=single")
    loss = Reduced(name=name, label_smoothing=0.0)
    with pytest.raises(ConfigError, match=f"loss={name}: the function that loss.build returns must give .*{found}"):
        check_scores(msgspec.structs.replace(run, loss=loss), "cpu")


@pytest.mark.parametrize("loss", [PLAIN, SMOOTH, SQUARES, Reduced(name="mean", label_smoothing=0.0)])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_means_are_not_refused(loss: Any, precision: str) -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], "strategy=single", f"precision={precision}")
    check_scores(msgspec.structs.replace(run, loss=loss), "cpu")
    unknown = Reduced(name="logarithm", label_smoothing=0.0)
    check_scores(msgspec.structs.replace(run, loss=unknown), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_the_closing_check_takes_the_same_loss(choice: list[str]) -> None:
    run = configure(*SMALL, "strategy=single", *choice)
    rows = closed(World(), run)
    assert failed(rows) == set()
    assert {"loss", "gradients", "update", "evaluation loss", "evaluation accuracy"} <= passed(rows)

    def another(replica: Any, k: int) -> None:
        replica._numerics.training_loss = lambda logits, labels: F.cross_entropy(logits, labels)

    assert {"loss", "gradients"} <= failed(closed(World(), run, another))


def test_plain_code_evaluates_by_it() -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], "strategy=single")
    model = build_model(run).double()
    images, labels = torch.randn(7, 1, 32, 32, dtype=torch.float64), torch.arange(7)
    batches = [Batch(images[:4], labels[:4], 4), Batch(images[4:], labels[4:], 3), Batch(images[:0], labels[:0], 0)]
    plain = PlainModel(model, SQUARES.build(), device=torch.device("cpu"), pieces=1)
    loss_sum, correct = plain.evaluate(dict(model.state_dict()), batches, precision="fp64")
    logits = model(images)
    assert loss_sum / 7 == pytest.approx(F.mse_loss(logits, F.one_hot(labels, 10).double()).item())
    assert correct == (logits.argmax(1) == labels).sum().item()
