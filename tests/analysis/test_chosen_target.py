"""`report --target`: the accuracy that times and energies to an accuracy are told for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from analysis import load, summary, write_report
from analysis.comparison.notes import write
from analysis.comparison.summary import unreached
from analysis.figures.bars import energy, time_to_accuracy
from analysis.report import page as page_module
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, config, published

pytestmark = pytest.mark.slow

ACCURACIES = {("single", 1, 0): [0.8, 0.96, 0.97], ("ddp", 2, 0): [0.9, 0.94, 0.9999], ("ddp", 2, 1): [0.5, 0.6, 0.95]}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Epochs of 1, 2 and 3 s, and 100, 200 and 300 J on each GPU."""
    for (strategy, devices, repeat), accuracies in ACCURACIES.items():
        fake = Fake(
            epoch_time_s=lambda epoch, rank: float(epoch),
            test_accuracy=lambda epoch, of=accuracies: of[epoch - 1],  # type: ignore[misc]
            gpu_power_w=lambda epoch, rank: 100.0,
        )
        published(config(tmp_path, strategy=strategy, devices=devices, repeat=repeat), fake)
    return tmp_path


def told(results: Path, target: float | None) -> list[tuple[float | None, float | None]]:
    rows = summary(replace(load(results), target=target))
    return list(rows.select("accuracy_target", "time_to_accuracy_s").rows())


@pytest.mark.exhaustive
def test_times_are_told_for_the_chosen_accuracy_and_by_default_for_the_ladders(results: Path) -> None:
    assert told(results, None) == [(0.95, 3.0), (0.95, 6.0)]
    assert told(results, 0.5) == [(0.5, 1.0), (0.5, 1.0)]
    # Repeat 0 of ddp is there after 6 s, too; repeat 1 arrives at 0.95 exactly.
    assert told(results, 0.95) == [(0.95, 3.0), (0.95, 6.0)]
    assert told(results, 0.955) == [(0.955, 3.0), (0.955, None)]
    assert told(results, 1.0) == [(1.0, None), (1.0, None)]


@pytest.mark.exhaustive
def test_energy_and_the_figures_take_the_same_accuracy(results: Path) -> None:
    runs = replace(load(results), target=0.95)
    least = summary(runs)["energy_to_accuracy_j"].to_list()
    fewer = summary(replace(runs, target=0.5))["energy_to_accuracy_j"].to_list()
    assert least == pytest.approx([300.0, 1200.0])
    assert fewer == pytest.approx([100.0, 200.0])
    for figure in (time_to_accuracy, energy):
        drawn = figure.figure(runs)
        assert drawn is not None
        assert "95\u202f% test accuracy" in json.dumps(drawn.to_dict(), ensure_ascii=False)
    told = time_to_accuracy.finding(runs)
    assert "(the last may lie below it), the target that was chosen, is reached by single × 1 after 3.00\u202fs" in told


def test_who_does_not_reach_it_is_named_with_its_best(results: Path) -> None:
    runs = replace(load(results), target=0.96)
    (line,) = write(unreached(runs))
    assert "Not every run reaches 96\u202f% test accuracy" in line
    assert line.endswith("ddp × 2 (1 of 2 runs, best 99.99\u202f%).")
    assert line in time_to_accuracy.finding(runs)
    assert unreached(replace(runs, target=0.5)) == unreached(load(results)) == []


@pytest.mark.exhaustive
def test_the_tables_have_the_chosen_accuracy(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "drawn", lambda runs: [])
    write_report(results, target=0.95)
    rows = pl.read_csv(results / "report" / "tables" / "configurations.csv")
    assert rows.select("accuracy_target", "time_to_accuracy_s").rows() == [(0.95, 3.0), (0.95, 6.0)]
    runs = pl.read_csv(results / "report" / "tables" / "runs.csv")
    assert runs["time_to_accuracy_s"].to_list() == [3.0, 6.0, 6.0]


@pytest.mark.parametrize("target", ["0", "95", "nan"])
def test_what_is_no_accuracy_is_refused(results: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    assert cli.main(["report", str(results), "--target", target]) == 2
    assert f"--target {float(target):g}: expected a test accuracy above 0 and up to 1" in capsys.readouterr().err
    assert not (results / "report").exists()
    with pytest.raises(ConfigError, match="expected a test accuracy"):
        write_report(results, target=float(target))
