"""The compacted copy saves time and changes nothing: whatever happens to runs or to it, tables are those of a scan."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis import Runs, load
from analysis.runs import copy as copy_module
from analysis.runs.copy import NAME
from analysis.runs.published import LOADED, verified
from parallelbench.results.folder import RunFolder
from parallelbench.results.tables import TABLES_VERSION
from tests.analysis.factory import Fake, begin, config, failed, published, write_epochs

pytestmark = pytest.mark.slow

OLD = 1_600_000_000.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the smallest sweeps, written at the smallest change."""
    monkeypatch.setattr(copy_module, "FEWEST_RUNS", 1)
    monkeypatch.setattr(copy_module, "WORTH_RUNS", 1)


def scan(path: Path) -> Runs:
    """The same without any copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_module, "FEWEST_RUNS", 10**9)
        return load(path)


def assert_same(path: Path) -> Runs:
    """`load` with the copy there is gives what a scan gives: runs and their order, each one's rows and their order,
    types, what is skipped.
    """
    fast, slow = load(path), scan(path)
    assert fast.run.equals(slow.run)
    for table in LOADED:
        assert fast.tables[table].schema == slow.tables[table].schema, table
        assert by_run(fast.tables[table]).equals(by_run(slow.tables[table])), table
    assert fast.skipped == slow.skipped
    return fast


def by_run(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.sort("run_id", maintain_order=True)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of run folders that are read from their own files, from now on."""
    seen: list[str] = []
    read = verified

    def noted(folder: RunFolder, manifest: bytes) -> Any:
        seen.append(folder.path.name)
        return read(folder, manifest)

    monkeypatch.setattr(copy_module, "verified", noted)
    return seen


def finished(root: Path, repeat: int, seconds: float = 1.0, **changes: Any) -> RunFolder:
    return published(config(root, repeat=repeat, **changes), Fake(epoch_time_s=lambda e, r: seconds))


def replaced(root: Path, repeat: int, seconds: float) -> None:
    """The run is deleted and run again, with other times."""
    shutil.rmtree(RunFolder.of(config(root, repeat=repeat)).path, ignore_errors=True)
    finished(root, repeat, seconds)


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for repeat in range(3):
        finished(tmp_path, repeat)
    assert_same(tmp_path)
    new = finished(tmp_path, 3, 2.0)
    seen = reads(monkeypatch)
    runs = load(tmp_path)
    assert seen == [new.path.name]
    assert runs.ranks.height == 4 * 3
    seen.clear()
    assert load(tmp_path).ranks.equals(runs.ranks)
    assert seen == []
    assert_same(tmp_path)


def test_tables_are_read_when_they_are_asked_for_also_after_the_copy_changed(tmp_path: Path) -> None:
    finished(tmp_path, 0)
    load(tmp_path)
    runs, slow = load(tmp_path), scan(tmp_path)
    finished(tmp_path, 1)
    load(tmp_path)  # writes another copy under the same name
    assert runs.ranks.equals(slow.ranks)
    assert runs.ranks is runs.ranks


@pytest.mark.exhaustive
def test_some_columns_are_those_of_the_table_from_a_copy_and_without_one(tmp_path: Path) -> None:
    for repeat in range(3):
        finished(tmp_path, repeat)
    load(tmp_path)
    finished(tmp_path, 3, 2.0)  # not in the copy yet
    for runs in (load(tmp_path), scan(tmp_path), load(tmp_path).only(set(scan(tmp_path).run["run_id"][1:3]))):
        for table in runs.tables:
            names = runs.tables[table].columns[::-2]
            fresh = load(tmp_path).only(set(runs.run["run_id"]))
            found = fresh.select(table, "run_id", *(name for name in names if name != "run_id"))
            assert by_run(found).select(names).equals(by_run(runs.tables[table]).select(names))


def test_a_damaged_copy_costs_no_column(tmp_path: Path) -> None:
    for repeat in range(3):
        finished(tmp_path, repeat)
    load(tmp_path)
    runs = load(tmp_path)
    copy = tmp_path / "demo" / NAME
    content = bytearray(copy.read_bytes())
    at = content.index(b"ranks.parquet") + 60
    content[at : at + 400] = bytes(400)
    copy.write_bytes(content)  # in place: it is the file that `runs` has open
    assert runs.select("ranks", "epoch_time_s").equals(scan(tmp_path).ranks.select("epoch_time_s"))


CHANGES = st.lists(
    st.tuples(st.sampled_from(("add", "replace", "delete", "fail", "damage", "empty", "copy")), st.integers(0, 4)),
    min_size=1,
    max_size=8,
)


@pytest.mark.exhaustive
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES)
def test_after_any_changes_it_is_what_a_scan_finds(
    changes: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("changes")
    for step, (change, repeat) in enumerate(changes):
        folder = RunFolder.of(config(root, repeat=repeat))
        if change in ("add", "replace"):
            if change == "replace" or not folder.result.exists():
                replaced(root, repeat, 1.0 + step)
        elif change == "fail":
            shutil.rmtree(folder.path, ignore_errors=True)
            failed(config(root, repeat=repeat), "oom", "out of memory", epochs=1)
        elif change == "delete":
            shutil.rmtree(folder.path, ignore_errors=True)
        elif change == "empty":
            shutil.rmtree(folder.result, ignore_errors=True)
        elif change == "copy":
            twin = folder.path.with_name(f"a{step}")
            if folder.path.exists():
                shutil.copytree(folder.path, twin)
        elif folder.result.exists():
            manifest = folder.result / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[: 50 * (step % 2)])
        assert_same(root)
    shutil.rmtree(root)


def test_a_result_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    folder = finished(tmp_path, 0, 1.0)
    load(tmp_path)
    other = finished(tmp_path / "elsewhere", 0, 2.0)
    shutil.rmtree(folder.result)
    shutil.copytree(other.result, folder.result)
    assert assert_same(folder.path.parent).ranks["epoch_time_s"].to_list() == [2.0] * 3


@pytest.mark.parametrize("how", ["cut", "longer", "gone"])
def test_what_was_damaged_after_it_was_copied_is_set_aside_until_it_is_mended(tmp_path: Path, how: str) -> None:
    folders = [finished(tmp_path, repeat, 1.0 + repeat) for repeat in range(2)]
    whole = load(tmp_path)
    table = folders[0].result / "ranks.parquet"
    content = table.read_bytes()
    if how == "gone":
        table.unlink()
    else:
        table.write_bytes(b"PAR1" if how == "cut" else content + b"PAR1")
    for _ in range(2):
        found = assert_same(tmp_path)
        assert found.run["folder"].to_list() == [str(folders[1].path)]
        (skipped,) = found.skipped
        sizes = f"has {4 if how == 'cut' else len(content) + 4:,} bytes, and its manifest names {len(content):,}"
        why = f"ranks.parquet {'is missing' if how == 'gone' else sizes}"
        assert (skipped.path, skipped.reason) == (folders[0].path, f"its result is damaged: {why}")
    table.write_bytes(content)
    mended = assert_same(tmp_path)
    assert all(by_run(mended.tables[each]).equals(by_run(whole.tables[each])) for each in LOADED)


def test_a_changed_byte_leaves_the_copied_content_which_is_what_the_manifest_says(tmp_path: Path) -> None:
    """The sha256 of each file would take as long as no copy; the copied content had it."""
    folder = finished(tmp_path, 0)
    whole = load(tmp_path)
    table = folder.result / "ranks.parquet"
    table.write_bytes(bytes(table.stat().st_size))
    found = load(tmp_path)
    assert found.skipped == ()
    assert all(found.tables[each].equals(whole.tables[each]) for each in LOADED)
    (skipped,) = scan(tmp_path).skipped
    assert skipped.reason == "its result is damaged: the sha256 of ranks.parquet is not the manifest's"


def test_a_moved_sweep_names_its_folders_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished(tmp_path / "one", 0)
    load(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    seen = reads(monkeypatch)
    runs = load(tmp_path / "two")
    assert seen == [], "the very same results"
    assert runs.run["folder"].to_list() == [str(tmp_path / "two" / folder.path.relative_to(tmp_path / "one"))]
    assert_same(tmp_path / "two")
    monkeypatch.chdir(tmp_path / "two")
    assert_same(Path())
    assert_same(Path("demo"))


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "folder", "other layout"])
def test_a_damaged_copy_is_made_anew(tmp_path: Path, how: str) -> None:
    for repeat in range(2):
        finished(tmp_path, repeat)
    load(tmp_path)
    copy = tmp_path / "demo" / NAME
    content = copy.read_bytes()
    if how == "flipped":  # in the middle of each table
        content = bytes(b ^ 0xFF if i % 997 == 500 else b for i, b in enumerate(content))
    if how == "folder":
        copy.unlink()
        copy.mkdir()
    elif how == "other layout":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copy_module, "layout", lambda table: pl.Schema({"run_id": pl.String}))
            copy.unlink()
            load(tmp_path)
    else:
        changed = {"empty": b"", "cut": content[: len(content) // 2], "flipped": content}
        copy.write_bytes(changed[how])
    assert_same(tmp_path)
    assert_same(tmp_path)


def test_where_nothing_can_be_written_everything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path, 0)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(copy_module.zipfile, "ZipFile", refuse)
        assert_same(tmp_path)
        assert not (tmp_path / "demo" / NAME).exists()
    with monkeypatch.context() as patch:
        patch.setattr(copy_module.os, "replace", refuse)
        assert_same(tmp_path)
    assert [path.name for path in (tmp_path / "demo").iterdir() if path.name.startswith(".")] == []


def test_a_small_sweep_keeps_its_folder_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_module, "FEWEST_RUNS", 3)
    for repeat in range(2):
        finished(tmp_path, repeat)
    load(tmp_path)
    load(tmp_path / "demo" / finished(tmp_path, 2).path.name)
    assert not (tmp_path / "demo" / NAME).exists()
    load(tmp_path)
    assert (tmp_path / "demo" / NAME).exists()


def test_what_a_killed_process_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    finished(tmp_path, 0)
    old, young = (tmp_path / "demo" / f".compacted.{name}.tmp" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half a copy")
    os.utime(old, (OLD, OLD))
    assert_same(tmp_path)
    assert not old.exists()
    assert young.exists()


@pytest.mark.exhaustive
def test_many_readers_and_writers_at_once(tmp_path: Path) -> None:
    """Every reader sees each finished run whole, with the times of one of its results, while runs come and change."""
    for repeat in range(4):
        finished(tmp_path, repeat, 1.0)
    wrong: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            runs = load(tmp_path)
            finished_runs = runs.run.filter(pl.col("state") == "done").select("run_id")
            for (run,), rows in runs.ranks.join(finished_runs, on="run_id").group_by("run_id"):
                if rows.height != 3 or rows["epoch_time_s"].n_unique() != 1:
                    wrong.append(f"{run}: {rows['epoch_time_s'].to_list()}")

    readers = [threading.Thread(target=look) for _ in range(3)]
    for thread in readers:
        thread.start()
    for step in range(12):
        replaced(tmp_path, step % 6, 2.0 + step)
    done.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    assert_same(tmp_path)


def rewrite(folder: RunFolder, version: int, change: Any) -> None:
    """Make the result one of another version of the tables; `change` alters its tables."""
    manifest = json.loads((folder.result / "manifest.json").read_bytes())
    tables = {table: pl.read_parquet(folder.result / f"{table}.parquet") for table in manifest["tables"]}
    for table in set(tables) - set(changed := change(tables)):
        (folder.result / f"{table}.parquet").unlink()
    manifest["tables"] = {}
    for table, frame in changed.items():
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        content = buffer.getvalue()
        (folder.result / f"{table}.parquet").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        manifest["tables"][table] = {"rows": frame.height, "bytes": len(content), "sha256": sha256}
    (folder.result / "manifest.json").write_text(json.dumps(manifest | {"schema_version": version}))


def test_a_result_of_another_version_of_the_tables_is_named(tmp_path: Path) -> None:
    finished(tmp_path, 0)
    for repeat, version in ((1, TABLES_VERSION - 1), (2, TABLES_VERSION + 1)):
        rewrite(finished(tmp_path, repeat), version, lambda tables: tables)
    for _ in range(2):
        runs = assert_same(tmp_path)
        assert runs.run["repeat"].to_list() == [0]
        assert sorted(each.reason.partition(" of the tables")[0] for each in runs.skipped) == sorted(
            f"its result is of version {version}" for version in (TABLES_VERSION - 1, TABLES_VERSION + 1)
        )


@pytest.mark.parametrize(("table", "column"), [("ranks", "epoch_time_s"), ("run", "config_json")])
def test_a_result_that_lacks_a_column_is_named(tmp_path: Path, table: str, column: str) -> None:
    folder = finished(tmp_path, 0)
    rewrite(folder, TABLES_VERSION, lambda tables: tables | {table: tables[table].drop(column)})
    runs = assert_same(tmp_path)
    assert runs.run.is_empty()
    assert f"{table}.{column} is missing" in runs.skipped[0].reason


def test_an_unfinished_run_beside_finished_ones_is_read_from_its_journals_each_time(tmp_path: Path) -> None:
    for repeat in (0, 2):
        finished(tmp_path, repeat)
    run = config(tmp_path, repeat=1)
    _, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=1)
    assert assert_same(tmp_path).epochs.height == 7
    write_epochs(run, attempt, Fake(), epochs=2)
    assert_same(tmp_path)
