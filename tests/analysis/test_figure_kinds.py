"""What every figure does by its kind: it chooses, marks, describes and tabulates; planted numbers come out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import Runs, load, summary
from analysis.figures import bars, chart, draw, scaling, specification, svg
from analysis.figures.bars import runtime, stragglers
from analysis.figures.lines import Axis, Lines, throughput_batch
from tests.analysis.factory import config, published, steady
from tests.analysis.made_up import disturbed, rows_of

pytestmark = pytest.mark.slow

VARIANTS = 8


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One device, and two and four of eight variants: 17 configurations. The n-th variant takes 20 + 2 n s on two
    devices and half of it on four.
    """
    root = tmp_path_factory.mktemp("results")
    published(config(root), steady(40.0))
    for variant in range(1, VARIANTS + 1):
        strategy = {"name": "ddp", "bucket_mib": float(variant)}
        for devices in (2, 4):
            published(config(root, strategy=strategy, devices=devices), steady(4 * (10.0 + variant) / devices))
    return load(root)


def test_of_many_configurations_the_baseline_and_the_fastest_are_drawn_and_all_are_in_the_table(many: Runs) -> None:
    (figure,) = draw(many, ["runtime"])
    drawn = {row["configuration"] for row in rows_of(figure.chart)}
    four, two = ([f"ddp × {devices}, bucket mib {n:.1f}" for n in range(1, VARIANTS + 1)] for devices in (4, 2))
    assert drawn == {"single × 1", *four, *two[:3]}
    assert figure.remark.startswith("12 of 17 configurations are drawn: the baselines, then the fastest")
    assert figure.finding.split("\n")[1] == figure.remark
    assert figure.values is not None
    assert figure.values["configuration"].n_unique() == 17


def test_over_devices_whole_lines_are_chosen(many: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "MOST_CONFIGURATIONS", 3)
    (figure,) = draw(many, ["scaling"])
    drawn = {(row["variant"], row["x"]) for row in rows_of(figure.chart) if row["configuration"]}
    fastest = {(f"ddp, bucket mib {n}.0", devices) for n in (1, 2) for devices in (2, 4)}
    assert drawn == {("single", 1), *fastest}
    assert "3 of 9 variants of strategies are drawn" in figure.remark


def test_the_table_has_medians_and_ends_of_the_repeats(tmp_path: Path) -> None:
    for repeat, time_s in enumerate((10.0, 12.0, 17.0)):
        published(config(tmp_path, repeat=repeat), steady(time_s, first_s=2 * time_s))
    (figure,) = draw(load(tmp_path), ["runtime"])
    assert figure.values is not None
    unit = "Time per epoch, slowest rank (s)"
    columns = ("panel", "configuration", unit, "lowest", "highest", "repeats")
    assert figure.values.select(columns).rows() == [
        ("Later epochs (median)", "single × 1", 12.0, 10.0, 17.0, 3),
        ("First epoch", "single × 1", 24.0, 20.0, 34.0, 3),
    ]


def test_marks_say_what_they_are_and_their_number(tmp_path: Path) -> None:
    for repeat, time_s in enumerate((10.0, 12.0, 17.0)):
        published(config(tmp_path, repeat=repeat), steady(time_s))
    (figure,) = draw(load(tmp_path), ["runtime"])
    assert figure.chart is not None
    labels = re.findall(r'aria-label="(single[^"]*)"', svg(specification(figure.chart)))
    assert "single × 1, repeat 2; Time per epoch, slowest rank (s): 17.0" in labels
    assert "single × 1; Time per epoch, slowest rank (s): 12.0 (median of 3 repeats, 10.0 to 17.0)" in labels


def test_a_figure_whose_rows_do_not_say_what_is_disturbed_is_refused(many: Runs) -> None:
    for figure in (runtime, throughput_batch):
        forgetful = replace(figure, rows=lambda runs: runtime.rows(runs).with_columns(x=1).drop("disturbed"))
        with pytest.raises((TypeError, pl.exceptions.ColumnNotFoundError), match="disturbed"):
            forgetful.figure(many)


def test_lines_of_disturbed_runs_are_pale_and_their_points_hollow(usual: Runs) -> None:
    lines = Lines(
        order=1,
        title="Times",
        rows=lambda runs: runtime.rows(runs).with_columns(x=1),
        x=Axis("linear", "x"),
        y=Axis("zero", "s"),
        finding=lambda runs: "",
    )
    rows = rows_of(lines.figure(disturbed(usual, 3, 4)))
    assert {(row["configuration"], row["faint"]) for row in rows} == {("single × 1", False), ("ddp × 2", True)}


def test_many_repeats_are_a_band_and_a_line_is_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "MOST_POINTS", 5)
    for repeat in range(3):
        published(config(tmp_path, repeat=repeat, epochs=4), steady(10.0 + repeat))
    runs = load(tmp_path)
    rows = runtime.rows(runs).filter(panel="First epoch").drop("panel")
    epochs = pl.concat([rows.with_columns(x=pl.lit(x), panel=pl.lit("times")) for x in (1, 2, 3, 4)])
    lines = Lines(
        order=1,
        title="Times",
        rows=lambda runs: epochs,
        x=Axis("linear", "x"),
        y=Axis("zero", "s"),
        finding=lambda runs: "",
    )
    drawn = lines.figure(runs)
    assert drawn is not None
    image = svg(specification(drawn))
    assert image.count('class="mark-line role-mark') == 1
    assert image.count('class="mark-area role-mark') == 1
    assert "repeat 2" not in image


def test_a_publications_figures_are_in_reports_on_its_sweeps_only(tmp_path: Path) -> None:
    for batch in (64, 128):
        published(config(tmp_path / "own", batch_size=batch, sweep_name="mine"))
        published(config(tmp_path / "seed", batch_size=batch, sweep_name="uw_frameworks_small"))
    names = {"models", "batch_regimes", "preprocessing", "epoch_rates", "epoch_time_data", "throughput_data"}
    own, seed = ({each.name for each in draw(load(tmp_path / name))} for name in ("own", "seed"))
    assert seed - own == names
    (asked,) = draw(load(tmp_path / "own"), ["models"])
    assert asked.name == "models"


def test_scaling_is_held_against_the_devices_of_the_baseline(many: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices stand for the baseline: eight of them, 1.5 times as fast, have 75 % of the ideal 2."""
    names = {"group": "work", "strategy": "fsdp", "variant": "fsdp", "nodes": 1, "kind": "steady", "repeat": 0}
    names |= {"baseline_devices": 4, "tells_scaling": True}
    rows = [
        names | {"configuration": f"fsdp × {n}", "devices": n, "value": value, "baseline": "fsdp × 4"}
        for n, value in ((4, 1.0), (8, 1.5))
    ]
    monkeypatch.setattr(scaling, "gains", lambda runs: pl.DataFrame(rows))
    monkeypatch.setattr(chart, "_colours", lambda runs: {"fsdp": "#009e73"})
    drawn = rows_of(scaling.scaling.figure(many))
    ideal = {row["x"]: row["median"] for row in drawn if row["theory"]}
    assert ideal == {4: 1.0, 8: 2.0}
    labels = {row["x"]: row["label"] for row in drawn if row["label"]}
    assert labels == {8: "75.0\u202f%"}


def test_tails_of_steps_are_in_ms_and_imbalances_are_ratios(many: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"step_time_p50_s": 0.01, "step_time_p95_s": 0.02, "step_time_p99_s": 0.5, "rank_imbalance": 1.25}
    whole: dict[str, Any] = {name: pl.lit(value) for name, value in found.items()}
    whole["node_imbalance"] = pl.lit(None, pl.Float64)
    for module in (bars, chart):
        rows = module.displayed(many).filter(pl.col("strategy") == "single").with_columns(**whole)
        monkeypatch.setattr(module, "displayed", lambda runs, rows=rows: rows)
    summed_up = summary(many).head(1).with_columns(**whole)
    drawn = {row["panel"]: row["value"] for row in rows_of(stragglers.figure(many))}
    assert drawn == {
        "Step, median (ms)": 10.0,
        "Step, 95th percentile (ms)": 20.0,
        "Step, 99th percentile (ms)": 500.0,
        "Slowest ÷ median rank": 1.25,
    }
    assert "10.0 ms, 95th percentile 20.0 ms, 99th 500 ms; the slowest rank takes 1.25 times" in replace(
        stragglers.finding, rows=lambda runs: summed_up
    )(many)
