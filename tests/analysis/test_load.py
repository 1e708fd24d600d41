"""Any number of run folders, finished or not: read in full, or named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import polars as pl
import pytest

from analysis import load, per_run, summary
from analysis.runs.published import table_schema
from parallelbench.config.identity import run_id
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder
from parallelbench.results.tables import TABLES, TABLES_VERSION
from tests.analysis.factory import Fake, begin, config, failed, foreign, published, write_epochs
from tests.analysis.test_compact import rewrite


def test_published_runs_are_read_from_parquet_with_the_schema_of_the_records(tmp_path: Path) -> None:
    run = config(tmp_path, strategy="ddp", devices=2)
    folder = published(run)
    shutil.rmtree(folder.path / "attempts")  # nothing but the result is needed
    runs = load(tmp_path)
    assert runs.skipped == ()
    assert runs.run.select("run_id", "state", "outcome", "folder").row(0) == (
        run_id(run),
        "done",
        "ok",
        str(folder.path),
    )
    heights = {table: frame.height for table, frame in runs.tables.items() if frame.height}
    assert heights == {"run": 1, "epochs": 3, "ranks": 6, "steps": 6, "parity": 3, "checks": 1}
    for table in TABLES:
        assert dict(getattr(runs, table).schema) == table_schema(table)


@pytest.mark.parametrize("depth", ["run", "sweep", "results"])
def test_a_run_a_sweep_or_a_results_folder_may_be_given(tmp_path: Path, depth: str) -> None:
    folder = published(config(tmp_path))
    root = {"run": folder.path, "sweep": folder.path.parent, "results": tmp_path}[depth]
    assert load(root).run["folder"].to_list() == [str(folder.path)]


@pytest.mark.parametrize(("outcome", "reason"), [("oom", "out of memory"), ("nan", "loss")])
def test_an_unpublished_run_keeps_its_outcome_configuration_and_finished_epochs(
    tmp_path: Path, outcome: str, reason: str
) -> None:
    run = config(tmp_path, strategy="ddp", devices=2, epochs=5)
    failed(run, outcome, reason, epochs=2)
    runs = load(tmp_path)
    row = runs.run.row(0, named=True)
    assert (row["state"], row["outcome"], row["reason"]) == ("failed", outcome, reason)
    assert (row["strategy"], row["devices"], row["epochs"], row["device_type"]) == ("ddp", 2, 5, "cpu")
    assert runs.epochs["epoch"].to_list() == [1, 2]
    assert runs.ranks.height == 4


def test_an_epoch_that_not_every_rank_finished_is_left_out(tmp_path: Path) -> None:
    run = config(tmp_path, strategy="ddp", devices=2)
    folder, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=2)
    journal = attempt.path / "journal-rank0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed while writing the row of `epochs`
    runs = load(folder.path)
    assert runs.epochs["epoch"].to_list() == [1]
    assert set(runs.ranks["epoch"]) == {1}


def test_running_and_missing_runs_have_a_row_with_nulls_for_what_they_have_not_reached(tmp_path: Path) -> None:
    running, missing = config(tmp_path), config(tmp_path, repeat=1)
    begin(running, Fake())
    RunFolder.of(missing).write_intent(missing, [])
    rows = load(tmp_path).run.sort("repeat").select("state", "outcome", "startup_s", "device_name").rows()
    assert rows == [("running", None, None, None), ("missing", None, None, None)]


def test_only_the_last_attempt_of_an_unpublished_run_counts(tmp_path: Path) -> None:
    run = config(tmp_path)
    failed(run, "killed", "first", epochs=2)
    failed(run, "timeout", "second", epochs=1)
    runs = load(tmp_path)
    assert runs.run.select("attempt", "outcome").row(0) == (2, "timeout")
    assert runs.epochs["attempt"].to_list() == [2]


def _damage(folder: RunFolder, how: str) -> None:
    table, manifest = folder.result / "ranks.parquet", folder.result / "manifest.json"
    content = json.loads(manifest.read_bytes())
    if how == "flipped":
        table.write_bytes(bytes(b ^ (i == 100) for i, b in enumerate(table.read_bytes())))
    elif how == "cut":
        table.write_bytes(table.read_bytes()[:-9])
    elif how == "gone":
        table.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:50])
    elif how == "other columns":
        rewrite(folder, TABLES_VERSION, lambda tables: tables | {"ranks": tables["ranks"].drop("epoch_time_s")})
    elif how == "other type":
        many = pl.lit("many").alias("steps")
        rewrite(folder, TABLES_VERSION, lambda tables: tables | {"epochs": tables["epochs"].with_columns(many)})
    elif how == "other table":
        rewrite(folder, TABLES_VERSION, lambda tables: {t: rows for t, rows in tables.items() if t != "pushes"})
    elif how == "other run":
        manifest.write_text(json.dumps(content | {"run_id": "0" * 64}))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("flipped", "its result is damaged"),
        ("cut", "ranks.parquet has "),
        ("gone", "ranks.parquet is missing"),
        ("no manifest", "manifest.json is missing"),
        ("torn manifest", "manifest.json is missing or unreadable"),
        ("other columns", "ranks.epoch_time_s is missing"),
        ("other type", "epochs.steps is String instead of Int32"),
        ("other table", "names other tables than"),
        ("other run", "run.parquet has rows of another run"),
    ],
)
def test_a_damaged_result_is_named_and_skipped_and_the_others_are_read(tmp_path: Path, how: str, reason: str) -> None:
    good, bad = published(config(tmp_path)), published(config(tmp_path, repeat=1))
    _damage(bad, how)
    runs = load(tmp_path)
    assert runs.run["folder"].to_list() == [str(good.path)]
    (skipped,) = runs.skipped
    assert skipped.path == bad.path
    assert reason in skipped.reason


def test_an_empty_table_with_other_columns_is_told_from_whole_ones(tmp_path: Path) -> None:
    """Runs are read together, and an empty table's columns aren't compared when it is scanned."""
    good, bad = published(config(tmp_path)), published(config(tmp_path, repeat=1))
    rewrite(bad, TABLES_VERSION, lambda tables: tables | {"losses": tables["losses"].drop("train_loss")})
    runs = load(tmp_path)
    assert runs.run["folder"].to_list() == [str(good.path)]
    assert [(each.path, "losses.train_loss is missing" in each.reason) for each in runs.skipped] == [(bad.path, True)]


def test_a_table_that_is_read_later_is_named_where_it_is_damaged(tmp_path: Path) -> None:
    folder = published(config(tmp_path), Fake(gpu_power_w=lambda epoch, rank: 100.0))
    assert load(tmp_path).telemetry.height
    (folder.result / "telemetry.parquet").unlink()
    with pytest.raises(ConfigError, match=r"telemetry\.parquet is missing"):
        _ = load(tmp_path).telemetry


def test_rows_belong_to_their_run_whatever_the_manifests_count(tmp_path: Path) -> None:
    folders = [published(config(tmp_path, repeat=repeat, epochs=2 + repeat)) for repeat in range(2)]
    manifests = [json.loads((folder.result / "manifest.json").read_bytes()) for folder in folders]
    rows = [manifest["tables"]["ranks"]["rows"] for manifest in manifests]
    for folder, manifest, wrong in zip(folders, manifests, reversed(rows), strict=True):
        manifest["tables"]["ranks"]["rows"] = wrong
        (folder.result / "manifest.json").write_text(json.dumps(manifest))
    runs = load(tmp_path)
    assert runs.skipped == ()
    assert per_run(runs)["epochs_finished"].to_list() == [2, 3]


def test_foreign_and_half_written_folders_are_named_and_skipped(tmp_path: Path) -> None:
    good = published(config(tmp_path))
    sweep = good.path.parent
    (sweep / "half").mkdir()
    (sweep / "half" / "overrides.txt").write_text("strategy=ddp\n")
    for name, content in {
        "torn": b"model: {_tar",
        "binary": b"\x00\xff\xfe",
        "foreign": b"a: 1\n",
        "empty": b"",
    }.items():
        (sweep / name).mkdir()
        (sweep / name / "config.yaml").write_bytes(content)
    evil = sweep / "evil"
    evil.mkdir()
    text = (good.path / "config.yaml").read_text()
    (evil / "config.yaml").write_text(text.replace("parallelbench.models.cnn.CnnSmall", "os.system"))
    (sweep / "report").mkdir()
    (sweep / ".hidden").mkdir()
    runs = load(sweep)
    assert runs.run.height == 1
    assert [s.path.name for s in runs.skipped] == ["binary", "empty", "evil", "foreign", "half", "torn"]
    assert all("\n" not in s.reason and s.reason for s in runs.skipped)


def test_a_journal_of_somebody_else_makes_no_rows(tmp_path: Path) -> None:
    _, attempt = begin(config(tmp_path), Fake())
    (attempt.path / "journal-rank0.jsonl").write_text('{"table":"ranks"}\n[1,2]\n')
    runs = load(tmp_path)
    assert runs.epochs.is_empty()
    assert runs.ranks.is_empty()
    assert runs.run.height + len(runs.skipped) == 1


@pytest.mark.slow
def test_the_same_run_in_two_sweeps_counts_once_and_the_finished_one_wins(tmp_path: Path) -> None:
    failed(config(tmp_path, sweep_name="a"), "killed", "first", epochs=1)
    second = published(config(tmp_path, sweep_name="b"))
    third = published(config(tmp_path, sweep_name="c"))
    runs = load(tmp_path)
    assert runs.run["folder"].to_list() == [str(second.path)]
    assert runs.epochs.height == 3
    assert [s.path for s in runs.skipped if s.path == third.path]
    assert runs.skipped[-1].reason.startswith(
        f"the same run, or another measurement of it, is read in {second.path.parent} (equal run id)"
    )


@pytest.mark.slow
def test_of_two_measurements_that_of_the_larger_sweep_is_read(tmp_path: Path) -> None:
    """Its runs were measured in turn: a baseline from elsewhere would be compared with them."""
    published(config(tmp_path, sweep_name="adhoc"), Fake(epoch_time_s=lambda e, r: 20.0))
    published(config(tmp_path, sweep_name="demo"), Fake(epoch_time_s=lambda e, r: 10.0))
    published(config(tmp_path, sweep_name="demo", strategy="ddp", devices=2), Fake(epoch_time_s=lambda e, r: 11.0))
    row = summary(load(tmp_path)).row(1, named=True)
    assert row["speed_up"] == pytest.approx(10 / 11)


def test_finished_runs_of_a_users_own_classes_are_read_and_nobodys_code_is_imported(tmp_path: Path) -> None:
    published(config(tmp_path))
    for repeat in (0, 1):
        published(foreign(config(tmp_path, repeat=repeat), "mine"), Fake(epoch_time_s=lambda e, r: 0.5))
    folder = failed(foreign(config(tmp_path, repeat=2), "mine"), "oom", "out of memory", epochs=1)
    runs = load(tmp_path)
    assert sorted(runs.run["strategy"]) == ["mine", "mine", "single"]
    row = summary(runs).filter(pl.col("configuration") == "mine × 1").row(0, named=True)
    assert (row["group"], row["speed_up"], row["repeats"]) == ("digits · cnn_small", 2.0, 2)
    assert "mystrategies" not in sys.modules
    # What an unfinished one was is only in its configuration, which takes the user's class to be checked: it is named.
    (skipped,) = runs.skipped
    assert skipped.path == folder.path
    assert skipped.reason.startswith("it has no result, and its configuration can't be read: ")
    assert "strategy._target_='mystrategies.Mine' is refused" in skipped.reason
    assert "--plugin PACKAGE adds a package" in skipped.reason


def test_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        load(tmp_path / "nowhere")


def test_an_empty_folder_holds_no_runs(tmp_path: Path) -> None:
    runs = load(tmp_path)
    assert runs.run.is_empty()
    assert dict(runs.run.schema) == table_schema("run")


def test_pandas_frames_hold_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    published(config(tmp_path))
    runs = load(tmp_path)
    frames = runs.to_pandas()
    assert {*frames, "telemetry"} == set(TABLES)
    assert pl.from_pandas(frames["ranks"])["epoch_time_s"].to_list() == runs.ranks["epoch_time_s"].to_list()


def test_a_journal_of_another_run_id_is_that_of_its_folder(tmp_path: Path) -> None:
    published(config(tmp_path))
    copied = failed(config(tmp_path, repeat=1), "killed", "signal 9", epochs=2)
    journal = copied.attempts()[-1].path / "journal-rank0.jsonl"
    journal.write_text(journal.read_text().replace(run_id(config(tmp_path, repeat=1)), "f" * 64))
    runs = load(tmp_path)
    assert summary(runs)["runs"].to_list() == [2]
    epochs = per_run(runs).join(runs.run.select("run_id", "repeat"), on="run_id").sort("repeat")["epochs_finished"]
    assert epochs.to_list() == [3, 2]


def test_rows_that_name_another_run_are_read_as_nobodys(tmp_path: Path) -> None:
    """A result is anybody's: its rows must not become those of a run beside it."""
    good, bad = published(config(tmp_path)), published(config(tmp_path, repeat=1))
    other = run_id(config(tmp_path))
    rewrite(bad, TABLES_VERSION, lambda tables: tables | {"ranks": tables["ranks"].with_columns(run_id=pl.lit(other))})
    runs = load(tmp_path)
    assert runs.run["folder"].to_list() == [str(good.path)]
    assert runs.ranks.height == 3
    assert [each.reason for each in runs.skipped] == ["its result is damaged: ranks.parquet has rows of another run"]


def test_rows_of_runs_that_were_taken_out_stay_out(tmp_path: Path) -> None:
    for repeat in range(3):
        published(config(tmp_path, repeat=repeat))
    runs = load(tmp_path)
    fewer = dataclasses.replace(runs, tables={**runs.tables, "run": runs.run.head(2)})
    assert per_run(fewer).equals(per_run(runs).head(2))
    assert summary(fewer)["repeats"].to_list() == [2]


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(config(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/demo").run.height == 1
