"""Results of an earlier release load, mix with today's, and give the numbers that the release itself gave.

`old/results.zip` holds its results folder without the telemetry journals of published runs: two repeats of single × 1
and ddp × 2, an oversubscribed ddp × 4, downpour, and a run whose loss was no number. `old/answers.json` holds what its
`summary` and `facts` gave.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from analysis import load, per_run, summary
from analysis.comparison.configurations import gains
from analysis.runs.reader import Runs
from launch.launcher import glance
from parallelbench.config.identity import run_id
from parallelbench.results.folder import find_runs
from parallelbench.results.tables import TABLES_VERSION
from tests.analysis.factory import config, published

OLD = Path(__file__).parent / "old"
RENAMED = {
    "gpu_power_mean_w": "steady_gpu_power_mean_w",
    "gpu_power_max_w": "steady_gpu_power_max_w",
    "gpu_throttle_reasons": "steady_gpu_throttle_reasons",
}
"""Columns that were called otherwise then."""
REDEFINED = ("speed_up", "speed_up_low", "speed_up_high", "efficiency", "efficiency_with_startup")
"""Medians of two ratios were arithmetic then, and two repeats had an interval."""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with zipfile.ZipFile(OLD / "results.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def answers(table: str) -> list[dict[str, Any]]:
    """What the release said, by today's names."""
    rows = json.loads((OLD / "answers.json").read_text(encoding="utf-8"))[table]
    return [{RENAMED.get(name, name): value for name, value in row.items()} for row in rows]


def assert_same(rows: Iterable[Mapping[str, Any]], expected: list[dict[str, Any]], *, keys: tuple[str, ...]) -> None:
    """All numbers of the columns that both have."""
    by_key = {tuple(row[key] for key in keys): row for row in expected}
    assert len(by_key) == len(expected)
    for row in rows:
        before = by_key.pop(tuple(row[key] for key in keys))
        for name, value in row.items():
            # today's rows have more columns
            if not isinstance(value, str) and name in before and name not in REDEFINED:
                expected_value = before[name] if value is None or before[name] is None else pytest.approx(before[name])
                assert value == expected_value, name
    assert not by_key


def assert_only_lacking(runs: Runs) -> None:
    """All were read, and nothing is said of them but which of today's columns they lack."""
    (note,) = runs.notes
    version, _, missing = note.partition("): ")
    assert version == f"6 runs of tables version 3 (this program: {TABLES_VERSION}", "one more has no result"
    assert all(column.endswith(" is missing") for column in missing.split(", "))
    assert runs.skipped == ()


def test_they_load_and_give_the_same_numbers(results: Path) -> None:
    runs = load(results)
    assert_only_lacking(runs)
    assert_same(per_run(runs).iter_rows(named=True), answers("runs"), keys=("run_id",))
    assert_same(summary(runs).iter_rows(named=True), answers("summary"), keys=("configuration", "outcomes"))
    (before,) = [row["speed_up"] for row in answers("summary") if row["configuration"] == "ddp × 2" and row["speed_up"]]
    steady = gains(runs).filter(kind="steady", configuration="ddp × 2")["value"]
    assert (len(steady), steady.mean()) == (2, pytest.approx(before)), "the pairs are what they were"


def test_they_are_the_runs_that_the_same_configurations_are_today(results: Path) -> None:
    for folder in find_runs(results):
        assert folder.path.name.endswith(run_id(folder.config())[:8])
        assert glance(folder).label in ("ok", "nan")
    assert {row["run_id"] for row in answers("runs")} == {run_id(folder.config()) for folder in find_runs(results)}


@pytest.mark.slow
def test_they_mix_with_todays(results: Path) -> None:
    published(config(results, model="mlp"))
    runs = load(results)
    assert_only_lacking(runs)
    assert runs.run.height == len(answers("runs")) + 1
    configurations = summary(runs)
    assert configurations.height == len(answers("summary")) + 1
    old = [row for row in configurations.iter_rows(named=True) if "logistic_regression" in row["group"]]
    assert_same(old, answers("summary"), keys=("configuration", "outcomes"))
