"""A metric over commits: which runs make a point, which points a series, and where a change begins."""

from __future__ import annotations

import csv
import json
import math
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from analysis.comparison.change_points import FEWEST_POINTS, shifts
from analysis.comparison.history import History, history, outcome
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.analysis.factory import config, published, steady
from tests.analysis.made_up import environment
from tests.program.test_answers import measured
from tests.program.test_answers import runs as programs

DAY_S = 86_400.0
WOBBLE = (0.0, 0.4, -0.3, 0.1, -0.5, 0.3, 0.5, -0.2, -0.4, 0.2, 0.1, -0.1)
"""In per cent: what a machine changes from commit to commit."""
REPEATS = (1.0, 1.01, 0.99)


def commit(number: int) -> str:
    return f"{number:02d}" + "abcdef0123456789" * 2


def add(root: Path, number: int, time_s: float, *, sweep: str = "", later_s: float = 0.0, **entries: Any) -> None:
    """Three repeats of one commit, a day after those of the one before."""
    of = environment(**{"git.commit": commit(number)} | entries)
    for repeat, factor in enumerate(REPEATS):
        fake = steady(time_s * factor, started_at=1.7e9 + number * DAY_S + later_s + repeat * 2500, environment=of)
        published(config(root / (sweep or f"c{number}"), repeat=repeat, sweep_name="ci"), fake)


def written(root: Path, times_s: list[float], **entries: Any) -> list[Path]:
    for number, time_s in enumerate(times_s):
        add(root, number, time_s, **entries)
    return [root / f"c{number}" for number in range(len(times_s))]


def times(steps: dict[int, float], points: int = len(WOBBLE)) -> list[float]:
    """About 10 s; from these points on times as much."""
    return [
        10 * (1 + WOBBLE[place] / 100) * math.prod(factor for at, factor in steps.items() if at <= place)
        for place in range(points)
    ]


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Twelve commits; from the eighth on 10 % slower."""
    return written(tmp_path_factory.mktemp("slower"), times({7: 1.1}))


def followed(folders: list[Path], metric: str = "steady_epoch_time_s", **more: Any) -> History:
    return history(folders, metric, **more)


def test_a_point_is_a_commit_with_all_its_repeats(slower: list[Path]) -> None:
    (series,) = followed(slower).series
    assert [point.state.commit for point in series.points] == [commit(number) for number in range(12)]
    assert {point.n for point in series.points} == {3}
    assert series.points[0].median == pytest.approx(10.0)
    assert series.points[0].date == "2023-11-14 22:30"
    # 10, 10.1 and 9.9 s: m = (0 + ln 1.01 + ln 0.99) / 3, s = 0.0100005; t of two degrees of freedom at
    # 3.2 · 0.05^1.125 · 3^-1.5 = 2.1174 % is 6.7591; t · s / √3 = 0.03902.
    assert series.points[0].interval == pytest.approx((10 * 0.96170, 10 * 1.03975), rel=2e-4)


def test_a_change_begins_with_the_commit_that_is_slower(slower: list[Path]) -> None:
    found = followed(slower)
    ((change,),) = [series.changes for series in found.series]
    assert change.at == 7
    assert change.is_worse
    assert change.low < 1.1 < change.high
    assert change.ratio == pytest.approx(1.1, rel=0.01)
    assert outcome(found).code == 0, "it began before the last point"
    for since in (commit(7), commit(7)[:8], commit(3), "2023-11-20"):
        assert outcome(found, since=since).code == 1, since
    for since in (commit(8), "2023-11-23"):
        assert outcome(found, since=since).code == 0, since


def test_last_points_of_two_submits_that_are_much_slower_fail(tmp_path: Path) -> None:
    folders = written(tmp_path, times({10: 1.1}))
    found = followed(folders)
    assert outcome(found).code == 1
    assert "in the last 2 points" in outcome(found).message
    assert "rose by" in outcome(found).message
    rate = followed(folders, "throughput_samples_per_s")
    assert outcome(rate).code == 1, "a rate that falls is worse"
    assert "fell by" in outcome(rate).message


@pytest.mark.parametrize("metric", ["theoretical_state_bytes", "peak_flop_per_s", "memory_limit_bytes"])
def test_what_a_machine_has_is_no_metric_of_sources(metric: str) -> None:
    with pytest.raises(ConfigError, match=f"--metric {metric} has no history"):
        followed([], metric)


def test_one_submit_alone_may_have_met_a_slow_hour(tmp_path: Path) -> None:
    folders = written(tmp_path, times({11: 1.1}))
    assert followed(folders).series[0].changes == ()
    add(tmp_path, 11, 11.0, sweep="again", later_s=9000.0)
    found = followed([*folders, tmp_path / "again"])
    assert [change.at for change in found.series[0].changes] == [11]
    assert outcome(found).code == 1
    assert "in the last point" in outcome(found).message


def test_a_faster_commit_is_no_failure(tmp_path: Path) -> None:
    found = followed(written(tmp_path, times({10: 0.9})))
    assert [change.is_worse for change in found.series[0].changes] == [False]
    assert outcome(found).code == 0


def test_points_without_a_change_say_what_would_have_been_seen(tmp_path: Path) -> None:
    found = followed(written(tmp_path, times({})))
    assert found.series[0].changes == ()
    seen = found.newest.seen
    assert seen is not None
    assert 1.005 < seen < 1.05
    for number in (10, 11):
        shutil.rmtree(tmp_path / f"c{number}")
        add(tmp_path, number, 10 * seen * 1.01)
    assert outcome(followed([tmp_path / f"c{n}" for n in range(12)])).code == 1


def test_few_points_have_no_change(tmp_path: Path) -> None:
    found = followed(written(tmp_path, times({4: 1.5}, points=FEWEST_POINTS - 1)))
    assert found.series[0].changes == ()
    assert outcome(found).code == 0
    assert f"{FEWEST_POINTS} at least" in outcome(found).message
    (alone,) = followed([tmp_path / "c0"]).series
    assert [point.n for point in alone.points] == [3]


def test_unlike_environments_are_series_of_their_own(tmp_path: Path) -> None:
    folders = written(tmp_path, times({}))
    of: dict[str, Any] = {"packages.torch": "2.16.0"}
    for number in (12, 13):
        add(tmp_path, number, 20.0, **of)
    found = followed([*folders, tmp_path / "c12", tmp_path / "c13"])
    assert [len(series.points) for series in found.series] == [12, 2]
    assert "2.15.0 and 2.16.0" in found.series[1].unlike_first
    assert outcome(found).code == 0, "another torch is no change of the sources"
    assert any("series 2" in note.lower() for note in found.notes)


def test_unlike_environments_within_a_commit_are_apart(tmp_path: Path) -> None:
    """Of one sweep, the report would leave out the second environment's."""
    for repeat, torch in enumerate(("2.15.0", "2.15.0", "2.16.0")):
        of = environment(**{"packages.torch": torch})
        published(config(tmp_path, repeat=repeat), steady(10.0 + repeat, environment=of))
    found = followed([tmp_path])
    assert [[point.values for point in series.points] for series in found.series] == [[(10.0, 11.0)], [(12.0,)]]


def test_series_that_are_judged_together_share_the_error(slower: list[Path], tmp_path: Path) -> None:
    """A second kind of machine halves the error of each, so a change must be larger to be seen."""
    (alone,) = followed(slower).series
    of: dict[str, Any] = {"packages.torch": "2.16.0"}
    for number in range(12):
        add(tmp_path, number, times({})[number] * 2, later_s=600.0, **of)
    both = followed([*slower, *(tmp_path / f"c{number}" for number in range(12))]).series
    assert [len(series.points) for series in both] == [12, 12]
    assert [len(series.changes) for series in both] == [1, 0]
    assert both[0].seen is not None
    assert alone.seen is not None
    assert both[0].seen > alone.seen


def test_runs_without_the_metric_are_counted(tmp_path: Path) -> None:
    add(tmp_path, 0, 10.0)
    of = environment(**{"git.commit": commit(1)})
    published(
        config(tmp_path / "c1", sweep_name="ci", repeat=7), steady(10.0, environment=of, startup={"startup_s": None})
    )
    found = followed([tmp_path / "c0", tmp_path / "c1"], "startup_without_parity_s")
    assert any(note.startswith("1 run without it") for note in found.notes)


def test_a_machine_of_another_speed_is_a_series_of_its_own(tmp_path: Path) -> None:
    for number, flop_per_s in enumerate((2e9, 2.1e9, 1e9)):
        speeds = {f"probed_{moment}_matmul_flop_per_s": flop_per_s for moment in ("start", "end")}
        of = environment(**{"git.commit": commit(number)})
        fake = steady(10.0, started_at=1.7e9 + number * DAY_S, environment=of, speeds=speeds)
        published(config(tmp_path / str(number)), fake)
    found = followed([tmp_path / str(number) for number in range(3)])
    assert [len(series.points) for series in found.series] == [2, 1]


def test_uncommitted_changes_are_a_point_for_each_submit(tmp_path: Path) -> None:
    for number in range(2):
        entries: dict[str, Any] = {"git.commit": commit(0), "git.dirty": True}
        add(tmp_path, number, 10.0, **entries)
    (series,) = followed([tmp_path / "c0", tmp_path / "c1"]).series
    assert [point.n for point in series.points] == [3, 3]
    assert series.points[0].state.uncommitted


def test_a_commit_that_is_measured_again_stays_one_point(tmp_path: Path) -> None:
    add(tmp_path, 0, 10.0)
    add(tmp_path, 0, 11.0, sweep="again")
    (series,) = followed([tmp_path / "c0", tmp_path / "again"]).series
    (point,) = series.points
    assert point.n == 3, "equal times of day: a copy"
    for repeat in range(3):
        of = environment(**{"git.commit": commit(0)})
        published(
            config(tmp_path / "later", repeat=repeat),
            steady(11.0 + repeat / 10, started_at=1.8e9 + repeat, environment=of),
        )
    (series,) = followed([tmp_path / name for name in ("c0", "again", "later")]).series
    (point,) = series.points
    assert (point.n, point.submits) == (6, 2)
    assert sorted(point.values) == pytest.approx([9.9, 10, 10.1, 11.0, 11.1, 11.2])


def test_folders_and_what_they_hold_count_once(slower: list[Path]) -> None:
    folders = [slower[0], slower[0] / "ci", next(iter((slower[0] / "ci").iterdir()))]
    ((point,),) = [series.points for series in followed(folders).series]
    assert point.n == 3


def test_several_configurations_are_told_apart_by_name(tmp_path: Path) -> None:
    for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 4)):
        published(config(tmp_path, strategy=strategy, devices=devices), steady(10.0 / devices))
    with pytest.raises(ConfigError, match=r"3 configurations.*devices: 1, 2 and 4.*strategy: ddp and single"):
        followed([tmp_path])
    found = followed([tmp_path], where=["strategy=ddp", "devices=4"])
    assert found.configuration.startswith("ddp × 4")
    assert found.series[0].points[0].median == pytest.approx(2.5)
    with pytest.raises(ConfigError, match=r"no run has strategy=fsdp; .*valid: ddp, single"):
        followed([tmp_path], where=["strategy=fsdp"])
    with pytest.raises(ConfigError, match=r"no run has this key; did you mean strategy"):
        followed([tmp_path], where=["strategi=ddp"])
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        followed([tmp_path], where=["ddp"])


def test_what_has_no_history_is_refused(slower: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean steady_epoch_time_s"):
        followed(slower, "steady_epoch_tim_s")
    with pytest.raises(ConfigError, match="no run that counts has it; it is null where no GPU"):
        followed(slower, "gpu_energy_per_sample_j")
    with pytest.raises(ConfigError, match="is no folder"):
        followed([tmp_path / "none"])
    with pytest.raises(ConfigError, match="holds no runs"):
        followed([tmp_path])
    with pytest.raises(ConfigError, match="no point has this commit"):
        outcome(followed(slower[:2]), since="fedcba9")


def test_a_program_is_followed_over_its_sources(tmp_path: Path) -> None:
    """Its sources are a part of its runs' identity, so all lie in one folder."""
    for number in range(3):
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / "train.py").write_text(f"print({number})")
        for run in programs(tmp_path):
            measured(run, 0.02 * (1 + number), at=1.7e9 + number * DAY_S + 1000 * run.repeat)
            _forget_sources()
    (series,) = followed([tmp_path], "steady_step_time_s").series
    assert [point.n for point in series.points] == [4, 4, 4]
    assert [point.median for point in series.points] == pytest.approx([0.02, 0.04, 0.06])
    assert len({point.state.commit for point in series.points}) == 3


def _forget_sources() -> None:
    from parallelbench.frameworks import program

    program._sources.cache_clear()


def test_the_command_prints_writes_and_exits(
    slower: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, picture = tmp_path / "new" / "points.csv", tmp_path / "points.svg"
    words = ["history", *map(str, slower), "--since", commit(5), "--csv", str(table), "--figure", str(picture)]
    assert cli.main(words) == 1
    printed = capsys.readouterr().out
    assert commit(7)[:10] in printed
    assert "WORSE since" in printed
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 12
    assert [row["commit"] for row in rows if row["change"]] == [commit(7)]
    assert float(rows[0]["median"]) == pytest.approx(10.0)
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert cli.main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["exit_code"], len(told["points"])) == ("history", 1, 12)
    assert cli.main(["history", *map(str, slower), "--figure", "points.png"]) == 2
    assert cli.main(["history", *map(str, slower), "--csv", "points.txt"]) == 2


def test_a_level_that_never_varies_has_no_change_and_one_that_steps_has(tmp_path: Path) -> None:
    assert shifts([1.0] * 20) == []
    assert [shift.at for shift in shifts([1.0] * 12 + [2.0] * 8)] == [12]
    up_and_down = [value + WOBBLE[n % 12] / 100 for n, value in enumerate([1.0] * 12 + [2.0] * 12 + [1.0] * 12)]
    found = shifts(up_and_down)
    assert [shift.at for shift in found] == [12, 24]
    assert [shift.size for shift in found] == pytest.approx([1.0, -1.0], abs=0.01)


def test_a_steady_drift_is_no_change() -> None:
    assert shifts([0.01 * n + WOBBLE[n % 12] / 100 for n in range(24)]) == []


def test_a_folder_that_is_copied_whole_changes_nothing(slower: list[Path], tmp_path: Path) -> None:
    shutil.copytree(slower[0], tmp_path / "copy")
    ((point,),) = [series.points for series in followed([slower[0], tmp_path / "copy"]).series]
    assert point.n == 3
