"""A run that two sweeps have measured is read from the larger one; what lies beside the other one is apart from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import by, compare, load, summary
from analysis.comparison.baseline import unlike_groups
from analysis.comparison.notes import Code
from analysis.comparison.verdict import SpeedVerdict
from analysis.runs.reader import Runs
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, config, published, steady
from tests.analysis.test_claims import REPEATS

LARGE: dict[str, Any] = {"strategy": "ddp", "devices": 2}
SMALL: dict[str, Any] = {"strategy": "zero1", "devices": 2}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Six repeats in turn of single × 1 in two sweeps, a day apart; the machine of the second is a third as fast.

    The larger sweep also has ddp × 2, twice; the smaller one zero1 × 2, which takes half of its own baseline's time.
    """
    root = tmp_path_factory.mktemp("both")
    for repeat in REPEATS:
        at = Fake.started_at + 1e5 * repeat
        for name, time_s, others in (("a", 10.0, (LARGE, {**LARGE, "batch_size": 64})), ("b", 30.0, (SMALL,))):
            start = at + (1e7 if name == "b" else 0.0)
            measured = {"started_at": start + (5e4 if repeat % 2 else 0.0)}
            published(config(root, sweep_name=name, repeat=repeat), steady(time_s + repeat / 10, **measured))
            measured["started_at"] = start + (0.0 if repeat % 2 else 5e4)
            for changes in others:
                fake = steady(time_s / 2 + repeat / 20, **measured)
                published(config(root, sweep_name=name, repeat=repeat, **changes), fake)
    return load(root)


@pytest.mark.exhaustive
def test_runs_of_the_smaller_sweep_are_apart_from_the_larger_ones_baseline(both: Runs) -> None:
    rows = {row["configuration"]: row for row in summary(both).to_dicts() if "batch size 64" not in row["group"]}
    assert rows["single × 1"]["steady_epoch_time_s"] == pytest.approx(10.25)
    assert [rows[name]["verdict"] for name in ("ddp × 2", "zero1 × 2")] == ["faster", "not interleaved"]
    assert {each.path.parent.name for each in both.skipped} == {"b"}
    assert "name one folder for this one" in both.skipped[0].reason
    with pytest.raises(ConfigError, match=r"no run that was read .* \(skipped: 6 runs that other folders hold, too; "):
        by(both, "strategy", "single", "zero2")
    (row,) = by(both, "configuration", "single × 1", "zero1 × 2").rows
    assert row.verdict is SpeedVerdict.NOT_INTERLEAVED
    (issue,) = (issue for group, issue in unlike_groups(both).items() if "batch size 64" not in group)
    assert issue.code is Code.APART
    alone = summary(load(both.root / "b")).filter(configuration="zero1 × 2")
    assert (alone["verdict"].item(), alone["speed_up"].item()) == ("faster", pytest.approx(2.0))


@pytest.mark.exhaustive
def test_rows_that_tie_each_others_pairs_leave_a_note_on_all_of_them(tmp_path: Path) -> None:
    """Each configuration has four independent pairs or five; together all eight are one."""
    for place, pools in enumerate(([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 2, 2, 3, 3, 4])):
        for repeat, pool in enumerate(pools):
            at = Fake.started_at + 1e7 * pool + 1e4 * repeat
            for side, later in (("a", 0.0), ("b", 2e5 * (-1) ** pool)):
                run = config(tmp_path / side, sweep_name=side, repeat=repeat, batch_size=64 * (place + 1))
                published(run, steady(10.0 + repeat / 100, started_at=at + later))
    found = compare(load(tmp_path / "a"), load(tmp_path / "b"))
    assert [len(set(row.time.pools)) for row in found.rows if row.time] == [4, 5]
    assert {row.verdict for row in found.rows} == {SpeedVerdict.EQUAL}
    assert found.verdict is SpeedVerdict.NOT_INTERLEAVED
    (note,) = [note for note in found.notes if "measured apart" in note]
    assert note.startswith("all configurations: ")
