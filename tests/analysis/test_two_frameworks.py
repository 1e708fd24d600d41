"""Each framework has one device of its own, with which its strategies are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import by, load, summary
from analysis.claims.verdict import judge
from analysis.comparison.verdict import SpeedVerdict
from analysis.metrics.columns import page_columns
from analysis.report.tables import cells
from analysis.report.warnings import warnings
from analysis.runs.reader import Runs
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import Fake, config, failed, published, steady
from tests.analysis.test_claims import claim

TIMES_S = {"single": 10.0, "ddp": 5.0, "tf_single": 30.0, "tf_multi_worker": 16.0}


def measured(root: Path, *strategies: str, model: str = "cnn_small") -> Runs:
    """Six repeats; TensorFlow's workers have addresses of their own in each."""
    for repeat in range(6):
        for strategy in strategies:
            whole: dict[str, Any] = json.loads(Fake.environment)
            if strategy.startswith("tf_"):
                whole |= {"framework": "tensorflow", "packages": {"tensorflow": "2.19"}}
                # The last two are scikit-learn's, which Keras loads.
                own = {"TF_CPP_MIN_LOG_LEVEL": "2", "KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
                whole["variables"] = own
            if strategy == "tf_multi_worker":
                whole["variables"]["TF_CONFIG"] = f'{{"cluster": {{"worker": ["127.0.0.1:{repeat}"]}}}}'
            devices = 1 if strategy.endswith("single") else 2
            run = config(root, repeat=repeat, strategy=strategy, devices=devices, model=model)
            published(run, steady(TIMES_S[strategy] + repeat / 10, environment=json.dumps(whole), parity_passed=True))
    return load(root)


@pytest.mark.exhaustive
def test_each_strategy_is_compared_with_one_device_of_its_framework(tmp_path: Path) -> None:
    runs = measured(tmp_path, *TIMES_S)
    rows = {row["configuration"]: row for row in summary(runs).to_dicts()}
    assert [rows[name]["verdict"] for name in ("single × 1", "tf_single × 1")] == ["baseline"] * 2
    column = next(column for column in page_columns("configurations") if column.name == "verdict")
    shown = [cells(rows[name], [column])[0].shown for name in ("single × 1", "tf_single × 1")]
    assert shown[0] != shown[1], "two rows of one table"
    assert "tensorflow" in shown[1]
    assert rows["ddp × 2"]["speed_up"] == pytest.approx(2.0, rel=0.05)
    assert rows["tf_multi_worker × 2"]["speed_up"] == pytest.approx(30 / 16, rel=0.05)
    assert rows["tf_multi_worker × 2"]["verdict"] == "faster"
    (row,) = by(runs, "configuration", "tf_single × 1", "tf_multi_worker × 2").rows
    assert row.verdict is SpeedVerdict.FASTER
    (row,) = by(runs, "configuration", "tf_single × 1", "ddp × 2").rows
    assert row.verdict is SpeedVerdict.FASTER, "another framework may be faster by more than the devices"


def with_options(root: Path, *ways: tuple[str, dict[str, bool], float], lost: dict[str, Any] | None = None) -> Runs:
    """Six repeats of TensorFlow's strategies with options; one device with those of `lost` has failed."""
    environment = json.dumps(json.loads(Fake.environment) | {"framework": "tensorflow", "variables": {}})
    for repeat in range(6):
        for name, options, time_s in ways:
            devices = 1 if name == "tf_single" else 2
            run = config(root, repeat=repeat, strategy={"name": name, **options}, devices=devices)
            if (name, options) == ("tf_single", lost):
                failed(run, "oom", "out of memory", epochs=0)
            else:
                published(run, steady(time_s + repeat / 10, environment=environment))
    return load(root)


def test_each_set_of_options_is_compared_with_the_one_device_that_has_them(tmp_path: Path) -> None:
    runs = with_options(
        tmp_path,
        ("tf_single", {"xla": False}, 30.0),
        ("tf_single", {"xla": True}, 20.0),
        ("tf_mirrored", {"xla": False}, 16.0),
        ("tf_mirrored", {"xla": True}, 11.0),
        ("tf_mirrored", {"tf_function": False}, 60.0),
    )
    rows = {row["configuration"]: row for row in summary(runs).to_dicts()}
    found = {name: row["speed_up"] for name, row in rows.items()}
    expected = {
        "tf_single × 1, xla false": 1.0,
        "tf_single × 1, xla true": 1.0,
        "tf_mirrored × 2, tf function true, xla false": 30 / 16,
        "tf_mirrored × 2, tf function true, xla true": 20 / 11,
        "tf_mirrored × 2, tf function false, xla false": None,
    }
    assert found == {name: value and pytest.approx(value, rel=0.05) for name, value in expected.items()}
    (line,) = (line for line in warnings(runs) if line.startswith("No speed-up for "))
    assert "tf_mirrored × 2, tf function false, xla false: " in line
    assert "of one device's sets of options (tf_single × 1, " in line
    judged = {case.where: case.median for case in judge(runs, claim(), seed="here").cases}
    assert judged == {
        "digits · cnn_small · xla false": pytest.approx(16 / 30, rel=0.05),
        "digits · cnn_small · xla true": pytest.approx(11 / 20, rel=0.05),
    }


@pytest.mark.parametrize("xla", [True, False])
def test_where_the_one_device_with_their_options_failed_neither_page_nor_claims_take_another(
    xla: bool, tmp_path: Path
) -> None:
    runs = with_options(
        tmp_path,
        ("tf_single", {"xla": False}, 30.0),
        ("tf_single", {"xla": True}, 20.0),
        ("tf_mirrored", {"xla": xla}, 16.0),
        lost={"xla": True},
    )
    ratio = None if xla else 16 / 30
    (found,) = (row["speed_up"] for row in summary(runs).to_dicts() if row["strategy"] == "tf_mirrored")
    assert found == (ratio and pytest.approx(1 / ratio, rel=0.05))
    judged = [case.median for case in judge(runs, claim(), seed="here").cases]
    assert judged == ([pytest.approx(ratio, rel=0.05)] if ratio else [])


def test_a_disturbed_baseline_is_that_of_its_framework(tmp_path: Path) -> None:
    """Measuring one device again would give ddp a verdict, and TensorFlow none."""
    measured(tmp_path, "ddp", "tf_multi_worker")
    for repeat in range(3):
        published(config(tmp_path, repeat=repeat), steady(10.0, others_time_s=lambda epoch, rank: 5.0))
    verdicts = {row["configuration"]: row["verdict"] for row in summary(load(tmp_path)).to_dicts()}
    assert (verdicts["ddp × 2"], verdicts["tf_multi_worker × 2"]) == ("disturbed", None)


@pytest.mark.exhaustive
def test_a_framework_without_one_device_is_named(tmp_path: Path) -> None:
    lines = [
        line for line in warnings(measured(tmp_path, "single", "ddp", "tf_multi_worker")) if "No speed-up for" in line
    ]
    assert len(lines) == 1
    assert (
        "no other configuration of tensorflow that counts did the same work; measure strategy=tf_single devices=1"
        in lines[0]
    )


@pytest.mark.parametrize("missing", ["tf_single", "tf_multi_worker"])
def test_runs_that_have_not_begun_are_of_no_other_framework(tmp_path: Path, missing: str) -> None:
    """Before its first run has said what it trains with."""
    measured(tmp_path, *(TIMES_S.keys() - {missing}))
    for repeat in range(2):
        run = config(tmp_path, repeat=repeat, strategy=missing, devices=1 if missing == "tf_single" else 2)
        RunFolder.of(run).write_intent(run, ["made=up"])
    runs = load(tmp_path)
    found = {row["configuration"]: row["speed_up"] for row in summary(runs).to_dicts()}
    assert found["ddp × 2"] == pytest.approx(2.0, rel=0.05)
    assert found["tf_multi_worker × 2"] is None
    assert not any("sets of options" in line for line in warnings(runs))
