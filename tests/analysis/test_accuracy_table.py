"""Accuracy by number of epochs: as planted, each repeat once, numbers in the order of numbers."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import polars as pl
import pytest

from analysis import load, write_report
from analysis.report.publication import accuracies, accuracies_side_by_side, accuracy_table
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
def test_the_lengths_stand_beside_each_other_on_the_page_and_in_latex(one_length: Path) -> None:
    (table,) = accuracies_side_by_side(accuracies(load(one_length)))
    assert (table.work, table.epochs) == ("digits", [10, 30, 31])
    shown = ["11.33 ± 1.53 (3)", "31.33 ± 1.53 (3)", "32.33 ± 1.53 (3)"]
    assert [(row.configuration, row.cells) for row in table.rows] == [("single × 1", shown), ("ddp × 2", shown)]
    page = write_report(one_length)
    assert '<th scope="col" class="number">31 epochs</th>' in (html := page.read_text(encoding="utf-8"))
    assert '<td class="number">31.33 ± 1.53 (3)</td>' in html
    written = (page.parent / "tables" / "accuracy.tex").read_text()
    assert r"Model & Configuration & 10 epochs & 30 epochs & 31 epochs \\" in written
    assert r"cnn\_small & ddp \texttimes{} 2 & 11.33 \textpm{} 1.53 (3) & 31.33 \textpm{} 1.53 (3) &" in written
    csv = pl.read_csv(page.parent / "tables" / "accuracy.csv")
    assert csv["epochs"].to_list() == [10, 30, 31] * 2
    assert set(csv["groups"]) == {"digits · cnn_small"}


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


@pytest.mark.exhaustive
def test_a_page_of_one_length_has_it_in_its_results_alone(tmp_path: Path) -> None:
    published(config(tmp_path))
    page = write_report(tmp_path)
    assert 'class="accuracy"' not in page.read_text(encoding="utf-8")
    assert "1 epoch" not in (written := (page.parent / "tables" / "accuracy.tex").read_text())
    assert "3 epochs" in written


def test_more_lengths_than_fit_beside_each_other_are_several_tables(tmp_path: Path) -> None:
    for epochs in (1, 2, 3, 4, 5, 6):
        published(config(tmp_path, epochs=epochs), reaching(0.5))
    written = accuracy_table(accuracies(load(tmp_path))).latex
    heads = re.findall(r"Model & Configuration & (.*) \\\\", written)
    assert heads == ["1 epoch & 2 epochs & 3 epochs & 4 epochs", "5 epochs & 6 epochs"]
    assert "(2 of 2)" in written
