"""One verdict on a pairing, or why there is none: the summary, all pairs and `compare` say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import load, summary
from analysis.comparison.pairs import of_equal_devices
from analysis.comparison.sides import by
from analysis.runs.reader import Runs
from tests.analysis.factory import Fake, config, published, steady
from tests.analysis.made_up import altered, disturbed, environment
from tests.analysis.test_campaign import EPOCHS_S, measured


def sweep(root: Path, *, second: int = 0, epochs: int = 3, taken_s: float = 0.0) -> Runs:
    """single × 1, ddp × 2 and fsdp × 2, of which the last begins at the `second` repeat; others took so much of it."""
    for strategy, devices, first in (("single", 1, 0), ("ddp", 2, 0), ("fsdp", 2, second)):
        for repeat in range(first, first + 4):
            own_s = taken_s if strategy == "fsdp" else 0.0
            at = Fake.started_at + 1e5 * repeat + 1e4 * devices * (-1) ** repeat
            fake = steady(10.0 / devices, started_at=at, others_time_s=lambda epoch, rank, own_s=own_s: own_s)
            published(config(root, strategy=strategy, devices=devices, repeat=repeat, epochs=epochs), fake)
    return load(root)


def in_another_torch(runs: Runs) -> Runs:
    torch = {"fsdp": environment(**{"packages.torch": "2.11.0"})}
    return altered(runs, "run", environment_json=pl.col("strategy").replace_strict(torch, default=environment()))


@pytest.mark.parametrize(
    ("made", "unlike", "verdict"),
    [
        ({}, False, "equal within 5 %"),
        ({"second": 4}, False, "no repeat in common"),
        ({"epochs": 1}, False, "no steady epoch"),
        ({}, True, "not comparable"),
        # More epochs would not make them comparable: the graver reason is told.
        ({"epochs": 1}, True, "not comparable"),
    ],
)
def test_the_reason_is_the_same_in_every_table(
    made: dict[str, Any], unlike: bool, verdict: str, tmp_path: Path
) -> None:
    runs = sweep(tmp_path, **made)
    runs = in_another_torch(runs) if unlike else runs
    beside_one = "faster" if verdict == "equal within 5 %" else verdict
    found = {row["configuration"]: row for row in summary(runs).to_dicts()}
    assert found["single × 1"]["verdict"] == "baseline"
    assert found["fsdp × 2"]["verdict"] == beside_one
    (pair,) = of_equal_devices(runs).to_dicts()
    assert (pair["configuration"], pair["other"], pair["verdict"]) == ("ddp × 2", "fsdp × 2", verdict)
    if not unlike:  # which compare refuses with what differs
        (row,) = by(runs, "configuration", "ddp × 2", "fsdp × 2").rows
        assert row.verdict == verdict
    for lacking, name in ((found["fsdp × 2"], "speed_up"), (pair, "speed_ratio")):
        assert (lacking[name] is None) == (verdict != "equal within 5 %")


def test_of_runs_that_others_disturbed_the_summary_says_so(tmp_path: Path) -> None:
    """Others took 5 s of steady epochs of 5 s."""
    found = {row["configuration"]: row["verdict"] for row in summary(sweep(tmp_path, taken_s=5.0)).to_dicts()}
    assert found == {"single × 1": "baseline", "ddp × 2": "faster", "fsdp × 2": "disturbed"}


def test_the_ends_of_an_efficiency_are_those_of_the_speed_up_over_the_baselines_devices(
    usual: Runs, tmp_path: Path
) -> None:
    """The interval of 1.6 is that of `made_up.SWEEPS`: 1.5606051 to 1.6406628, on twice the baseline's devices."""
    ends = pytest.approx((0.8, 1.5606051 / 2, 1.6406628 / 2))
    names = ("efficiency", "efficiency_low", "efficiency_high")
    assert summary(usual).select(names).rows() == [(1.0, None, None), ends]
    found = {row["configuration"]: row for row in summary(measured(tmp_path, EPOCHS_S)).to_dicts()}
    assert tuple(found["fsdp × 4"][name] for name in names) == ends, "over fsdp × 2, as one device lacks memory"
    assert tuple(found["fsdp × 2"][name] for name in names) == (1.0, None, None)
    assert tuple(found["single × 1"][name] for name in names) == (None, None, None)
    none = summary(disturbed(usual, 3, 4)).row(1, named=True)
    assert tuple(none[name] for name in names) == (None, None, None)
