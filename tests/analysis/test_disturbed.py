"""What others disturbed is shown, marked, and compared with nothing: in tables, figures, sentences and on the page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from analysis import load, summary_table
from analysis.comparison.configurations import displayed, summary
from analysis.comparison.exclusions import format_exclusions
from analysis.figures import draw
from analysis.figures.chart import DISTURBED
from analysis.metrics.columns import page_columns
from analysis.report.notes import headline
from analysis.report.page import render
from analysis.report.tables import cells
from analysis.text import DISTURBED_MARK
from tests.analysis.factory import config, published
from tests.analysis.test_compare import steady
from tests.analysis.test_machine import DDP, lost, sides

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

BUSY = {"others_time_s": lost(0.48, {2, 3})}


def terminal(runs: Runs) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(runs))
    return out.getvalue()


def figure(runs: Runs, name: str) -> Any:
    (drawn,) = draw(runs, [name])
    return drawn


@pytest.mark.cases("both")
@pytest.mark.parametrize("busy", [(BUSY, BUSY), (BUSY, {}), ({}, BUSY)], ids=["both", "one device", "several"])
def test_times_are_shown_and_no_verdict(tmp_path: Path, busy: tuple[dict[str, Any], dict[str, Any]]) -> None:
    runs = sides(tmp_path, *busy, epochs=3)
    rows = summary(runs).sort("devices")
    assert rows["disturbed"].to_list() == list(map(bool, busy))
    assert rows["repeats"].to_list() == [0 if each else 6 for each in busy]
    assert rows["steady_epoch_time_s"].to_list() == [pytest.approx(10.25), pytest.approx(5.25)]
    several = rows.row(1, named=True)
    assert (several["verdict"], several["speed_up"], several["efficiency"]) == ("disturbed", None, None)
    shown = terminal(runs)
    for time, disturbed in (("10.2", busy[0]), ("5.25", busy[1])):
        assert f"{time}{DISTURBED_MARK}" in shown if disturbed else f"{time}{DISTURBED_MARK}" not in shown
        assert time in shown
    assert "others disturbed these runs" in shown
    first = format_exclusions(runs)[0]
    assert first in headline(runs)
    for words in ("% of a core", "without speed-up or verdict", "`--retry disturbed`"):
        assert words in first
    runtime = figure(runs, "runtime")
    assert DISTURBED in runtime.finding
    assert "this does not rank them, since others disturbed runs of" in runtime.finding
    labels = {(row["configuration"], row["label"][-1] == DISTURBED_MARK) for row in values(runtime.chart)}
    assert labels == {("single × 1", bool(busy[0])), ("ddp × 2", bool(busy[1]))}
    page = render(runs, [])
    shown = first.replace("`--retry disturbed`", "<code>--retry disturbed</code>")
    assert page.count(shown) == 2, "in the headline, and among the warnings"
    assert (f"10.2{DISTURBED_MARK}" in page, f"5.25{DISTURBED_MARK}" in page) == tuple(map(bool, busy))


def test_hours_of_gpus_are_marked_as_the_times_that_they_are_made_of() -> None:
    (column,) = (each for each in page_columns("energy") if each.name == "gpu_hours")
    for disturbed, shown in ((True, f"0.250{DISTURBED_MARK}"), (False, "0.250")):
        assert [each.shown for each in cells({"gpu_hours": 0.25, "disturbed": disturbed}, [column])] == [shown]


def values(chart: Any) -> list[dict[str, Any]]:
    """The rows that a chart draws."""
    (rows,) = chart.to_dict()["datasets"].values()
    return list(rows)


@pytest.mark.exhaustive
def test_runs_that_nobody_disturbed_decide_alone(tmp_path: Path) -> None:
    for repeat in range(6):
        published(config(tmp_path, repeat=repeat), steady(10.0 + repeat / 10))
        busy = BUSY if repeat < 2 else {}
        published(config(tmp_path, repeat=repeat, **DDP), steady(20.0 if busy else 5.0 + repeat / 10, **busy))
    runs = load(tmp_path)
    row = summary(runs).filter(configuration="ddp × 2").row(0, named=True)
    assert (row["disturbed"], row["repeats"], row["speed_up_pairs"]) == (False, 4, 4)
    assert row["steady_epoch_time_s"] == pytest.approx(5.35)
    assert row["verdict"] == "faster"
    assert not displayed(runs)["disturbed"].any()
    assert f"5.35{DISTURBED_MARK}" not in terminal(runs)
    assert "Others disturbed 2 runs of ddp × 2" in format_exclusions(runs)[0]
    assert "Other runs of the same count" in format_exclusions(runs)[0]
