"""More devices may be faster by more than their number where fewer were at their memory's limit: answers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import load, summary
from analysis.comparison.campaign import campaign
from analysis.comparison.notes import Code
from analysis.comparison.sides import by
from analysis.report import answers
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, config, published
from tests.analysis.made_up import ROUND_S, WOBBLE
from tests.analysis.test_fits import on_gpus

CROWDED: dict[str, Any] = {"took_gib": 30.0, "retries": 3}
"""Three retries in each of two steady epochs: 6."""
FULL: dict[str, Any] = {"took_gib": 39.0}
"""Of 40 GiB 2.5 % are left."""
ROOMY: dict[str, Any] = {"took_gib": 30.0}


def measured(root: Path, *of_repeats: dict[str, Any]) -> None:
    """One device in each repeat, and two that are five times as fast; what limits the one is as given, in turn."""
    for repeat, wobble in enumerate(WOBBLE):
        limits = of_repeats[repeat % len(of_repeats)]
        for strategy, devices, fake, turn in (
            ("single", 1, on_gpus(**limits, time_s=10.0), repeat % 2),
            ("ddp", 2, on_gpus(20.0, time_s=2.0 * wobble), 1 - repeat % 2),
        ):
            fake.started_at = Fake.started_at + ROUND_S * (repeat + turn / 2)
            published(config(root, repeat=repeat, strategy=strategy, devices=devices, device="cuda"), fake)


@pytest.mark.parametrize(
    ("limits", "why"),
    [(CROWDED, "up to 6 retries of the allocator in a run"), (FULL, "2.5 % left")],
    ids=["retries", "headroom"],
)
def test_a_baseline_at_its_memorys_limit_explains_a_superlinear_speed_up(
    tmp_path: Path, limits: dict[str, Any], why: str
) -> None:
    measured(tmp_path, limits)
    runs = load(tmp_path)
    ((_, pairing),) = campaign(runs).others
    assert not pairing.blockers()
    (caveat,) = (each for each in pairing.caveats() if each.code is Code.AT_MEMORY_LIMIT)
    words = f"on 1 device memory is at its limit ({why})"
    assert words in str(caveat).replace("\u202f", " ")
    row = summary(runs).row(1, named=True)
    assert (row["verdict"], row["speed_up"]) == ("faster", pytest.approx(5.0))
    compared = by(runs, "configuration", "single × 1", "ddp × 2")
    assert compared.rows[0].verdict.value == "faster"
    assert any(words in note.replace("\u202f", " ") for note in compared.notes)
    told = [line.replace("\u202f", " ") for line in answers.headline(runs)]
    assert any(f"one device is at its memory's limit, {why}" in line for line in told)


@pytest.mark.parametrize("limits", [(ROOMY,), (CROWDED, ROOMY)], ids=["in no run", "in half of the runs"])
def test_without_such_evidence_in_most_runs_it_stays_blocked(tmp_path: Path, limits: tuple[dict[str, Any]]) -> None:
    measured(tmp_path, *limits)
    runs = load(tmp_path)
    ((_, pairing),) = campaign(runs).others
    assert [each.code for each in pairing.blockers()] == [Code.SUPERLINEAR]
    assert summary(runs).row(1, named=True)["verdict"] == "not comparable"
    with pytest.raises(ConfigError, match="is not believed"):
        by(runs, "configuration", "single × 1", "ddp × 2")
