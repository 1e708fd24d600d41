"""Accuracy by number of epochs: as planted, each repeat once, numbers in the order of numbers."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest

from analysis import load
from analysis.report.publication import accuracies, accuracies_side_by_side
from tests.analysis.factory import Fake, component, config, failed, published

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

GAINS = (0.0, 0.01, 0.03)


def reaching(gain: float) -> Fake:
    """Test accuracy of a hundredth per epoch, and as much more."""
    return Fake(test_accuracy=lambda epoch: epoch / 100 + gain, train_accuracy=lambda epoch: epoch / 200)


@pytest.fixture
def one_length(tmp_path: Path) -> Path:
    """Three repeats of 31 epochs on one device and two, and one that ended early."""
    for repeat, gain in enumerate(GAINS):
        for strategy, devices in (("single", 1), ("ddp", 2)):
            published(config(tmp_path, strategy=strategy, devices=devices, repeat=repeat, epochs=31), reaching(gain))
    failed(config(tmp_path, repeat=3, epochs=31), "oom", "out of memory", epochs=30)
    return tmp_path


def test_one_run_answers_for_all_lengths_up_to_its_own(one_length: Path) -> None:
    found = accuracies(load(one_length))
    assert found.select("model", "configuration", "epochs", "repeats").rows() == [
        ("cnn_small", configuration, epochs, 3)
        for configuration in ("single × 1", "ddp × 2")
        for epochs in (10, 30, 31)
    ]
    row = found.row(1, named=True)
    after_30 = [0.3 + gain for gain in GAINS]
    assert row["test_accuracy_mean"] == pytest.approx(statistics.mean(after_30))
    assert row["test_accuracy_sd"] == pytest.approx(statistics.stdev(after_30))
    assert (row["test_accuracy_min"], row["test_accuracy_max"]) == (pytest.approx(0.3), pytest.approx(0.33))
    assert (row["train_accuracy_mean"], row["train_accuracy_sd"]) == (pytest.approx(0.15), pytest.approx(0.0))


@pytest.mark.exhaustive
def test_runs_of_several_lengths_are_one_row_and_a_repeat_counts_once(tmp_path: Path) -> None:
    """As publication 000 ran it: a run for each length. The one of so many epochs says what they reach."""
    for repeat in range(2):
        for epochs in (100, 10, 30):
            for model in ("cnn_large", "cnn_small"):
                parameters = 10**6 if model == "cnn_large" else 10**5
                fake = Fake(test_accuracy=lambda epoch, of=epochs: epoch / 1000 + of / 1000, parameters=parameters)  # type: ignore[misc]
                published(config(tmp_path, data="mnist", model=model, epochs=epochs, repeat=repeat), fake)
    (table,) = accuracies_side_by_side(accuracies(load(tmp_path)))
    assert table.epochs == [10, 30, 50, 100]
    assert [row.model for row in table.rows] == ["cnn_small", "cnn_large"], "the smallest first"
    for row in table.rows:
        assert row.cells == ["2.00 ± 0.00 (2)", "6.00 ± 0.00 (2)", "15.00 ± 0.00 (2)", "20.00 ± 0.00 (2)"]
        assert row.groups == tuple(f"mnist · {row.model} · epochs {epochs}" for epochs in (10, 30, 100))


def test_a_rate_that_falls_to_the_end_makes_each_length_a_training_of_its_own(tmp_path: Path) -> None:
    cosine = component("lr_schedule", "cosine")
    for epochs in (10, 30):
        published(config(tmp_path, epochs=epochs, lr_schedule=cosine), reaching(epochs / 100))
    tables = accuracies_side_by_side(accuracies(load(tmp_path)))
    assert [(table.work, table.epochs, table.rows[0].cells) for table in tables] == [
        ("digits · epochs 10", [10], ["20.00 (1)"]),
        ("digits · epochs 30", [10, 30], ["40.00 (1)", "60.00 (1)"]),
    ]
