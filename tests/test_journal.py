"""The journal: whatever a crash leaves of it is read, and an epoch counts only when it is whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.attempt.outcome import judge, publish_if_finished
from parallelbench.config.components import Shard
from parallelbench.errors import StorageError
from parallelbench.results.attempt import RETRYABLE, Attempt
from parallelbench.results.journal import (
    Journal,
    OtherVersionError,
    kept_entries,
    read_entries,
    read_entries_from,
    read_tables,
)
from parallelbench.results.tables import TABLES, WARNING
from parallelbench.training.loop import Trainer
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.analysis.factory import Fake, begin, config, write_epochs
from tests.faults import fault
from tests.helpers import TINY, configured, fill_disk
from tests.strategies.training import shard_loader

EPOCHS = 2


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An attempt of two ranks whose journals hold two epochs."""
    run = config(tmp_path, strategy="ddp", devices=2, epochs=EPOCHS)
    _, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=EPOCHS)
    return attempt


def journal_of(attempt: Attempt, rank: int) -> Path:
    return attempt.path / f"journal-rank{rank}.jsonl"


def finished(attempt: Attempt) -> list[int]:
    """The epochs that are read back, after checking that each is whole."""
    tables, _ = read_tables(attempt.path)
    epochs = [row["epoch"] for row in tables["epochs"]]
    whole = sorted((epoch, rank) for epoch in epochs for rank in (0, 1))
    assert sorted((row["epoch"], row["rank"]) for row in tables["ranks"]) == whole
    assert {(row["epoch"], row["rank"]) for row in tables["steps"]} <= set(whole)
    return epochs


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    run = config(tmp_path)
    _, attempt = begin(run, Fake())
    journal = Journal(attempt.path / "journal-rank0.jsonl")
    row: dict[str, Any] = {column.name: 0.5 if column.type == "float64" else 1 for column in TABLES["steps"]}
    journal.event("phase", phase="epoch", epoch=1)
    journal.write("steps", [row, row])
    journal.write("steps", [])
    journal.commit()
    journal.close()
    entries = read_entries(attempt.path / "journal-rank0.jsonl")
    assert entries[0].pop("time") > 0
    assert entries == [
        {"event": "phase", "phase": "epoch", "epoch": 1},
        {"table": "steps", "row": row},
        {"table": "steps", "row": row},
    ]


def test_a_journals_keys_are_columns_of_every_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal-rank0.jsonl", keys={"run_id": "known", "attempt": 3})
    journal.write("losses", [{"epoch": 1, "step": step, "steps": 1, "train_loss": 0.5} for step in (1, 2)])
    rows = [entry["row"] for entry in read_entries(tmp_path / "journal-rank0.jsonl")]
    assert [(row["run_id"], row["attempt"], row["step"]) for row in rows] == [("known", 3, 1), ("known", 3, 2)]


def test_lines_are_there_without_commit_or_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal-rank0.jsonl")
    journal.event("phase")
    assert len(read_entries(tmp_path / "journal-rank0.jsonl")) == 1


@pytest.mark.parametrize(
    "change", [lambda row: row.pop("step"), lambda row: row.update(extra=1), lambda row: row.update(step=None)]
)
def test_a_row_that_is_not_of_the_schema_is_our_mistake(tmp_path: Path, change: Any) -> None:
    row = dict.fromkeys((column.name for column in TABLES["steps"]), 1)
    change(row)
    with pytest.raises(AssertionError, match="steps"):
        Journal(tmp_path / "journal").write("steps", [row])


def test_no_journal_is_an_empty_one(tmp_path: Path) -> None:
    assert read_entries(tmp_path / "nothing") == []
    tables, events = read_tables(tmp_path)
    assert ({*tables, "telemetry"}, events) == (set(TABLES), [])


def test_who_follows_a_journal_gets_each_line_once_and_reads_none_twice(attempt: Attempt) -> None:
    path = journal_of(attempt, 0)
    content = path.read_bytes()
    expected, got, next_byte = read_entries(path), [], 0
    for size in range(0, len(content) + 1, 7):
        # What was read before could be anything by now: nobody looks at it again.
        path.write_bytes(b"x" * next_byte + content[next_byte:size])
        entries, next_byte = read_entries_from(path, next_byte)
        got += entries
    path.write_bytes(content)
    got += read_entries_from(path, next_byte)[0]
    assert got == expected
    assert read_entries_from(path, len(content)) == ([], len(content))


@pytest.mark.cases("1")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_journal_cut_off_at_any_byte_keeps_exactly_the_epochs_before(attempt: Attempt, rank: int) -> None:
    path = journal_of(attempt, rank)
    content = path.read_bytes()
    table = "epochs" if rank == 0 else "ranks"
    lines = content.splitlines(keepends=True)
    sizes = itertools.accumulate(map(len, lines))  # what makes an epoch whole is in the file from this size on
    ends = [size for line, size in zip(lines, sizes, strict=True) if json.loads(line).get("table") == table]
    assert len(ends) == EPOCHS
    for size in range(len(content), -1, -1):
        path.write_bytes(content[:size])
        assert finished(attempt) == [epoch for epoch, end in enumerate(ends, 1) if end <= size]


def test_an_epoch_of_which_a_rank_knows_nothing_is_left_out(attempt: Attempt) -> None:
    path = journal_of(attempt, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if json.loads(line)["row"]["epoch"] != 2))
    assert finished(attempt) == [1]


@fault(
    "numbers",
    "A rank's journal that is not there",
    injection="the journal of one of two ranks is removed, once it was trained to the end, and put back later",
    outcome="no epoch counts as finished, in no table, and nothing is published; submitting again publishes it",
)
def test_an_epoch_counts_when_all_ranks_that_the_run_has_say_so(tmp_path: Path) -> None:
    run = config(tmp_path, strategy="ddp", devices=2, epochs=EPOCHS)
    folder, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=EPOCHS)
    journal = Journal(journal_of(attempt, 0))
    unknown: dict[str, Any] = dict.fromkeys((column.name for column in TABLES["checks"]), None)
    keys = {"run_id": "r", "attempt": 1, "epoch": EPOCHS, "check": "loss", "detail": "as expected"}
    journal.write("checks", [unknown | keys])
    journal.event("finished", outcome="ok")
    path = journal_of(attempt, 1)
    content = path.read_bytes()
    path.unlink()
    tables, _ = read_tables(attempt.path)
    assert {table for table, rows in tables.items() if rows} <= {"parity"}, "which follows no epoch"
    assert publish_if_finished(folder, run, attempt) is None
    outcome, reason = judge(attempt, 2, 0)
    assert (outcome in RETRYABLE, "rank 1" in reason) == (True, True)
    path.write_bytes(content[: content.rindex(b'{"table":"ranks"')])
    tables, _ = read_tables(attempt.path)
    assert {row["epoch"] for table in ("losses", "steps", "checks") for row in tables[table]} == {1}
    path.write_bytes(content)
    outcome = publish_if_finished(folder, run, attempt)
    assert outcome is not None
    assert outcome.outcome == "ok"


FOREIGN = (
    *(b"", b"garbage", b"{", b"\x00" * 64, b"\xff\xfe", b"[1, 2]", b"7", b"null", b'"event"', b"{}", b'{"event": 3}'),
    *(b'{"table": "nothing", "row": {}}', b'{"table": ["ranks"], "row": {}}', b'{"table": "ranks"}'),
    *(b'{"table": "ranks", "row": 3}', b'{"table": "ranks", "row": {}}'),
    b'{"table": "ranks", "row": {"epoch": "1", "rank": 0}}',
)


@pytest.mark.parametrize("line", FOREIGN)
def test_a_line_of_somebody_else_ends_the_journal(attempt: Attempt, line: bytes) -> None:
    path = journal_of(attempt, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    second = next(i for i, text in enumerate(lines) if b'"epochs"' in text and b'"epoch":2' in text)
    path.write_bytes(b"".join([*lines[:second], line + b"\n", *lines[second:]]))
    assert finished(attempt) == [1]
    assert len(read_entries(path)) == second


@given(st.binary(max_size=200))
def test_whatever_is_in_the_file_reading_never_raises(content: bytes) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "journal-rank0.jsonl").write_bytes(content + b"\n")
        tables, _ = read_tables(Path(folder))
    assert tables["epochs"] == []


def test_infinite_losses_become_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal-rank0.jsonl")
    journal.event("facts", good=0.5, bad=float("nan"), worse=float("-inf"))
    (entry,) = read_entries(tmp_path / "journal-rank0.jsonl")
    assert (entry["good"], entry["bad"], entry["worse"]) == (0.5, None, None)


def test_a_disk_that_fills_up_is_a_storage_error_and_keeps_the_epochs_before(small_disk: Path) -> None:
    run = config(small_disk, epochs=EPOCHS)
    _, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=1)
    fill_disk(small_disk, leave_bytes=4096)
    journal = Journal(journal_of(attempt, 0))

    journal.event("phase", phase="before")
    with pytest.raises(StorageError, match=r"journal-rank0\.jsonl: the disk is full"):
        journal.event("phase", phase="x" * 100_000)  # longer than what is left, so that its line is always torn
    assert not journal_of(attempt, 0).read_bytes().endswith(b"\n"), "the last line is torn, or this tests nothing"
    tables, events = read_tables(attempt.path)
    assert [row["epoch"] for row in tables["epochs"]] == [1]
    assert [row["epoch"] for row in tables["ranks"]] == [1]
    assert events[-1]["phase"] == "before"
    attempt.finish("storage", "the disk is full")
    outcome = attempt.outcome()
    assert outcome is not None
    assert outcome.outcome == "storage"


def test_a_journal_that_can_not_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="journal"):
        Journal(tmp_path / "file" / "journal")


# --- what a later attempt takes over


def test_a_later_attempt_takes_over_finished_epochs_and_facts(attempt: Attempt) -> None:
    journal = Journal(journal_of(attempt, 0))
    journal.event("stopped", epoch=2, epochs=9, saved=2)
    journal.event("facts", closing_check_s=1.0)
    journal.event(WARNING, reason="the sampler ended early", device="a node")
    kept = kept_entries(journal_of(attempt, 0), through=1)
    assert kept is not None
    assert {entry["row"].get("epoch", 1) for entry in kept if "table" in entry} == {1}
    assert {entry["table"] for entry in kept if "table" in entry} == {"ranks", "steps", "parity", "epochs"}
    assert {entry["event"] for entry in kept if "event" in entry} == {"facts", WARNING}
    assert not any("closing_check_s" in entry for entry in kept), "the attempt that ends the run closes it"
    later = Journal(attempt.path / "journal-rank9.jsonl")
    later.take_over(kept)
    assert read_entries(attempt.path / "journal-rank9.jsonl") == kept


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_taken_over_from_a_journal_that_lacks_an_epoch(attempt: Attempt, rank: int) -> None:
    path = journal_of(attempt, rank)
    assert kept_entries(path, through=EPOCHS) is not None
    assert kept_entries(path, through=EPOCHS + 1) is None
    lines = path.read_bytes().splitlines(keepends=True)
    without = [line for line in lines if not (b'"table":"ranks"' in line and b'"epoch":1,' in line)]
    assert len(without) == len(lines) - 1
    path.write_bytes(b"".join(without))
    assert kept_entries(path, through=EPOCHS) is None
    path.unlink()
    assert kept_entries(path, through=EPOCHS) is None


def renamed(path: Path, column: str) -> None:
    """Rows as another version has them: without a column, and with one that is unknown here."""
    content = path.read_text()
    assert f'"{column}":' in content
    path.write_text(content.replace(f'"{column}":', '"unknown":'))


def test_rows_of_another_version_get_todays_columns(attempt: Attempt) -> None:
    path = journal_of(attempt, 1)
    today = kept_entries(path, through=EPOCHS)
    renamed(path, "host_peak_rss_bytes")
    kept = kept_entries(path, through=EPOCHS)
    assert today is not None
    assert kept == [
        entry | {"row": entry["row"] | {"host_peak_rss_bytes": None}} if entry["table"] == "ranks" else entry
        for entry in today
    ]


def test_rows_of_another_version_without_what_is_never_null_are_not_taken_over(attempt: Attempt) -> None:
    path = journal_of(attempt, 1)
    renamed(path, "epoch_time_s")
    with pytest.raises(OtherVersionError):
        kept_entries(path, through=EPOCHS)


def test_without_rank_0s_word_an_epoch_is_not_finished(attempt: Attempt) -> None:
    path = journal_of(attempt, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"table":"epochs"' not in line))
    assert kept_entries(path, through=1) is None


def test_the_row_of_an_epoch_is_the_last_that_is_written_of_it() -> None:
    """A run that is killed anywhere has all of an epoch, or no such row."""
    run, written = configured(*TINY, "model=mlp", "epochs=2"), list[tuple[str, int]]()
    journal = mock.Mock(write=lambda table, rows: written.extend((table, row["epoch"]) for row in rows))
    replica = run.strategy.prepare(build_model(run), run, World())
    Trainer(replica, shard_loader(run, Shard()), run=run, world=World(), journal=journal).train()
    places = [written.index(("epochs", epoch)) for epoch in (1, 2)]
    assert {table for table, _ in written} >= {"epochs", "ranks", "checks", "losses", "steps"}
    assert [max(at for at, (_, of) in enumerate(written) if of == epoch) for epoch in (1, 2)] == places
