"""A run that two sweeps have measured counts in both: each configuration is paired with the baseline beside it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from analysis import by, compare, load, summary
from analysis.claims import judge
from analysis.comparison.baseline import against_one_device, unlike_groups
from analysis.comparison.issues import Caveat
from analysis.comparison.ratio import SpeedVerdict
from tests.analysis.factory import Fake, config, published, steady
from tests.analysis.test_claims import REPEATS, claim

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.runs.reader import Runs

LARGE: dict[str, Any] = {"strategy": "ddp", "devices": 2}
SMALL: dict[str, Any] = {"strategy": "zero1", "devices": 2}
TWO = {"strategy": "zero1", "devices": 2}
ONE = {"strategy": "single", "devices": 1}


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
def test_each_configuration_has_the_baseline_of_its_own_sweep(both: Runs) -> None:
    rows = {row["configuration"]: row for row in summary(both).to_dicts() if "batch size 64" not in row["group"]}
    for name in ("ddp × 2", "zero1 × 2"):
        assert rows[name]["speed_up"] == pytest.approx(2.0)
        assert (rows[name]["verdict"], rows[name]["speed_up_pairs"]) == ("faster", 6)
    assert rows["single × 1"]["repeats"] == 6, "medians are of one measurement: the larger sweep's"
    assert rows["single × 1"]["steady_epoch_time_s"] == pytest.approx(10.25)
    pairings = {name: pairing for (_, name), pairing in against_one_device(both).items()}
    assert not pairings["zero1 × 2"].is_apart
    assert {run.sweep.name for pair in pairings["zero1 × 2"].pairs for run in pair.runs} == {"b"}


@pytest.mark.exhaustive
def test_compare_and_claims_take_the_same_pairs(both: Runs) -> None:
    (row,) = by(both, "configuration", "single × 1", "zero1 × 2").rows
    assert row.time is not None
    assert (row.time.median, row.verdict) == (pytest.approx(0.5), SpeedVerdict.FASTER)
    (case,) = judge(both, claim(contrasts=[{"from": TWO, "to": ONE}], expect={"above": 1.0}), seed="0").cases
    assert (case.median, case.verdict) == (pytest.approx(2.0), "reproduced")


@pytest.mark.exhaustive
def test_a_copy_of_a_sweep_counts_nowhere(both: Runs, tmp_path: Path) -> None:
    assert sorted(home.name for home in both.sweeps) == ["b"]
    assert "runs of its own sweep are compared with it, unless" in both.skipped[0].reason
    assert load(both.root / "b").sweeps == {}
    shutil.copytree(both.root, tmp_path / "all")
    shutil.copytree(both.root / "a", tmp_path / "all" / "c")
    copied = load(tmp_path / "all")
    assert sorted(home.name for home in copied.sweeps) == ["b"]
    assert {each.reason.partition(" as ")[0] for each in copied.skipped if each.path.parent.name == "c"} == {
        "the same run"
    }
    assert summary(copied).drop("configuration").equals(summary(both).drop("configuration"))


@pytest.mark.exhaustive
def test_a_measurement_that_counts_is_read_instead_of_one_that_does_not(tmp_path: Path) -> None:
    """Others disturbed the larger sweep's baseline: the smaller one's stands for it, in all verbs."""
    busy = {"others_time_s": lambda epoch, rank: 15.0}
    for repeat in REPEATS:
        a, b = ({"started_at": Fake.started_at + 1e5 * repeat + later} for later in (0.0, 1e7))
        published(config(tmp_path, sweep_name="a", repeat=repeat), steady(30.0, **a, **busy))
        for changes in (LARGE, {**LARGE, "batch_size": 64}):
            published(config(tmp_path, sweep_name="a", repeat=repeat, **changes), steady(5.0, **a))
        b["started_at"] += 5e4 if repeat % 2 else 0.0
        published(config(tmp_path, sweep_name="b", repeat=repeat), steady(10.0, **b))
        b["started_at"] += -5e4 if repeat % 2 else 5e4
        published(config(tmp_path, sweep_name="b", repeat=repeat, **SMALL), steady(5.0, **b))
    runs = load(tmp_path)
    rows = {row["configuration"]: row for row in summary(runs).to_dicts() if "batch size 64" not in row["group"]}
    assert rows["single × 1"]["steady_epoch_time_s"] == pytest.approx(10.0)
    assert (rows["single × 1"]["disturbed"], rows["single × 1"]["repeats"]) == (False, 6)
    assert (rows["zero1 × 2"]["speed_up"], rows["zero1 × 2"]["verdict"]) == (pytest.approx(2.0), "faster")
    assert rows["ddp × 2"]["verdict"] == "not interleaved"
    (row,) = by(runs, "configuration", "single × 1", "zero1 × 2").rows
    assert row.verdict is SpeedVerdict.FASTER
    skipped = [each for each in runs.skipped if each.path.parent.name == "a"]
    assert len(skipped) == 6 == len(runs.skipped)
    assert skipped[0].reason.startswith("it does not count (disturbed), and the same run in ")
    assert skipped[0].twin is not None
    assert skipped[0].twin.parent.name == "b"


@pytest.mark.exhaustive
def test_configurations_of_two_sweeps_are_not_ranked(both: Runs) -> None:
    """Each beside its own baseline has a speed-up; but of their times, those of the slower machine are larger."""
    (issue,) = (issue for group, issue in unlike_groups(both).items() if "batch size 64" not in group)
    assert issue.kind is Caveat.APART


@pytest.mark.exhaustive
def test_a_measurement_that_does_not_count_pairs_with_nothing(tmp_path: Path) -> None:
    """Others disturbed the smaller sweep's baseline, so its other runs are compared with the larger one's: apart."""
    busy = {"others_time_s": lambda epoch, rank: 15.0}
    for repeat in REPEATS:
        a, b = ({"started_at": Fake.started_at + 1e5 * repeat + later} for later in (0.0, 1e7))
        published(config(tmp_path, sweep_name="a", repeat=repeat), steady(10.0, **a))
        published(config(tmp_path, sweep_name="a", repeat=repeat, **LARGE), steady(5.0, **a))
        published(config(tmp_path, sweep_name="a", repeat=repeat, **LARGE, batch_size=64), steady(5.0, **a))
        published(config(tmp_path, sweep_name="b", repeat=repeat), steady(30.0, **b, **busy))
        published(config(tmp_path, sweep_name="b", repeat=repeat, **SMALL), steady(15.0, **b))
    row = summary(load(tmp_path)).filter(configuration="zero1 × 2").to_dicts()[0]
    assert row["speed_up"] == pytest.approx(10.0 / 15.0)
    assert row["verdict"] == "not interleaved"


@pytest.mark.exhaustive
def test_a_claim_takes_both_values_from_the_sweep_that_its_pairing_names(tmp_path: Path) -> None:
    """The baseline beside zero1 counts, but others disturbed its first epoch: the other sweep's is no stand-in."""
    busy = {"others_time_s": lambda epoch, rank: 15.0 if epoch == 1 else 0.0}
    for repeat in REPEATS:
        a, b = ({"started_at": Fake.started_at + 1e5 * repeat + later} for later in (0.0, 1e7))
        published(config(tmp_path, sweep_name="a", repeat=repeat), steady(5.0, **a))
        for changes in (LARGE, {**LARGE, "batch_size": 64}):
            published(config(tmp_path, sweep_name="a", repeat=repeat, **changes), steady(2.5, **a))
        published(config(tmp_path, sweep_name="b", repeat=repeat), steady(15.0, **b, **busy))
        published(config(tmp_path, sweep_name="b", repeat=repeat, **SMALL), steady(15.0, **b))
    runs = load(tmp_path)
    first = claim(metric="first_epoch_time_s", contrasts=[{"from": TWO, "to": ONE}], expect={"below": 0.9})
    judged = judge(runs, first, seed="0")
    assert (judged.verdict, judged.cases) == ("inconclusive", ())
    steadily = claim(contrasts=[{"from": TWO, "to": ONE}], expect={"below": 0.9})
    (case,) = judge(runs, steadily, seed="0").cases
    assert (case.median, case.verdict) == (1.0, "refuted")


@pytest.mark.exhaustive
def test_results_without_a_submit_have_the_verdict_that_their_sweep_has_alone(tmp_path: Path) -> None:
    """Their sessions are numbered among all runs of a sweep, also among those that are read from another one."""
    for repeat in REPEATS:
        for name, later, others in (("a", 0.0, (LARGE, {**LARGE, "batch_size": 64})), ("b", 1e7, (SMALL,))):
            runs = [({}, 10.0), *((changes, 5.0 + repeat * repeat / 100) for changes in others)]
            for place, (changes, time_s) in enumerate(runs[:: -1 if repeat % 2 else 1]):
                started = Fake.started_at + later + 5000.0 * (repeat * len(runs) + place)
                run = config(tmp_path, sweep_name=name, repeat=repeat, **changes)
                published(run, steady(time_s, started_at=started))
    together, alone = load(tmp_path), load(tmp_path / "b")
    assert set(together.run["submit"]) == {None}
    found = [{name: p for (_, name), p in against_one_device(runs).items()}["zero1 × 2"] for runs in (together, alone)]
    assert found[0].pools == found[1].pools == tuple(range(6))


@pytest.mark.exhaustive
def test_rows_that_tie_each_others_pairs_leave_a_note_on_all_of_them(tmp_path: Path) -> None:
    """Each configuration has three independent pairs or four; together all six are one."""
    for place, pools in enumerate(([0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 3])):
        for repeat, pool in enumerate(pools):
            at = Fake.started_at + 1e7 * pool + 1e4 * repeat
            for side, later in (("a", 0.0), ("b", 2e5)):
                run = config(tmp_path / side, sweep_name=side, repeat=repeat, batch_size=64 * (place + 1))
                published(run, steady(10.0 + repeat / 100, started_at=at + later))
    found = compare(load(tmp_path / "a"), load(tmp_path / "b"))
    assert [len(set(row.time.pools)) for row in found.rows if row.time] == [3, 4]
    assert {row.verdict for row in found.rows} == {SpeedVerdict.EQUAL}
    assert found.verdict is SpeedVerdict.NOT_INTERLEAVED
    (note,) = [note for note in found.notes if "measured apart" in note]
    assert note.startswith("all configurations: ")
