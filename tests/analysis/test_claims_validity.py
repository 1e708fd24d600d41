"""An effect decides nothing where the two sides are not alike, or are known too coarsely; and nothing small refutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.claims import judge, judge_all
from analysis.claims.verdict import decide
from analysis.runs.reader import Runs
from tests.analysis.factory import Fake, config, one_and_two, published, steady
from tests.analysis.made_up import cold, in_environments, later
from tests.analysis.test_claims import REPEATS, claim, two_devices

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ACCURACY: dict[str, Any] = {"metric": "final_test_accuracy", "expect": {"above": 0.9}}


def reached(at: int, *, of: float = 0.96) -> Fake:
    """The accuracy is there from this epoch on."""
    return Fake(test_accuracy=lambda epoch: of if epoch >= at else 0.5)


def test_what_is_learned_in_unlike_environments_is_reported(usual: Runs) -> None:
    runs = later(in_environments(usual, {}, {"packages.torch": "1.12.0"}), 1e6)
    (case,) = judge(runs, claim(**ACCURACY), seed="0").cases
    assert (case.verdict, case.warnings) == (
        "reproduced",
        ("the compared runs differ in packages.torch: 2.15.0 and 1.12.0",),
    )


def of_three() -> list[Fake]:
    """One device reaches the accuracy in its third epoch, of two devices one run never does and one in its first."""
    return [steady(time_s, test_accuracy=reached(at).test_accuracy) for time_s, at in ((10.0, 3), (5.2, 9), (5.2, 1))]


@pytest.mark.parametrize(("missing", "why"), [(0, ""), (2, "2 of 8 repeats never reach 0.6")])
def test_survivors_decide_nothing(tmp_path: Path, missing: int, why: str) -> None:
    one, lost, two = of_three()
    one_and_two(tmp_path, ((one, lost if repeat < missing else two) for repeat in range(8)))
    finding = judge(load(tmp_path), claim(metric="time_to_accuracy_s", target=0.6), seed="0")
    assert (finding.verdict, finding.why) == ("inconclusive" if why else "reproduced", why)


def test_survivors_are_no_work_with_too_few_repeats(tmp_path: Path) -> None:
    """Else what remains of six would be left aside, and other work decide."""
    one, lost, two = of_three()
    one_and_two(tmp_path, ((one, lost if repeat > 1 else two) for repeat in REPEATS), batch_size=64)
    one_and_two(tmp_path, [(one, two)] * 6)
    finding = judge(load(tmp_path), claim(metric="time_to_accuracy_s", target=0.6), seed="0")
    assert sorted(case.verdict for case in finding.cases) == ["inconclusive", "reproduced"]
    assert finding.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("shortened", "verdict", "why"),
    [
        ({}, "inconclusive", "accuracy is measured too rarely: lower measure.steps_per_epoch"),
        ({"measure": {"steps_per_epoch": 1}}, "reproduced", ""),
    ],
)
def test_steps_are_known_to_an_epoch(tmp_path: Path, shortened: dict[str, Any], verdict: str, why: str) -> None:
    """45 steps are the 4th epoch of 14, and the 7th of 7: 56 against 49, which are neither as many nor fewer."""
    for repeat in REPEATS:
        for batch, at in ((100, 4), (200, 7)):
            run = config(tmp_path, repeat=repeat, batch_size=batch, epochs=45 if shortened else 7, **shortened)
            published(run, reached(45 if shortened else at))
    steps: dict[str, Any] = {"metric": "steps_to_accuracy", "target": 0.95, "expect": {"above": 0.9}}
    finding = judge(load(tmp_path), claim(**steps, contrasts=[{"rising": "batch_size"}]), seed="0")
    assert (finding.verdict, finding.why) == (verdict, why)


def test_an_epoch_is_not_compared_with_itself(tmp_path: Path) -> None:
    """The last of one epoch is the first."""
    for epochs in (1, 3):
        for repeat in REPEATS:
            published(config(tmp_path, repeat=repeat, epochs=epochs))
    losses = {"metric": "train_loss", "contrasts": [{"from": {"epoch": 1}, "to": {"epoch": "last"}}]}
    (case,) = judge(load(tmp_path), claim(**losses), seed="0").cases
    assert (case.verdict, case.where) == ("reproduced", "digits · cnn_small")


def test_epochs_that_are_not_contrasted_are_equal(tmp_path: Path) -> None:
    """Devices halve the first epoch as they halve the second: no epoch is held against another's."""
    runs = two_devices(tmp_path, (0.5,) * 6, measure={"parity": False})
    gains = claim(
        metric="slowest_epoch_time_s", more={"from": {"epoch": 1}, "to": {"epoch": 2}}, expect={"between": [0.9, 1.1]}
    )
    (case,) = judge(runs, gains, seed="0").cases
    assert (case.verdict, case.step) == ("reproduced", "devices 1 → 2, by epoch 1 → epoch 2")


def test_what_lies_beside_the_effect_may_be_no_metric_of_epochs_or_targets(usual: Runs) -> None:
    runs = cold(usual)
    (case,) = judge(runs, claim(metric="slowest_epoch_time_s", epoch=2, also="total_time_s"), seed="0").cases
    assert case.also is not None
    (case,) = judge(runs, claim(metric="steps_to_accuracy", target=0.7, also="total_time_s"), seed="0").cases
    assert case.also is not None


@pytest.mark.parametrize(
    ("interval", "expect", "needed", "why"),
    [
        (
            (0.74, 1.34),
            {"above": 1, "by": 0.02},
            0,
            "the interval that allows for all claims holds 1 and 1.02, which is too near the effect",
        ),
        (
            (0.966, 1.054),
            {"between": [0.95, 1.05]},
            3,
            "the interval that allows for all claims holds 1.05: add 3 repeats per side, in turn",
        ),
        (
            (0.966, 1.054),
            {"above": 1.05},
            3,
            "the interval that allows for all claims holds 1.05: add 3 repeats per side, in turn",
        ),
    ],
)
def test_only_bounds_that_the_interval_holds_are_in_the_way_and_the_repeats_that_are_told_decide(
    interval: tuple[float, float], expect: dict[str, Any], needed: int, why: str
) -> None:
    def after(more: int) -> tuple[float, float]:
        return (0.97, 1.04) if needed and more >= needed else interval

    values, asked = (1.0,) * 6, claim(expect=expect).expect
    verdict, lacks, repeats = decide(values, interval, asked, after=after, highest_repeat=7)
    assert (verdict, repeats) == ("inconclusive", needed + 8 if needed else None), "which the next command takes"
    assert lacks.startswith(why)
    assert not needed or decide(values, after(needed), asked)[0] != "inconclusive"


@pytest.mark.parametrize(("repeats", "independent", "in_all"), [(2, 1, 7), (2, 2, 6), (6, 1, 11), (8, 4, 10)])
def test_repeats_that_share_a_submit_are_not_counted_as_enough(repeats: int, independent: int, in_all: int) -> None:
    """Each further one, measured in turn, counts; of those that are there, only the independent ones do."""
    interval = (0.5, 1.5) if independent > 2 else None
    asked = claim(expect={"above": 1}).expect
    _, lacks, told = decide((1.0,) * repeats, interval, asked, independent=independent, highest_repeat=repeats - 1)
    assert lacks.endswith(f"(sweep.repeats={in_all})")
    assert told == in_all


def test_epochs_that_were_cut_short_are_no_epochs_of_the_publication(tmp_path: Path) -> None:
    for repeat in REPEATS:
        run = config(tmp_path, repeat=repeat, epochs=50, measure={"steps_per_epoch": 1})
        published(run, Fake(test_accuracy=lambda epoch: 1 / epoch))
    names = [f"{what}_with_epochs" for what in ("training_loss_falls", "test_accuracy_rises", "time_rises")]
    findings = [finding for finding in judge_all(load(tmp_path)) if finding.claim.name in names]
    assert [(len(finding.cases), finding.verdict) for finding in findings] == [(0, "inconclusive")] * 3
    assert all("measure.steps_per_epoch=null" in finding.why for finding in findings)
