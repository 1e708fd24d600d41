"""Whether runs that were trained again elsewhere came to the same: made-up runs, of which one thing differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.comparison.counterparts import Agreement, RerunFinding, agreements
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.results.journal import Journal, read_tables
from parallelbench.results.publish import publish
from tests.analysis.factory import Fake, begin, config, failed, published, write_epochs

WAY: dict[str, Any] = {"strategy": "ddp", "devices": 2}
"""Whose parity is checked."""


def held(tmp_path: Path, again: Fake | None, bundled: Fake | None = None, **changes: Any) -> Agreement:
    one, other = (config(tmp_path / name, **WAY | changes) for name in ("one", "other"))
    published(one, bundled)
    if again is not None:
        published(other, again)
    return both(tmp_path, one)


def both(tmp_path: Path, run: RunConfig) -> Agreement:
    (tmp_path / "other").mkdir(exist_ok=True)
    (found,) = agreements(load(tmp_path / "one"), load(tmp_path / "other"), {run_id(run): run_id(run)})
    return found


def test_equal_runs_agree_and_their_times_are_told_only(tmp_path: Path) -> None:
    found = held(tmp_path, Fake(epoch_time_s=lambda epoch, rank: 70.0))
    assert (found.losses, found.difference, found.accuracy) == (RerunFinding.SAME, 0.0, RerunFinding.SAME)
    assert found.times_s == (1.0, 70.0)
    assert found.agrees


# A step of rounding in fp32 may become 50 · 2⁻²⁴ · e^(0.25 · steps), at most half; an epoch has 11 steps.
@pytest.mark.parametrize(("factor", "expected"), [(1 + 4e-5, RerunFinding.WITHIN), (1 + 1e-4, RerunFinding.APART)])
def test_losses_may_differ_by_what_rounding_makes_of_them(
    tmp_path: Path, factor: float, expected: RerunFinding
) -> None:
    first = lambda epoch: 2.0 * (factor if epoch == 1 else 1.0) / epoch  # noqa: E731
    found = held(tmp_path, Fake(train_loss=first))
    assert found.difference == pytest.approx(factor - 1, rel=1e-3)
    assert found.losses is expected
    assert found.agrees == (expected is RerunFinding.WITHIN)


def test_the_first_steps_are_held_against_each_other_most_closely(tmp_path: Path) -> None:
    """The losses of the epochs are equal, but not that of the first step, which no update precedes."""
    runs = [config(tmp_path / name) for name in ("one", "other")]
    for run, first in zip(runs, (2.3, 2.3001), strict=True):
        folder, attempt = begin(run, Fake())
        write_epochs(run, attempt, Fake(), epochs=run.epochs)
        journal = Journal(attempt.path / "journal-rank0.jsonl")
        row = {"run_id": run_id(run), "attempt": 1, "epoch": 1}
        journal.write("losses", [row | {"step": 1, "steps": 1, "train_loss": first}])
        journal.write("losses", [row | {"step": 2, "steps": 10, "train_loss": 2.0}])
        journal.close()
        publish(folder, run, attempt, attempt.finish("ok", "trained to the end"), read_tables(attempt.path))
    found = both(tmp_path, runs[0])
    assert found.losses is RerunFinding.APART
    assert found.difference == pytest.approx(0.0001 / 2.3, rel=1e-3)


@pytest.mark.parametrize(("other", "expected"), [(0.94, "WITHIN"), (0.8, "APART")])
def test_accuracies_may_differ_by_three_standard_errors(tmp_path: Path, other: float, expected: str) -> None:
    """The digits' test set has 355 images: three standard errors of a difference at 90 % are 6.8 points."""
    one, two = (Fake(test_accuracy=lambda epoch, value=value: value) for value in (0.9, other))  # type: ignore[misc]
    found = held(tmp_path, two, one)
    assert found.accuracy is RerunFinding[expected]
    assert found.agrees == (expected != "APART")
    share = (0.9 + other) / 2
    assert found.allowed_accuracy == pytest.approx(3 * (2 * share * (1 - share) / 355) ** 0.5)


def test_certain_accuracies_may_differ_by_one_sample(tmp_path: Path) -> None:
    one, two = (Fake(test_accuracy=lambda epoch, value=value: value) for value in (1.0, 1.0))  # type: ignore[misc]
    assert held(tmp_path, two, one).allowed_accuracy == pytest.approx(1 / 355)


@pytest.mark.parametrize(
    ("again", "bundled"),
    [
        (Fake(parity_passed=False), Fake()),
        (Fake(parity_passed=None), Fake()),
        (Fake(data_sha256="1" * 64), Fake()),
        (Fake(train_loss=lambda epoch: 0.4), Fake()),
    ],
)
def test_another_parity_check_other_data_and_other_losses_do_not_agree(
    tmp_path: Path, again: Fake, bundled: Fake
) -> None:
    assert not held(tmp_path, again, bundled).agrees


def test_data_that_an_older_release_did_not_record_do_not_speak_against_a_run(tmp_path: Path) -> None:
    assert held(tmp_path, Fake(), Fake(data_sha256=None)).agrees


def test_what_does_not_train_like_one_device_is_judged_by_its_accuracy(tmp_path: Path) -> None:
    found = held(tmp_path, Fake(rounding=None, train_loss=lambda epoch: 1.0), Fake(rounding=None))
    assert (found.losses, found.accuracy, found.agrees) == (RerunFinding.UNJUDGED, RerunFinding.SAME, True)


def test_what_was_not_trained_again_does_not_agree(tmp_path: Path) -> None:
    missing = held(tmp_path, None)
    assert (missing.unfinished, missing.agrees) == ("not trained yet", False)
    failed(config(tmp_path / "other", **WAY), "oom", "out of memory on rank 1", epochs=1)
    ended = both(tmp_path, config(tmp_path / "one", **WAY))
    assert (ended.unfinished, ended.agrees) == ("oom: out of memory on rank 1", False)
