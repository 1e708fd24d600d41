"""What a node's sampler leaves: a file of records, each a row of `telemetry`, and a journal of what it could not read.

All records have the same size, so that a file of millions is decoded at once, and whatever instant the sampler is
killed at, all whole records count and a torn last one does not. `struct` writes them: pyarrow, for an Arrow stream,
would more than double the start and the memory of a process that runs beside pinned ranks.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelbench.results.files import storage_errors, write_all
from parallelbench.results.journal import Journal, Row
from parallelbench.results.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class Field(NamedTuple):
    """How a type is written: `struct`'s code, numpy's name, and the value for null, which is never measured."""

    code: str
    dtype: str
    null: Any


STRING_BYTES = 64
"""A sha256, and the longest name that Linux gives a host."""
COLUMNS = TABLES["telemetry"]
FIELDS = {
    "string": Field(f"{STRING_BYTES}s", f"S{STRING_BYTES}", b""),
    "int32": Field("i", "<i4", -(2**31)),
    "int64": Field("q", "<i8", -(2**63)),
    "float64": Field("d", "<f8", math.nan),
}
MARK = zlib.crc32(repr([(column.name, column.type, FIELDS[column.type]) for column in COLUMNS]).encode())
"""Begins and ends each record of these columns; those of others have another one. A page of the disk that a power cut
left empty takes an end of each record that it touches, for records are shorter."""
_RECORD = struct.Struct(f"<Q{''.join(FIELDS[column.type].code for column in COLUMNS)}Q")


def journal_of(path: Path) -> Path:
    """The journal beside a file of records."""
    return path.with_suffix(".jsonl")


class Recorder(Journal):
    """Writes the journal, and records to `path`; raises `StorageError` where that can't be done."""

    def __init__(self, path: Path) -> None:
        super().__init__(journal_of(path))
        self._recording = path
        with storage_errors(path):
            # Unbuffered: a process that is killed loses no sample that `record` returned from.
            self._records = path.open("ab", buffering=0)

    def record(self, rows: Iterable[Row]) -> None:
        """Append rows of `telemetry`, in one write; a column that a row lacks is null."""
        with storage_errors(self._recording):
            write_all(self._records, b"".join(map(_packed, rows)))

    def close(self) -> None:
        """Make everything durable, and close the files."""
        with storage_errors(self._recording):
            os.fsync(self._records.fileno())
        self._records.close()
        self.commit()
        super().close()


def _packed(row: Row) -> bytes:
    return _RECORD.pack(MARK, *(_field(column.type, row.get(column.name)) for column in COLUMNS), MARK)


def _field(kind: str, value: Any) -> Any:
    if value is None:
        return FIELDS[kind].null
    if kind != "string":
        return value
    content = value.encode()
    assert len(content) <= STRING_BYTES, f"{value}: more than {STRING_BYTES} bytes"
    return content
