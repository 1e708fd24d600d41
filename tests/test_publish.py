"""Publishing: once, whole, and with the manifest as the proof."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from launch.attempt.outcome import publish_if_finished
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.errors import StorageError, SupersededError
from parallelbench.results.attempt import Attempt, Outcome
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal, read_entries, read_tables
from parallelbench.results.publish import configured_columns, publish
from parallelbench.results.tables import TABLES, schema
from tests.analysis.factory import Fake, begin, config, write_epochs
from tests.faults import fault
from tests.helpers import fill_disk

OK = Outcome(outcome="ok", reason="trained 3 epochs", finished_at=1.0)


def trained(run: RunConfig, *, epochs: int = 3) -> tuple[RunFolder, Attempt]:
    folder, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=epochs)
    return folder, attempt


def say_finished(attempt: Attempt) -> None:
    Journal(attempt.path / "journal-rank0.jsonl").event("finished", outcome="ok")


def temporaries(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.path.iterdir() if path.name.endswith(".tmp")]


def test_the_tables_hold_exactly_the_columns_of_the_schema(tmp_path: Path) -> None:
    """And the manifest describes their files."""
    run = config(tmp_path, strategy="ddp", devices=2)
    folder, attempt = trained(run)
    publish(folder, run, attempt, OK, read_tables(attempt.path))
    rows = {table: pq.read_table(folder.result / f"{table}.parquet") for table in TABLES}
    for table, content in rows.items():
        assert content.schema.equals(schema(table), check_metadata=True), table
    assert {table: content.num_rows for table, content in rows.items()} | {
        "steps": 0,
        "parity": 0,
        "checks": 0,
    } == dict.fromkeys(TABLES, 0) | {"run": 1, "epochs": 3, "ranks": 6}
    (row,) = rows["run"].to_pylist()
    assert (row["run_id"], row["outcome"], row["attempt"], row["processes"]) == (run_id(run), "ok", 1, 2)
    manifest = json.loads((folder.result / "manifest.json").read_bytes())
    assert set(manifest["tables"]) == set(TABLES)
    for table, entry in manifest["tables"].items():
        content = (folder.result / f"{table}.parquet").read_bytes()
        assert entry == {"rows": entry["rows"], "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert pq.read_table(folder.result / f"{table}.parquet").num_rows == entry["rows"]
    assert {path.name for path in folder.result.iterdir()} == {
        "manifest.json",
        *(f"{table}.parquet" for table in TABLES),
    }


def test_the_first_result_stands_and_needs_no_checkpoints(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run)
    (attempt.checkpoints / "attempt-1-epoch-2").mkdir(parents=True)
    assert attempt.checkpoints.parent == folder.path
    publish(folder, run, attempt, OK, read_tables(attempt.path))
    assert not attempt.checkpoints.exists()
    before = {path.name: path.read_bytes() for path in folder.result.iterdir()}
    later = folder.claim()
    assert later is not None
    later.describe(processes=1, device_type="cpu", oversubscribed=True)
    write_epochs(run, later, Fake(test_accuracy=lambda epoch: 0.0), epochs=3)
    publish(folder, run, later, OK, read_tables(later.path))
    assert {path.name: path.read_bytes() for path in folder.result.iterdir()} == before
    assert temporaries(folder) == []


def test_a_damaged_result_is_set_aside_and_published_again(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run)
    publish(folder, run, attempt, OK, read_tables(attempt.path))
    (folder.result / "epochs.parquet").write_bytes(b"PAR1")
    publish(folder, run, attempt, OK, read_tables(attempt.path))
    assert folder.state().state == "done"
    (aside,) = folder.path.glob("result.damaged-*")
    assert (aside / "epochs.parquet").read_bytes() == b"PAR1"


@pytest.mark.parametrize("epochs", [0, 2])
def test_incomplete_tables_are_not_published(tmp_path: Path, epochs: int) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run, epochs=epochs)
    with pytest.raises(AssertionError, match=f"{epochs} epochs of 3"):
        publish(folder, run, attempt, OK, read_tables(attempt.path))
    assert not folder.result.exists()
    say_finished(attempt)
    assert publish_if_finished(folder, run, attempt) is None, "a journal that lost an epoch has no result"
    assert folder.state().state == "running"


def test_missing_columns_are_not_published(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(device_name=None), epochs=3)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="device_name"):
        publish(folder, run, attempt, OK, read_tables(attempt.path))
    assert not folder.result.exists()
    assert temporaries(folder) == []


def test_a_finished_journal_is_published_whatever_else_happened(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run)
    assert publish_if_finished(folder, run, attempt) is None
    say_finished(attempt)
    outcome = publish_if_finished(folder, run, attempt)
    assert outcome is not None
    assert (outcome.outcome, outcome.reason) == ("ok", "trained 3 epochs")
    assert attempt.outcome() == outcome
    assert folder.state().state == "done"


@fault(
    "storage and input",
    "Disk full during publication",
    injection="a tmpfs of 1 MiB fills up before the tables are written",
    outcome="outcome storage, no result; with space again the result is published from the journals, without training",
)
def test_a_full_disk_is_an_outcome_and_publishing_can_be_made_up_for(small_disk: Path) -> None:
    run = config(small_disk)
    folder, attempt = trained(run)
    say_finished(attempt)
    ballast = fill_disk(small_disk, leave_bytes=8192)
    outcome = publish_if_finished(folder, run, attempt)
    assert outcome is not None
    assert outcome.outcome == "storage"
    assert "disk is full" in outcome.reason
    assert not folder.result.exists()
    assert temporaries(folder) == []
    assert folder.state().to_run
    ballast.unlink()
    assert publish_if_finished(folder, run, attempt) is not None
    assert (folder.state().state, folder.state().label) == ("done", "ok")


def test_an_attempt_that_was_superseded_does_not_publish(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run)
    say_finished(attempt)
    assert folder.claim() is not None
    with pytest.raises(SupersededError, match="a newer attempt took over"):
        publish(folder, run, attempt, OK, read_tables(attempt.path))
    outcome = publish_if_finished(folder, run, attempt)
    assert outcome is not None
    assert (outcome.outcome, outcome.reason) == ("killed", "a newer attempt took over")
    assert not folder.result.exists()
    assert temporaries(folder) == []


def test_an_attempt_that_is_superseded_while_it_publishes_leaves_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run)

    def claim_and_write(path: Path, content: bytes) -> None:
        assert folder.claim() is not None
        path.write_bytes(content)

    monkeypatch.setattr("parallelbench.results.publish.write_file", claim_and_write)
    with pytest.raises(SupersededError):
        publish(folder, run, attempt, OK, read_tables(attempt.path))
    assert not folder.result.exists()
    assert temporaries(folder) == []


@fault(
    "storage and input",
    "A crash during publication",
    injection="the process stops after each step of publishing in turn",
    outcome="no result, and nothing that looks like one; publishing again works",
)
@pytest.mark.parametrize("step", ["mkdir", "parquet", "manifest", "rename"])
def test_a_crash_while_publishing_leaves_no_result(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run)
    say_finished(attempt)

    def crash(*_: Any, **__: Any) -> None:
        os._exit(9)

    where = {
        "mkdir": "pathlib.Path.mkdir",
        "parquet": "pyarrow.parquet.write_table",
        "manifest": "parallelbench.results.publish.write_file",
        "rename": "os.rename",
    }
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(where[step], crash)
            publish(folder, run, attempt, OK, read_tables(attempt.path))
        finally:
            os._exit(3)  # whatever happens: this process must not go on as a second test run
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert folder.manifest() is None
    assert not folder.result.exists()
    assert publish_if_finished(folder, run, attempt) is not None
    assert folder.state().state == "done"


def test_a_folder_that_can_not_be_written_is_a_storage_error(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder, attempt = trained(run)
    folder.path.rename(tmp_path / "moved")
    moved = type(attempt)(tmp_path / "moved" / "attempts" / "1")
    with pytest.raises(StorageError, match="can't write"):
        publish(folder, run, moved, OK, read_tables(moved.path))


@pytest.mark.parametrize("resumed", [False, True])
def test_oversubscribed_is_what_any_of_the_published_epochs_was(resumed: bool, tmp_path: Path) -> None:
    """An attempt on too few cores is followed by one on enough, which starts anew, or goes on after two epochs."""
    run = config(tmp_path)
    folder, first = begin(run, Fake(oversubscribed=True))
    first.finish("killed", "by a test")
    later = folder.claim(after=1)
    assert later is not None
    later.describe(processes=1, device_type="cpu", oversubscribed=False)
    if resumed:
        write_epochs(run, first, Fake(resumed_after=2), epochs=3)
        Journal(later.path / "journal-rank0.jsonl").take_over(read_entries(first.path / "journal-rank0.jsonl"))
    else:
        write_epochs(run, later, Fake(), epochs=3)
    publish(folder, run, later, OK, read_tables(later.path))
    (row,) = pq.read_table(folder.result / "run.parquet").to_pylist()
    assert row["oversubscribed"] is resumed


def test_a_run_that_only_preprocesses_may_have_been_oversubscribed(tmp_path: Path) -> None:
    run = config(tmp_path, epochs=0, preprocess={"engine": "numpy"})
    folder, attempt = begin(run, Fake(oversubscribed=True))
    write_epochs(run, attempt, Fake(), epochs=0)
    publish(folder, run, attempt, OK, read_tables(attempt.path))
    (row,) = pq.read_table(folder.result / "run.parquet").to_pylist()
    assert row["oversubscribed"] is True


@pytest.mark.parametrize(("engine", "threads"), [("none", None), ("numpy", 2)])
def test_only_an_engine_has_threads(engine: str, threads: int | None, tmp_path: Path) -> None:
    run = config(tmp_path, preprocess={"engine": engine, "threads": 2})
    assert configured_columns(run)["preprocess_threads"] == threads
