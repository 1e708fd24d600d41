"""The report's figure of predictions: what it draws was measured or predicted, and why it may draw nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from analysis import load
from analysis.advisor import forecast as forecasts
from analysis.advisor.forecast import forecast
from analysis.advisor.sweep_evidence import sweep_evidence
from analysis.figures.predictions import predictions
from analysis.runs.reader import Runs
from tests.advisor.test_sweep_evidence import LAYERS, PROBES, SECONDS, SLOWER
from tests.analysis.factory import Fake, config, published
from tests.analysis.made_up import rows_of
from tests.faults import fault


def measured(folder: Path, model: str, strategy: str, devices: int, **facts: Any) -> None:
    run = config(folder, model=model, strategy=strategy, devices=devices)
    time_s = SLOWER[model] * SECONDS[strategy] / devices
    speeds = PROBES | {"layers_json": msgspec.json.encode(LAYERS[model]).decode()} | facts
    published(run, Fake(epoch_time_s=lambda epoch, rank: time_s, speeds=speeds, probed=(1e-5, 1e8)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    for model in LAYERS:
        measured(folder, model, "single", 1)
        for devices in (2, 4):
            measured(folder, model, "ddp", devices)
    return load(folder)


def drawn(runs: Runs) -> list[dict[str, Any]]:
    return rows_of(predictions.figure(runs))


@pytest.mark.exhaustive
def test_measured_points_are_measured_and_what_lies_beyond_is_labelled_a_prediction(runs: Runs) -> None:
    rows = drawn(runs)
    shown = {(row["group"], row["variant"], row["x"]): row["y"] for row in rows if row["mark"] == "measured"}
    steps = forecast(runs).steps
    assert len(shown) == len(steps) == 6
    for step in steps:
        rate = step.run.global_batch_size / step.step_s
        assert shown[step.work, step.variant, step.run.devices] == pytest.approx(rate)
    beyond = [row for row in rows if row["place"] == 1 and row["mark"] == "predicted"]
    nodes = {8: 2, 16: 4, 32: 8}
    assert {row["configuration"] for row in beyond} == {f"ddp × {each} on {nodes[each]} nodes" for each in nodes}
    assert all(row["low"] < row["y"] < row["high"] for row in beyond)
    text = predictions.finding(runs)
    assert f"{len(forecast(runs).check.steps)} of 6 measured configurations" in text
    assert "Prediction, not measured: ddp × 32 on 8 nodes trains" in text
    assert "their network is assumed" in text


@pytest.mark.exhaustive
@fault(
    "numbers",
    "Several strategies at one number of devices",
    injection="two strategies, each predicted on the same numbers of devices",
    outcome="each point stands at, and its tooltip says, the devices that it has",
)
def test_predictions_stand_at_the_devices_that_they_have(tmp_path: Path) -> None:
    for model in LAYERS:
        for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)):
            measured(tmp_path, model, strategy, devices)
    beyond = [row for row in drawn(load(tmp_path)) if row["place"] == 1 and row["mark"] == "predicted"]
    assert {row["variant"] for row in beyond} == {"ddp", "fsdp"}
    assert all(row["configuration"].startswith(f"{row['variant']} × {row['x']:g} on ") for row in beyond)


@pytest.mark.slow
def test_no_prediction_has_seen_its_own_measurement(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from analysis.advisor import check
    from analysis.advisor.fit import fitted

    seen: list[set[int]] = []
    fit = fitted
    monkeypatch.setattr(check, "fitted", lambda steps, figures: seen.append(set(map(id, steps))) or fit(steps, figures))
    found = forecast.__wrapped__(runs)
    assert found.assumed, "of so few configurations the interval is an assumption"
    monkeypatch.setattr("analysis.figures.predictions.forecast", lambda _: found)
    assert "a factor of 2 both ways is assumed" in predictions.finding(runs)
    groups = [row["left_out"] for row in found.check.rows]
    for group, rest in zip(dict.fromkeys(groups), seen, strict=True):
        own = {id(step) for step, its in zip(found.check.steps, groups, strict=True) if its == group}
        assert own
        assert not own & rest


@pytest.mark.slow
def test_a_second_report_fits_nothing(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another step is fitted to, since what was kept is of other steps."""
    from analysis.advisor import fit

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = forecast.__wrapped__(runs)

    def never(*_: Any) -> None:
        raise AssertionError("fitted again")

    monkeypatch.setattr(fit, "_fitted", never)
    again = forecast.__wrapped__(runs)
    assert again.check.predicted_s.tolist() == first.check.predicted_s.tolist()
    assert [each.step_s for each in again.further] == [each.step_s for each in first.further]
    changed = [replace(step, step_s=1.01 * step.step_s) for step in first.steps]
    with pytest.raises(AssertionError, match="fitted again"):
        fit.fitted(changed, sweep_evidence([runs], lambda run: []).probed)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"layers_json": None}, "don't hold what the layers"),
        (dict.fromkeys(PROBES), "probed no device"),
        ({}, "1 measured configurations can be predicted, and 4 are needed"),
    ],
)
def test_where_nothing_can_be_fitted_the_reason_stands_instead(tmp_path: Path, facts: dict[str, Any], why: str) -> None:
    measured(tmp_path, "mlp", "single", 1, **facts)
    runs = load(tmp_path)
    assert predictions.figure(runs) is None
    text = predictions.finding(runs)
    assert text.startswith("Nothing is predicted")
    assert why in text


def test_more_configurations_than_a_report_has_time_for_are_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "MOST_STEPS", 5)
    with pytest.raises(forecasts.ConfigError, match="there are 6"):
        forecast.__wrapped__(runs)
