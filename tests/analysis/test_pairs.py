"""Every two configurations of one work on equally many devices: made-up sweeps with their answers by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import load, write_report
from analysis.comparison.pairs import of_equal_devices
from analysis.comparison.sides import by
from analysis.runs.reader import Runs
from tests.analysis.factory import Fake, config, published, steady
from tests.analysis.made_up import ROUND_S, WOBBLE, altered, environment

WAYS = {("single", 1): 20.0, ("ddp", 2): 10.0, ("fsdp", 2): 12.5, ("zero1", 2): 10.0, ("ddp", 4): 6.0}
"""The time of an epoch; that of fsdp × 2 and zero1 × 2 varies from repeat to repeat. Three epochs, the first one takes
three times as long: 50 s of ddp × 2, 62.5 s of fsdp × 2.
"""


def measured(root: Path, **more: Any) -> Runs:
    for repeat, wobble in enumerate(WOBBLE):
        for place, ((strategy, devices), time_s) in enumerate(WAYS.items()):
            turn = place if repeat % 2 == 0 else len(WAYS) - place
            factor = wobble if strategy in ("fsdp", "zero1") else 1.0
            began = Fake.started_at + ROUND_S * (repeat + turn / 10)
            run = config(root, repeat=repeat, strategy=strategy, devices=devices, **more)
            published(run, steady(time_s * factor, started_at=began))
    return load(root)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return measured(tmp_path_factory.mktemp("results"), site={"price_per_device_hour": 3.6})


def rows(runs: Runs) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["configuration"], row["other"]): row for row in of_equal_devices(runs).to_dicts()}


def test_every_two_on_equally_many_devices_are_a_row_and_no_others(runs: Runs) -> None:
    assert list(rows(runs)) == [("ddp × 2", "fsdp × 2"), ("ddp × 2", "zero1 × 2"), ("fsdp × 2", "zero1 × 2")]


def test_a_row_has_the_ratio_of_speeds_its_verdict_and_what_both_took(runs: Runs) -> None:
    found = rows(runs)["ddp × 2", "fsdp × 2"]
    assert (found["verdict"], found["pairs"], found["devices"]) == ("slower", 6, 2)
    assert found["speed_ratio"] == pytest.approx(0.8)
    # exp(±4.331853·s/√6) about the mean logarithm, as in `made_up` for the same wobble: 1.5606051 and 1.6406628 of 1.6.
    assert (found["speed_ratio_low"], found["speed_ratio_high"]) == pytest.approx((1.5606051 / 2, 1.6406628 / 2))
    assert found["device_hours"] == pytest.approx(2 * 50 / 3600)
    assert found["cost"] == pytest.approx(0.1)
    assert found["other_device_hours"] == pytest.approx(2 * 62.5 / 3600)
    assert found["other_cost"] == pytest.approx(0.125)
    assert (found["co2_g"], found["energy_ratio"], found["until_accuracy"]) == (None, None, None)


@pytest.mark.parametrize("names", [("ddp × 2", "fsdp × 2"), ("ddp × 2", "zero1 × 2"), ("fsdp × 2", "zero1 × 2")])
def test_a_row_is_the_inverse_of_the_times_that_compare_shows(runs: Runs, names: tuple[str, str]) -> None:
    found = rows(runs)[names]
    time = by(runs, "configuration", *names).rows[0].time
    assert time is not None
    assert time.low is not None
    assert time.high is not None
    assert found["speed_ratio"] == pytest.approx(1 / time.median)
    if names[0] == "ddp × 2":
        assert (found["speed_ratio_low"], found["speed_ratio_high"]) == pytest.approx((1 / time.high, 1 / time.low))


def test_up_to_a_chosen_accuracy_what_they_took_is_less(runs: Runs) -> None:
    """The test accuracy is 0.5 after the first epoch and 0.75 after the second: 30 s, and 10 s more."""
    found = rows(replace(load(runs.root), target=0.7))["ddp × 2", "zero1 × 2"]
    assert found["until_accuracy"] == 0.7
    assert found["device_hours"] == pytest.approx(2 * 40 / 3600)
    assert found["cost"] == pytest.approx(2 * 40 / 1000)


def test_the_carbon_dioxide_to_an_accuracy_is_that_of_the_epochs_to_it(tmp_path: Path) -> None:
    """Two GPUs of 100 and 200 W for two epochs of 3,600 s: 0.6 kWh; of four epochs, 1.2 kWh."""
    fake = Fake(
        device_type="cuda",
        gpu_power_w=lambda epoch, rank: 100.0 * (rank + 1),
        epoch_time_s=lambda *_: 3600.0,
        epoch_every_s=10_000.0,
    )
    for strategy in ("ddp", "fsdp"):
        site = {"price_per_device_hour": 2.5, "grams_co2_per_kwh": 400.0}
        run = config(tmp_path, strategy=strategy, devices=2, epochs=4, device="cuda", site=site)
        published(run, fake)
    (whole,) = rows(load(tmp_path)).values()
    assert (whole["co2_g"], whole["other_co2_g"]) == pytest.approx((480.0, 480.0))
    assert whole["energy_ratio"] == pytest.approx(1.0)
    (part,) = rows(replace(load(tmp_path), target=0.7)).values()
    assert (part["co2_g"], part["device_hours"], part["cost"]) == pytest.approx((240.0, 4.0, 10.0))


def test_the_verdicts_of_one_table_allow_for_each_other(tmp_path: Path) -> None:
    """By itself zero1 × 2 is slower than ddp × 2: its 95 % interval leaves out 1. Among fifteen it is not shown."""
    wobbles = {"fsdp": 1.0, "ring_ddp": 1.003, "tensor_parallel": 0.998, "parameter_server": 1.002}
    slower = (1.0, 1.02, 0.985, 1.015, 0.98, 1.0)
    for repeat, own in enumerate(slower):
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), steady(10.0))
        published(config(tmp_path, repeat=repeat, strategy="zero1", devices=2), steady(10.0 / 0.965 * own))
    alone = rows(load(tmp_path))["ddp × 2", "zero1 × 2"]
    assert alone["verdict"] == "slower"
    for repeat in range(6):
        for place, (strategy, factor) in enumerate(wobbles.items()):
            noisy = 1 + 0.05 * (-1) ** (repeat + place) * (1 + repeat / 10)
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=2)
            published(run, steady(10.0 * factor * noisy))
    among = rows(load(tmp_path))["ddp × 2", "zero1 × 2"]
    assert among["verdict"] == "no difference shown"
    ends = ("speed_ratio", "speed_ratio_low", "speed_ratio_high")
    assert [among[name] for name in ends] == [alone[name] for name in ends]


def test_what_is_not_comparable_has_no_ratio(runs: Runs) -> None:
    unlike = in_environments_of(runs)
    found = rows(unlike)
    assert {names: row["verdict"] for names, row in found.items()} == {
        ("ddp × 2", "fsdp × 2"): "not comparable",
        ("ddp × 2", "zero1 × 2"): "not comparable",
        ("fsdp × 2", "zero1 × 2"): "faster",
    }
    assert found["ddp × 2", "fsdp × 2"]["speed_ratio"] is None


def in_environments_of(runs: Runs) -> Runs:
    """ddp with another torch than all others."""
    torch = {"ddp": environment(**{"packages.torch": "2.11.0"})}
    return altered(runs, "run", environment_json=pl.col("strategy").replace_strict(torch, default=environment()))


def test_the_page_shows_the_first_rows_and_the_file_has_all(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from analysis.report import page

    monkeypatch.setitem(page.MOST_ROWS, "pairs", 2)
    index = write_report(runs.root, tmp_path / "report").read_text()
    table = pl.read_csv(tmp_path / "report" / "tables" / "pairs.csv")
    assert table.height == 3
    assert table["speed_ratio"].to_list() == pytest.approx([0.8, 1.0, 1.25], rel=0.02)
    assert "1 more are in the file" in index
