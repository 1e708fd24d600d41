"""Losses and accuracies of tokens, as every strategy sums them up, against a plain loop over positions in fp64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from parallelbench.config.components import Arrays
from parallelbench.optim.losses import CrossEntropy
from parallelbench.results.publish import configured_columns
from parallelbench.training.torch_session import build_model
from parallelbench.world.numerics import Sums, sums
from tests.helpers import TINY, configured
from tests.ranks import run_ranks
from tests.strategies.training import configure, trained

WINDOW = 10
DATA = (
    *("data=tokens", f"data.sequence={WINDOW}", "data.vocabulary=7", "data.train_samples=48", "data.test_samples=21"),
    *("model=gpt_tiny", "model.layers=1", "model.width=16", "model.heads=2", "model.sequence=16", "model.vocabulary=7"),
)


def of_windows(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """The summed loss of all positions, nats, and how many predictions are right: one position after the other."""
    loss, right = 0.0, 0
    for window, wanted in zip(logits.tolist(), labels.tolist(), strict=True):
        for scores, label in zip(window, wanted, strict=True):
            loss += math.log(math.fsum(math.exp(score) for score in scores)) - scores[label]
            right += max(range(len(scores)), key=scores.__getitem__) == label
    return loss, right


def test_a_window_has_a_prediction_at_each_token() -> None:
    assert configured_columns(configure(*DATA))["tokens_per_sample"] == WINDOW
    assert configured_columns(configured(*TINY))["tokens_per_sample"] is None, "images are no tokens"


def test_sums_of_unequal_batches_are_those_of_all_positions() -> None:
    torch.manual_seed(0)
    mean, total, loss, right = CrossEntropy(name="x", label_smoothing=0.0).build(), Sums([]), 0.0, 0
    for samples in (4, 1, 4, 3):
        logits, labels = torch.randn(samples, WINDOW, 7).double(), torch.randint(7, (samples, WINDOW))
        total += sums(mean(logits, labels), logits, labels)
        loss, right = (a + b for a, b in zip((loss, right), of_windows(logits, labels), strict=True))
    assert total.tolist() == pytest.approx([loss / WINDOW, right], rel=1e-12), "a sample's loss is a mean over tokens"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("strategy=single",), ("strategy=ddp", "devices=2"), ("strategy=pipeline", "devices=2")],
    ids=lambda options: options[0],
)
@pytest.mark.cases("*ddp*")
def test_an_epochs_loss_and_accuracy_are_those_of_a_plain_loop(options: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks own unequal parts of 21 windows, or the last stage owns all."""
    run = configure(*DATA, *options, "epochs=1", "batch_size=24")
    rows, state = run_ranks(trained, run.devices, tmp_path, run)[0]
    model = build_model(run).double()
    model.load_state_dict(state)
    arrays: Arrays = run.data.load(Path("nowhere"))
    labels = torch.from_numpy(arrays.test_labels)
    with torch.no_grad():
        loss, right = of_windows(model(torch.from_numpy(arrays.test_images).long()), labels)
    (row,) = rows["epochs"]
    assert row["test_loss"] == pytest.approx(loss / labels.numel(), rel=1e-10), "nats per token"
    assert row["test_accuracy"] == pytest.approx(right / labels.numel(), rel=1e-12), "of all positions"
    assert 0 < row["test_accuracy"] < 1
