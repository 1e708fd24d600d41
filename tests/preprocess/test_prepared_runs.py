"""Whole runs that preprocess: without training, with it, on two ranks, and where the engine crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from analysis import load
from analysis.claims import judge, publications
from analysis.claims.figures.preprocessing import preprocessing
from analysis.comparison.summary import facts, prepared, summary
from analysis.figures import draw
from parallelbench.cli import main
from parallelbench.environments import VELOX_PYTHON
from tests.faults import fault
from tests.helpers import TINY
from tests.preprocess.test_stage import VELOX, fake_environment

pytestmark = pytest.mark.slow

SMALL = (*TINY, "data.train_samples=320")


def ran(results: Path, *overrides: str, code: int = 0) -> None:
    assert main(["run", *SMALL, f"results={results}", "measure.telemetry_hz=0", *overrides]) == code


def tables(results: Path) -> dict[str, list[dict[str, Any]]]:
    (folder,) = results.glob("*/*/result")
    return {path.stem: pq.read_table(path).to_pylist() for path in folder.glob("*.parquet")}


@pytest.mark.exhaustive
def test_a_run_may_preprocess_only(tmp_path: Path) -> None:
    ran(tmp_path, "epochs=0", "preprocess.engine=polars", "preprocess.recipe=normalise", "preprocess.executions=2")
    found = tables(tmp_path)
    (run,) = found["run"]
    assert (run["outcome"], run["reason"]) == ("ok", "prepared the training set")
    expected = {"preprocess_engine": "polars", "preprocess_recipe": "normalise", "preprocess_threads": 1}
    assert {name: run[name] for name in expected} == expected
    assert run["preprocess_time_s"] > 0
    assert run["preprocess_failed"] is False
    assert run["preprocess_version"].count(".") >= 1
    assert run["parameters"] is run["startup_s"] is run["startup_first_step_s"] is run["warnings"] is None
    assert run["data_sha256"]
    assert [*found["epochs"], *found["ranks"], *found["checks"]] == []
    assert {(row["run_id"], row["attempt"]) for row in found["preprocess"]} == {(run["run_id"], 1)}
    runs = load(tmp_path)
    (row,) = prepared(runs).to_dicts()
    first, second = found["preprocess"]
    assert row["preprocess_cold_time_s"] == first["cold_time_s"]
    assert row["preprocess_warm_time_s"] == second["warm_time_s"]
    assert row["preprocess_peak_memory_bytes"] == first["peak_memory_bytes"]
    assert row["preprocess_output_rows"] == 320
    assert row["preprocess_cpu_time_s"] == pytest.approx((first["cpu_time_s"] + second["cpu_time_s"]) / 2)
    assert row["end_to_end_time_s"] is None
    told = preprocessing.finding(runs)
    assert told.startswith("normalise: the first result comes after ")
    assert " s with polars; once warm it takes " in told
    assert told.endswith("no verdict.")
    (figure,) = draw(runs, ["preprocessing"])
    assert figure.chart is not None
    assert not [each.name for each in draw(runs) if each.chart is not None], "nothing else was measured"
    assert summary(runs)["preprocess_cold_time_s"].to_list() == [first["cold_time_s"]]
    names = {"velox_can_not_filter_or_transform", "velox_reduces_processing_times"}
    claims = {each.name: each for text in publications() for each in text.claims if each.name in names}
    assert claims.keys() == names
    for each in claims.values():
        judged = judge(runs, each, seed="000")
        assert (judged.verdict, "preprocess.engine=velox" in judged.why) == ("inconclusive", True), "another engine's"


@pytest.mark.exhaustive
def test_what_engines_prepared_is_trained_on_alike(tmp_path: Path) -> None:
    """Same rows, same order: the same losses to the last bit; and one row has both costs."""
    for engine in ("numpy", "arrow"):
        ran(tmp_path / engine, "epochs=2", f"preprocess.engine={engine}", "preprocess.recipe=filter")
    ours, other = (tables(tmp_path / engine) for engine in ("numpy", "arrow"))
    losses = [[(row["train_loss"], row["test_loss"]) for row in found["epochs"]] for found in (ours, other)]
    assert losses[0] == losses[1]
    assert {row["train_samples"] for row in ours["epochs"]} == {160}
    assert {row["test_samples"] for row in ours["epochs"]} == {15}
    (run,) = ours["run"]
    counts = {"train_samples": 160, "test_samples": 15, "steps_per_epoch": 5, "dropped_samples": 0}
    assert {name: run[name] for name in counts} == counts
    assert run["outcome"] == "ok"
    (row,) = facts(load(tmp_path / "numpy")).to_dicts()
    assert row["end_to_end_time_s"] == pytest.approx(row["preprocess_time_s"] + row["total_time_s"])


@pytest.mark.exhaustive
@fault(
    "numbers",
    "Preprocessing that is executed several times",
    injection="three executions before a training, with preprocess.executions=3",
    outcome="the time from end to end has one of them, which is what a training needs",
)
def test_a_training_needs_one_execution(tmp_path: Path) -> None:
    ran(tmp_path, "epochs=1", "preprocess.engine=numpy", "preprocess.recipe=filter", "preprocess.executions=3")
    first, *later = sorted(tables(tmp_path)["preprocess"], key=lambda row: row["execution"])
    (row,) = facts(load(tmp_path)).to_dicts()
    again_s = sum(each["execution_time_s"] + (each["write_s"] or 0) for each in later)
    assert again_s > 0
    assert row["end_to_end_time_s"] == pytest.approx(row["preprocess_time_s"] - again_s + row["total_time_s"])
    assert row["end_to_end_time_s"] > first["cold_time_s"] + row["total_time_s"]


@pytest.mark.exhaustive
def test_all_ranks_train_on_what_rank_0_prepared(tmp_path: Path) -> None:
    options = ("devices=2", "strategy=ddp", "launcher.oversubscribe=true", "epochs=1")
    ran(tmp_path, *options, "preprocess.engine=numpy", "preprocess.recipe=sort")
    found = tables(tmp_path)
    assert (found["run"][0]["outcome"], found["run"][0]["parity_passed"]) == ("ok", True)
    assert (len(found["preprocess"]), len(found["ranks"])) == (1, 2)
    assert not list(tmp_path.glob("*/*/attempts/1/preprocess*"))


@pytest.mark.exhaustive
def test_a_crash_is_the_runs_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = fake_environment(tmp_path / "own", PyVelox="0.2.0", pyarrow="19.0.1")
    monkeypatch.setenv(VELOX_PYTHON, str(python))
    ran(tmp_path / "results", *VELOX, code=1)
    (path,) = (tmp_path / "results").glob("*/*/attempts/1/outcome.json")
    outcome = json.loads(path.read_text())
    assert outcome["outcome"] == "error"
    assert outcome["reason"] == "preprocess.engine=velox with recipe=filter: its process was killed by SIGABRT"


@pytest.mark.exhaustive
def test_an_engine_that_fails_where_numpy_does_not_reproduces_the_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that failed are what these claims are about, so they count; one that was killed says nothing."""
    python = fake_environment(tmp_path / "own", PyVelox="0.2.0", pyarrow="19.0.1")
    monkeypatch.setenv(VELOX_PYTHON, str(python))
    results, sweep = tmp_path / "results", ("preprocess.recipe=filter", "preprocess.engine=numpy,velox", "epochs=0")
    quick = ("launcher=inline", "measure.telemetry_hz=0", "measure.probe=false", "sweep.repeats=6")
    assert main(["submit", *SMALL, *sweep, *quick, f"results={results}"]) == 1
    claims = {each.name: each for text in publications() for each in text.claims}
    runs = load(results)
    found = judge(runs, claims["velox_can_not_filter_or_transform"], seed="000")
    (case,) = found.cases
    assert (found.verdict, [effect for _, effect in case.effects]) == ("reproduced", [1.0] * 6)
    python.write_text("#!/bin/sh\nkill -KILL $$\n")
    ran(tmp_path / "killed", *VELOX, code=1)
    assert load(tmp_path / "killed").run["preprocess_failed"].to_list() == [None]
