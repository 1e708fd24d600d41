"""The append-only log of one rank: what a run has measured so far, safe against a crash at any instant.

Each line is one JSON object: a row of a table, `{"table": "ranks", "row": {…}}`, or an event, `{"event": "phase", …}`.
`commit` makes all lines so far durable. A reader drops a torn last line.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.redaction import redacted
from parallelbench.results.files import is_there, storage_errors, write_all
from parallelbench.results.tables import TABLES, WARNING, check_row

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


Row = dict[str, Any]
Tables = dict[str, list[Row]]

_COLUMNS = {table: {column.name: column.nullable for column in columns} for table, columns in TABLES.items()}
"""Table → column → whether it may be null."""


_NEEDED: dict[str, Any] = {
    "epoch": int,
    "rank": int,
    "attempt": int,
    "node": str,
    "device_uuid": str | None,
    **dict.fromkeys(("training_started_at", "training_ended_at"), int | float),
}
"""Columns that reading relies on, with their types."""


class OtherVersionError(Exception):
    """Another version of the suite measured a row: it lacks a column that is never null."""


class Journal:
    """Writes the journal of one rank; raises `StorageError` where a line can't be written."""

    def __init__(self, path: Path, *, keys: Row | None = None) -> None:
        """`keys`: columns of every row that is written."""
        self._path, self._keys = path, keys or {}
        with storage_errors(path):
            # Unbuffered: a process that is killed loses no line that `write` returned from.
            self._file = path.open("ab", buffering=0)

    def write(self, table: str, rows: Iterable[Row]) -> None:
        """Append rows of a table, in one write."""
        rows = [{**self._keys, **row} for row in rows]
        if not rows:
            return
        for row in rows:
            check_row(table, row)
        self._append([{"table": table, "row": row} for row in rows])

    def event(self, name: str, **details: Any) -> None:
        """Append an event with the current time: progress for those who watch, facts for the publisher."""
        self._append([{"event": name, "time": time.time(), **details}])

    def take_over(self, entries: list[Row]) -> None:
        """Append, durably, what an earlier attempt's journal held, as `kept_entries` returns it."""
        self._append(entries)
        self.commit()

    def commit(self) -> None:
        """Make every line so far durable."""
        with storage_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, entries: list[Row]) -> None:
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
        content = redacted(lines.decode()).encode()
        with storage_errors(self._path):
            write_all(self._file, content)


def read_entries(path: Path) -> list[Row]:
    """All whole lines of one journal, up to the first that no journal writes: what follows it is not trusted."""
    return read_entries_from(path, 0)[0]


def read_entries_from(path: Path, start_byte: int) -> tuple[list[Row], int]:
    """The same from the byte on where a line begins, and the byte to go on from, for whoever follows a journal."""
    entries: list[Row] = []
    if not is_there(path):
        return entries, start_byte
    with path.open("rb") as file:
        file.seek(start_byte)
        lines = file.read().split(b"\n")[:-1]
    for line in lines:
        try:
            entry = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
        if not _is_entry(entry):
            break
        entries.append(entry)
        start_byte += len(line) + 1
    return entries, start_byte


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    if "event" in entry:
        return isinstance(entry["event"], str)
    table, row = entry.get("table"), entry.get("row")
    if not isinstance(table, str) or table not in TABLES or not isinstance(row, dict):
        return False
    return all(isinstance(row.get(name), kind) for name, kind in _NEEDED.items() if name in _COLUMNS[table])


def kept_entries(path: Path, *, through: int) -> list[Row] | None:
    """The entries of a rank's journal that a later attempt keeps when it resumes after epoch `through`: rows, facts
    and warnings.

    Rows stay marked with the attempt that measured them. None where the rank's row of an epoch is missing. Raises
    `OtherVersionError`.
    """
    entries = [_open(entry) for entry in read_entries(path) if _is_kept(entry, through)]
    for table in ("ranks", "epochs") if path.name == "journal-rank0.jsonl" else ("ranks",):
        epochs = [entry["row"]["epoch"] for entry in entries if entry.get("table") == table]
        if epochs != list(range(1, through + 1)):
            return None
    return entries


def _is_kept(entry: Row, through: int) -> bool:
    if "event" in entry:
        return entry["event"] in ("facts", "warned", WARNING)
    # Parity has no epoch. What follows the last epoch is measured by whichever attempt ends the run.
    return bool(entry["table"] != "phases" and entry["row"].get("epoch", 0) <= through)


def _open(entry: Row) -> Row:
    """An entry of a run that goes on: the attempt that ends it checks what was trained. Rows get today's columns: of
    those of another version a missing one is null, and an unknown one is left out.
    """
    if "event" in entry:
        return {name: value for name, value in entry.items() if name != "closing_check_s"}
    row, columns = entry["row"], _COLUMNS[entry["table"]]
    if any(name not in row for name, nullable in columns.items() if not nullable):
        raise OtherVersionError
    return entry | {"row": {name: row.get(name) for name in columns}}


def read_tables(attempt_dir: Path) -> tuple[Tables, list[Row]]:
    """Rows per table, but for telemetry's, and events of an attempt; of epochs, only those that finished on every rank.

    An epoch is finished when rank 0 has written its row of `epochs`, which it does only after every rank's rows of
    that epoch are durable; if one of them can't be read since, of all ranks that the attempt was started with, the
    epoch is omitted from every table. Journals are opened by their names: a listing may come late. NaN and infinity,
    which JSON can't hold, become null. What was sampled in its epochs, `parallelbench.results.sensor_columns` adds.
    """
    from parallelbench.results.attempt import AttemptInfo, decoded  # loads what configures runs: samplers need none

    tables: Tables = {table: [] for table in TABLES if table != "telemetry"}
    events: list[Row] = []
    info = decoded(attempt_dir / "attempt.json", AttemptInfo)
    ranks = range(0 if info is None else info.processes)
    reported: Counter[int] = Counter()
    for rank in ranks:
        told = set()
        for entry in read_entries(attempt_dir / f"journal-rank{rank}.jsonl"):
            if "event" in entry:
                events.append(entry)
            elif entry["table"] in tables:
                tables[entry["table"]].append(entry["row"])
                told |= {entry["row"]["epoch"]} if entry["table"] == "ranks" else set()
        reported.update(told)  # a program's journal has the rows of all ranks of its node
    finished = {row["epoch"] for row in tables["epochs"] if reported[row["epoch"]] == len(ranks)}
    for table in (table for table in tables if "epoch" in _COLUMNS[table]):
        tables[table] = [row for row in tables[table] if row["epoch"] in finished]
    return tables, events
