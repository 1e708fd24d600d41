"""The report, compare, claims and notebooks give one verdict on the same runs: refused alike, or the same ratio."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from analysis import UnlikeWork, by, load, notebook, notes, summary
from analysis.claims import judge
from analysis.comparison.speed import SpeedVerdict
from analysis.configurations import gains
from analysis.figures import draw
from parallelbench.store.environment_match import MUST_MATCH, REPORTED, SET_BY_LAUNCHER
from tests.analysis.factory import Fake, config, published
from tests.analysis.test_claims import claim
from tests.analysis.test_compare import steady

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from analysis.reader import Runs

pytestmark = pytest.mark.slow

VARIABLES = [f"variables.{name}" for name in ("NCCL_ALGO", "GLOO_TUNED_TO", "OMP_PROC_BIND", "MKL_DYNAMIC")]
VARIABLES += [f"variables.{name}" for name in ("MALLOC_ARENA_MAX", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF")]
TIMES = ((10.0, 7.0), (11.0, 7.5), (10.5, 7.4), (10.2, 7.1), (10.7, 7.3), (10.1, 7.2))
"""Of each repeat: single × 1, ddp × 2."""
ONE, TWO = {"strategy": "single", "devices": 1}, {"strategy": "ddp", "devices": 2}
FASTER = claim(contrasts=[{"from": TWO, "to": ONE}])
"""Its effect is the time of one device ÷ that of two: the speed-up."""
SHORTER = claim(contrasts=[{"from": ONE, "to": TWO}])


def environment(**entries: Any) -> str:
    """The usual environment, with these dotted entries; None: without the entry."""
    whole: dict[str, Any] = json.loads(Fake.environment)
    for key, value in entries.items():
        *parents, last = key.split(".")
        node = whole
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return json.dumps(whole)


def measured(root: Path, one: dict[str, Any], other: dict[str, Any], *, repeats: Sequence[int] = range(6)) -> Runs:
    """single × 1 in the one environment, ddp × 2 in the other one in these repeats."""
    for repeat, (time_s, time_2_s) in enumerate(TIMES):
        entries = other if repeat in repeats else one
        published(config(root, repeat=repeat), steady(time_s, environment=environment(**one)))
        run = config(root, repeat=repeat, strategy="ddp", devices=2)
        published(run, steady(time_2_s, environment=environment(**entries)))
    return load(root)


def answers(runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What every room says about ddp × 2 against single × 1, in words."""
    with pytest.raises(UnlikeWork) as refusal:
        by(runs, "strategy", "single", "ddp", across=["devices"])
    (case,) = judge(runs, SHORTER, seed="0").cases
    assert case.verdict == "inconclusive"
    monkeypatch.setattr(notebook, "_WIDTH", 1000)
    notebook.claims(runs, "002")
    (scaling,) = draw(runs, ["scaling"])
    assert scaling.chart is None
    return {
        "headline": "\n".join(notes.headline(runs)),
        "warnings": "\n".join(notes.warnings(runs)),
        "compare": str(refusal.value),
        "claims": case.lacks,
        "notebook": capsys.readouterr().out,
        "figure": scaling.finding,
    }


def refused(runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Every room refuses, with these words."""
    row = summary(runs).row(1, named=True)
    assert (row["configuration"], row["verdict"]) == ("ddp × 2", SpeedVerdict.NOT_COMPARABLE.value)
    for name in ("speed_up", "speed_up_low", "efficiency", "efficiency_with_startup", "energy_ratio"):
        assert row[name] is None, name
    assert row["speed_up_pairs"] == 0
    assert set(gains(runs)["configuration"]) == {"single × 1"}
    for room, answer in answers(runs, capsys, monkeypatch).items():
        assert words in answer, room
        assert "measure both in one environment" in answer, room
        assert "--across" in answer, room


@pytest.mark.parametrize("missing", [False, True], ids=["unlike", "missing"])
@pytest.mark.parametrize("key", sorted({*MUST_MATCH, *VARIABLES} - set(SET_BY_LAUNCHER)))
def test_what_must_match_is_refused_everywhere(
    key: str, missing: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {key: None if missing else "another"}
    runs = measured(tmp_path, {key: "one"}, other)
    refused(runs, capsys, monkeypatch, f"the sides differ in {key}: one and {'null' if missing else 'another'}")


def test_one_repeat_in_another_environment_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = measured(tmp_path, {}, {"packages.torch": "2.11.0"}, repeats=[3])
    refused(runs, capsys, monkeypatch, "the sides differ in packages.torch: 2.15.0 and 2.11.0")


@pytest.mark.parametrize("key", ["", *REPORTED, *SET_BY_LAUNCHER, "load_average_1min", "variables.SLURM_JOB_ID"])
def test_what_may_differ_is_compared_everywhere_with_the_same_ratio(key: str, tmp_path: Path) -> None:
    """Devices differ here, so what the launcher sets for them may differ, too."""
    runs = measured(tmp_path, {key: "one"} if key else {}, {key: "another"} if key else {})
    row = summary(runs).row(1, named=True)
    ratio = (row["speed_up"], row["speed_up_low"], row["speed_up_high"])
    assert row["verdict"] == SpeedVerdict.FASTER.value
    assert sorted(gains(runs).filter(configuration="ddp × 2", kind="steady")["value"])[2:4] == pytest.approx(
        sorted(one / two for one, two in TIMES)[2:4], rel=1e-15
    )
    (compared,) = by(runs, "strategy", "ddp", "single", across=["devices"]).rows
    assert compared.time is not None
    assert (compared.time.median, compared.time.low, compared.time.high) == ratio
    (case,) = judge(runs, FASTER, seed="0").cases
    assert (case.median, case.low, case.high) == ratio
    assert f"{ratio[0]:.2f} times as fast" in notes.headline(runs)[0]
    notes_of_both = [*notes.warnings(runs), *by(runs, "strategy", "ddp", "single", across=["devices"]).notes]
    assert sum(f"differ in {key}" in note for note in notes_of_both) == (2 if key in REPORTED else 0) or not key


@pytest.mark.parametrize("key", SET_BY_LAUNCHER)
def test_what_the_launcher_sets_must_match_between_runs_on_equal_devices(key: str, tmp_path: Path) -> None:
    for repeat, time_s in enumerate((10.0, 11.0)):
        for batch, value in ((64, "one"), (128, "another")):
            run = config(tmp_path, repeat=repeat, batch_size=batch)
            published(run, steady(time_s, environment=environment(**{key: value})))
    with pytest.raises(UnlikeWork, match=f"the sides differ in {key}: one and another"):
        by(load(tmp_path), "batch_size", 64, 128)
    assert by(load(tmp_path), "batch_size", 64, 128, across=[key]).rows[0].time is not None
    (finding,) = [figure.finding for figure in draw(load(tmp_path), ["throughput_batch"])]
    assert f"is not compared: the sides differ in {key}: one and another" in finding


def test_across_compares_what_is_refused_otherwise(tmp_path: Path) -> None:
    runs = measured(tmp_path, {}, {"packages.torch": "2.11.0"})
    (row,) = by(runs, "strategy", "single", "ddp", across=["devices", "packages.torch"]).rows
    assert row.verdict is SpeedVerdict.FASTER
