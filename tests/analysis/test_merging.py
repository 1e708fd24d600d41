"""`report A B`: several folders in one report, of which each one's runs are compared by themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import facts, load, summary, summary_table
from analysis.comparison.exclusions import excluded
from analysis.folders import load_all, replications
from analysis.report import page as page_module
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, as_words, config, failed, one_and_two, published, words_of

pytestmark = pytest.mark.slow

ENVIRONMENT = json.loads(Fake().environment)
TOLD = ["configuration", "steady_epoch_time_s", "speed_up", "speed_up_pairs", "runs", "repeats"]


def on(host: str | None, time_s: float, **entries: Any) -> Fake:
    environment = ENVIRONMENT | {"host": host} | entries
    started_at = Fake.started_at + 1e6 * (host == "beta")
    return Fake(epoch_time_s=lambda epoch, rank: time_s, environment=json.dumps(environment), started_at=started_at)


def measured(root: Path, host: str | None, single_s: float, ddp_s: float, **run: Any) -> Path:
    """Repeats of one device and of two in a folder of one machine."""
    one_and_two(root, [(on(host, single_s), on(host, ddp_s))] * 3, **run)
    return root


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """The same runs on two machines, of which the second is twice as fast and scales worse."""
    return [measured(tmp_path / "a", "alpha", 10.0, 6.0), measured(tmp_path / "b", "beta", 5.0, 4.0)]


def by_group(paths: list[Path]) -> dict[str, list[tuple[Any, ...]]]:
    rows = summary(load_all(paths))
    return {str(group): members.select(TOLD).rows() for (group,), members in rows.group_by("group")}


@pytest.mark.exhaustive
def test_a_run_that_lies_in_two_folders_is_kept_by_both_and_no_duplicate(two: list[Path]) -> None:
    runs = load_all(two)
    assert runs.run.height == runs.run["run_id"].n_unique() == 12
    assert runs.skipped == ()
    assert excluded(runs).is_empty()
    assert by_group(two) == {
        "digits · cnn_small · folder a": [("single × 1", 10.0, 1.0, 3, 3, 3), ("ddp × 2", 6.0, 10 / 6, 3, 3, 3)],
        "digits · cnn_small · folder b": [("single × 1", 5.0, 1.0, 3, 3, 3), ("ddp × 2", 4.0, 5 / 4, 3, 3, 3)],
    }


@pytest.mark.exhaustive
def test_what_each_folder_holds_is_as_in_its_own_report(tmp_path: Path) -> None:
    """Also where two sweeps have measured the same runs, of which the larger one's are read."""
    a = measured(tmp_path / "a", "alpha", 10.0, 6.0)
    measured(tmp_path / "a", "alpha", 20.0, 11.0, sweep_name="again")
    for repeat in range(3):
        fsdp = config(tmp_path / "a", strategy="fsdp", devices=2, repeat=repeat, sweep_name="again")
        published(fsdp, on("alpha", 10.0))
    b = measured(tmp_path / "b", "beta", 5.0, 4.0)
    every = by_group([a, b])
    for path in (a, b):
        alone = summary(load(path)).select(TOLD).rows()
        assert every[f"digits · cnn_small · folder {path.name}"] == alone
    assert ("fsdp × 2", 10.0, 2.0, 3, 3, 3) in every["digits · cnn_small · folder a"]


@pytest.mark.exhaustive
def test_a_run_that_died_early_has_the_device_of_its_own_folder(two: list[Path]) -> None:
    run = config(two[1], strategy="fsdp", devices=2)
    failed(run, "error", "died", epochs=0)
    path = next(two[1].glob("demo/*fsdp*/attempts/*/journal-rank0.jsonl"))
    path.unlink()
    rows = facts(load_all(two)).filter(strategy="fsdp")
    assert rows["group"].to_list() == ["digits · cnn_small · folder b"]


@pytest.mark.exhaustive
def test_a_copy_counts_nowhere_and_is_told_from_another_measurement(two: list[Path]) -> None:
    copy = shutil.copytree(two[0], two[0].parent / "copy" / "a")
    assert summary(load_all([two[0], copy]))["runs"].to_list() == [3, 3]
    published(config(copy, strategy="fsdp", devices=2), on("alpha", 5.0))
    runs = load_all([two[0], copy])
    assert sorted({each.reason for each in runs.skipped}) == [
        f"copied from {two[0]}/demo, or to there (equal times of day): it counts once"
    ]
    assert len(runs.skipped) == 6
    assert str(summary_table(runs).title) == f"{two[0]} + {copy}", "as much as tells them apart"
    assert {each.path.parent for each in runs.skipped} == {copy / "demo"}
    assert runs.run["strategy"].to_list().count("fsdp") == 1 == runs.run.height - 6
    assert not any("replications" in line for line in replications(runs))
    again = published(config(two[0].parent / "again"), Fake(started_at=Fake.started_at + 1e5))
    assert load_all([two[0], again.path.parent]).skipped == ()


def test_a_copy_of_a_run_that_never_trained_counts_nowhere(tmp_path: Path) -> None:
    failed(config(tmp_path / "a"), "error", "died", epochs=0)
    shutil.copytree(tmp_path / "a", tmp_path / "copy" / "b")
    runs = load_all([tmp_path / "a", tmp_path / "copy" / "b"])
    assert runs.run.height == 1
    assert [each.is_twin for each in runs.skipped] == [True]


@pytest.mark.exhaustive
def test_the_report_tells_the_folders_and_their_replications(
    two: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "draw", lambda runs: [])
    published(config(two[1], strategy="fsdp", devices=2), on("beta", 3.0))
    out = two[0].parent / "both"
    assert cli.main(["report", *map(str, two), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = [
        "Runs of 2 folders: a (6 runs) and b (7 runs). Within this report each is compared with runs of its own folder "
        f"only; `parallelbench compare {two[0]} {two[1]}` compares folders.",
        "6 runs are in more than one of them: replications, of which each folder's counts by itself.",
    ]
    words = words_of((out / "index.html").read_text())
    for line in lines:
        assert line in printed
        assert as_words(line) in words
    assert "digits · cnn_small · folder a" in words
    table = pl.read_csv(out / "tables" / "runs.csv")
    assert sorted(table["group"].unique()) == [f"digits · cnn_small · folder {name}" for name in ("a", "b")]
    assert cli.main(["compare", *map(str, two)]) in (0, 2)


def test_samples_of_telemetry_have_the_ids_of_the_merged_runs(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        fake = on(name, 1.0)
        fake.gpu_power_w = lambda epoch, rank: 100.0
        published(config(tmp_path / name), fake)
    runs = load_all([tmp_path / "alpha", tmp_path / "beta"])
    assert sorted(runs.telemetry["run_id"].unique()) == sorted(runs.run["run_id"])


def test_what_is_no_set_of_folders_is_refused(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, two)
    empty = two[0].parent / "empty"
    empty.mkdir()
    for folders, why in (
        ([a, a], "are the same folder: name it once"),
        ([a, f"{a}/demo"], f"{a}/demo lies in {a}, whose runs include its own"),
        ([f"{a}/demo", a], f"{a}/demo lies in {a}, whose runs include its own"),
        ([a, f"{b}/none"], f"{b}/none is no folder"),
        ([a, str(empty)], f"{empty} holds no runs"),
    ):
        assert cli.main(["report", *folders, "--out", str(two[0].parent / "out")]) == 2
        assert why in capsys.readouterr().err
    assert cli.main(["report", a, b]) == 2
    assert "name its folder with --out DIR" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="lies in"):
        load_all([a, f"{a}/demo"])
