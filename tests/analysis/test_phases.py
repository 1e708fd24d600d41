"""Attributed steps in the analysis: means that sum, bubbles and rings beside their formulas, figures that say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from analysis import load
from analysis.figures import draw
from analysis.metrics.runs import PHASES, measured_bubbles, phase_times, ring_times
from parallelbench.world import spans
from tests.analysis.factory import Fake, config, published
from tests.analysis.made_up import rows_of

pytestmark = pytest.mark.slow

BUSY = {"data_wait": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0, "other": 1.0}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One device, ddp on two of which one waits, and a pipeline; the formulas' numbers are round."""
    root = tmp_path_factory.mktemp("results")
    published(config(root), Fake(phases=lambda rank, step: BUSY))
    waiting = Fake(
        phases=lambda rank, step: BUSY | {"communication": 4.0 * rank * step},
        probed=(0.25, 100.0),
        sent=lambda epoch, rank: (1000 * 10, 0, 0),
    )
    published(config(root, devices=2, strategy="ddp"), waiting)
    idle = Fake(phases=lambda rank, step: BUSY | {"bubble": 3.0}, theoretical_bubble=0.125)
    published(config(root, devices=2, strategy="pipeline"), idle)
    return root


def by_strategy(found: pl.DataFrame, results: Path) -> dict[str, dict[str, float | None]]:
    names = dict(load(results).run.select("run_id", "strategy").rows())
    return {names[row.pop("run_id")]: row for row in found.rows(named=True)}


def test_the_phases_are_those_that_are_measured() -> None:
    assert PHASES == spans.PHASES


def test_means_over_ranks_and_steps_sum_to_the_step(results: Path) -> None:
    found = by_strategy(phase_times(load(results)), results)
    for row in found.values():
        step_time_s = row.pop("step_time_s")
        assert sum(filter(None, row.values())) == step_time_s
    # Rank 0 waits not at all, rank 1 for 4 and 8 s.
    assert found["ddp"]["communication_s"] == (0 + 0 + 4 + 8) / 4
    assert found["single"]["communication_s"] is found["ddp"]["bubble_s"] is None


def test_a_run_of_which_a_rank_was_not_attributed_has_neither_phases_nor_a_bubble(results: Path) -> None:
    runs = load(results)
    lost = (pl.col("rank") == 1) & pl.col("run_id").is_in(
        runs.run.filter(pl.col("strategy") == "pipeline")["run_id"].implode()
    )
    runs = replace(runs, tables={**runs.tables, "phases": runs.phases.filter(~lost)})
    assert set(by_strategy(phase_times(runs), results)) == {"single", "ddp"}
    assert measured_bubbles(runs).is_empty()


def test_a_bubble_is_its_share_of_the_schedules_time(results: Path) -> None:
    assert by_strategy(measured_bubbles(load(results)), results) == {"pipeline": {"measured_bubble": 3 / (3 + 4 + 8)}}


def test_a_ring_takes_its_latencies_and_its_bytes(results: Path) -> None:
    runs = load(results)
    steps = runs.run["steps_per_epoch"][0]
    expected = 2 * (2 - 1) * 0.25 + 10_000 / steps / 100.0
    assert by_strategy(ring_times(runs), results) == {"ddp": {"exposed_s": 3.0, "ring_s": pytest.approx(expected)}}


@pytest.mark.exhaustive
def test_the_figures_show_and_say_what_was_measured(results: Path) -> None:
    figures = {each.name: each for each in draw(load(results), ["attribution", "bubble", "waiting"])}
    chart = figures["attribution"].chart
    assert chart is not None
    values = json.dumps(chart.to_dict())
    assert all(f'"phase": "{phase}"' in values for phase in ("forward", "exposed communication", "bubble"))
    assert '"phase": "host to device"' not in values
    finding = figures["attribution"].finding
    assert "single × 1 spends 50.0" in finding  # 8 of 16 s in backward
    assert "pipeline × 2" in figures["bubble"].finding
    assert "20.0\u202f% (by formula 12.5\u202f%)" in figures["bubble"].finding
    runs = load(results)
    ring_ms = by_strategy(ring_times(runs), results)["ddp"]["ring_s"] * 1e3
    waiting = figures["waiting"]
    assert f"ddp × 2 waits 3,000 ms (a ring: {ring_ms:,.0f} ms)" in waiting.finding
    rows = rows_of(waiting.chart)
    (found,) = {(row["configuration"], row["value"], row["ring"]) for row in rows}
    assert found == ("ddp × 2", 3000.0, pytest.approx(ring_ms))
