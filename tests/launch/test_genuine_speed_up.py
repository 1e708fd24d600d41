"""One sweep that was really measured has a speed-up, and report, compare and claims give the same one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import analysis.metrics.disturbance
from analysis import by, load, summary
from analysis.claims import judge
from analysis.comparison import issues
from analysis.comparison.baseline import refusals
from analysis.comparison.campaign import campaign
from analysis.comparison.verdict import SpeedVerdict
from parallelbench.cli import main
from tests.analysis.test_claims import claim
from tests.launch.programs import completed

ONE, TWO = {"strategy": "single", "devices": 1}, {"strategy": "ddp", "devices": 2}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_sweep_has_one_speed_up_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that must match differs between one process and two of the same sweep."""
    monkeypatch.setattr(analysis.metrics.disturbance, "SHARE", math.inf)  # other tests may use the same cores
    monkeypatch.setattr(issues, "PROBE_TOLERANCE", math.inf)
    sweep = ("data=digits", "model=logistic_regression", "strategy=ddp", "devices=1,2", "sweep.repeats=2", "epochs=2")
    code, text = completed("submit", *sweep, results=tmp_path)
    assert code == 0, text
    runs = load(tmp_path)
    assert refusals(runs) == []
    assert [pairing.unlike_environments for _, pairing in campaign(runs).others] == [{}]
    one, two = summary(runs).to_dicts()
    assert (one["configuration"], two["configuration"]) == ("single × 1", "ddp × 2")
    assert (two["speed_up_pairs"], two["verdict"] == SpeedVerdict.NOT_COMPARABLE.value) == (2, False)
    ratio = [two[name] for name in ("speed_up", "speed_up_low", "speed_up_high")]
    assert two["speed_up"] is not None
    for key, sides, across in (
        ("strategy", ("ddp", "single"), ["devices"]),
        ("configuration", ("ddp × 2", "single × 1"), []),
    ):
        (row,) = by(runs, key, *sides, across=across).rows
        assert row.time is not None
        assert [row.time.median, row.time.low, row.time.high] == ratio
    (case,) = judge(runs, claim(contrasts=[{"from": TWO, "to": ONE}]), seed="0").cases
    assert [case.median, case.low, case.high] == ratio
    assert main(["compare", str(tmp_path), "--by", "strategy=ddp,single", "--across", "devices"]) == 0
    assert "ddp × 2 → single × 1" in capsys.readouterr().out
