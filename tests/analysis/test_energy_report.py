"""The report's energies: shown where measured, dashes elsewhere, and said what they are worth."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from analysis import by, load, summary
from analysis.claims import judge
from analysis.figures import draw
from analysis.metrics.runs import per_run
from analysis.report import warnings
from analysis.runs.reader import Runs
from tests.analysis.factory import config, published
from tests.analysis.made_up import ENERGY_RATIO, IN_TWO, altered
from tests.analysis.test_claims import claim
from tests.analysis.test_metrics import powered

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three repeats of one GPU and of two that need 1.5 times the energy; one configuration whose GPU was lost."""
    root, often = tmp_path_factory.mktemp("sweep"), {"sample_every_s": 0.5, "epoch_every_s": 20.0}
    for repeat in range(3):
        published(config(root, repeat=repeat), powered(lambda e, r: 100.0, epoch_time_s=lambda e, r: 4.0, **often))
        run = config(root, repeat=repeat, strategy="ddp", devices=2)
        published(run, powered(lambda e, r: 150.0, epoch_time_s=lambda e, r: 2.0 + 0.01 * r, **often))
        run = config(root, repeat=repeat, strategy="fsdp", devices=2)
        published(run, powered(lambda e, r: None if r else 150.0, epoch_time_s=lambda e, r: 2.5, **often))
    return root / "demo"


@pytest.mark.exhaustive
def test_the_figure_draws_what_was_measured_and_says_it(sweep: Path) -> None:
    (figure,) = draw(load(sweep), ["energy"])
    assert figure.chart is not None
    rows = {(row["panel"], row["configuration"]): row["median"] for row in figure.chart.data.values}
    epoch, target = "An epoch (median of the later ones)", "To the target, 80\u202f% test accuracy"
    assert rows == pytest.approx(
        {
            (epoch, "single × 1"): 400.0,
            (epoch, "ddp × 2"): 603.0,
            (target, "single × 1"): 1200.0,
            (target, "ddp × 2"): 1809.0,
        }
    )
    assert figure.finding == (
        "A sample costs 0.284 J with single × 1; and 0.428 J with ddp × 2, 1.51 (1.51–1.51) times that of one device."
    )


@pytest.mark.exhaustive
def test_power_is_that_of_all_gpus_and_of_each(sweep: Path) -> None:
    (figure,) = draw(load(sweep), ["power"])
    assert figure.chart is not None
    rows = {(row["panel"], row["configuration"]): row["median"] for row in figure.chart.data.values}
    together, one = "All GPUs, mean of training windows", "Highest sample of one GPU"
    assert rows == pytest.approx(
        {
            (together, "single × 1"): 100.0,
            (together, "ddp × 2"): 300.0,
            (one, "single × 1"): 100.0,
            (one, "ddp × 2"): 150.0,
        }
    )
    assert figure.finding == "The GPUs draw 100 W with single × 1; and 300 W with ddp × 2."


@pytest.mark.parametrize(
    ("flags", "ratio", "note"),
    [
        (None, ENERGY_RATIO, ""),
        ("from_power sparse", ENERGY_RATIO, "less exact than others: samples more than 1 s apart (sparse), summed up"),
        ("short", None, "energies are not compared, as epochs under 2 s are too short"),
    ],
)
def test_energies_that_are_not_to_be_quoted_are_not_compared_without_a_word(
    usual: Runs, flags: str | None, ratio: float | None, note: str
) -> None:
    runs = altered(usual, "epochs", telemetry_flags=pl.when(IN_TWO).then(pl.lit(flags, pl.String)))
    found = by(runs, "configuration", "single × 1", "ddp × 2")
    (row,) = found.rows
    assert row.verdict == "faster", "its times are what they are"
    (case,) = judge(runs, claim(metric="gpu_energy_j", expect={"above": 1.1}), seed="0").cases
    assert case.verdict == ("reproduced" if ratio else "inconclusive")
    energy, table = row.ratios["gpu_energy_per_sample_j"], summary(runs).filter(configuration="ddp × 2")
    for value in (energy and energy.median, table["energy_ratio"].item()):
        assert value == (ratio and pytest.approx(ratio))
    for told in (found.notes, (*case.warnings, case.lacks)):
        said = " ".join(told)
        assert note.lower() in said.lower()
        assert bool(note) == ("nerg" in said)


def test_gpus_that_were_slowed_down_are_named(tmp_path: Path) -> None:
    """By heat in a warm-up epoch, which does not count, and in a later one of two repeats; the rest is no hindrance."""
    reasons = [{1: 0x40}, {2: 0x1, 3: 0x42}, {3: 0x40}, {2: 0x4}]
    for repeat, of_epoch in enumerate(reasons):
        fake = powered(lambda e, r: 100.0, throttle_reasons=lambda e, found=of_epoch: found.get(e, 0))
        published(config(tmp_path, repeat=repeat), fake)
    runs = load(tmp_path)
    assert sorted(per_run(runs)["steady_gpu_throttle_reasons"]) == [0x0, 0x4, 0x40, 0x43]
    said = [warning for warning in warnings.warnings(runs) if "Clocks were lowered" in warning]
    assert sorted(said) == [
        "Clocks were lowered by heat (hardware) while 2 repeats of single × 1 trained, which made their times longer.",
        "Clocks were lowered by their power limit while 1 repeat of single × 1 trained, which made their times longer.",
    ]
