"""The samplers' journals, read in batches: a run of hours has millions of samples, never all of them Python objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import msgspec

from parallelbench.store.reading import open_regular
from parallelbench.store.records import TABLES, schema
from parallelbench.store.telemetry_table import WARNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

Row = dict[str, Any]

BATCH_ROWS = 65_536
"""Rows held as Python objects at once: about 80 MB."""
_KINDS: dict[str, Any] = {
    "string": str,
    "int32": Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)],
    "int64": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "float64": float,
}
_Row: Any = TypedDict(  # type: ignore[misc]
    "_Row",
    {
        column.name: _KINDS[column.type] | None if column.nullable else _KINDS[column.type]
        for column in TABLES["telemetry"]
    },
)


class _Line(TypedDict):
    table: Literal["telemetry"]
    row: _Row


class _Event(TypedDict):
    event: str


_LINE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Line)
_EVENT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Event)


class Journals:
    """The samplers' journals up to their present size; later lines are not read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = [(path, path.stat().st_size) for path in sorted(paths)]

    def rows(self, events: list[Row] | None = None) -> Iterator[Row]:
        """Rows of `telemetry`, one at a time, in the order of the files; events are appended to `events`."""
        for path, size_bytes in self._files:
            for entry in _entries(path, size_bytes):
                if "event" not in entry:
                    yield entry["row"]
                elif events is not None:
                    events.append(entry)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as Arrow, `BATCH_ROWS` at a time."""
        rows: list[Row] = []
        for row in self.rows():
            rows.append(row)
            if len(rows) == BATCH_ROWS:
                yield _batch(rows)
                rows = []
        if rows:
            yield _batch(rows)


def _entries(path: Path, size_bytes: int) -> Iterator[Row]:
    """Whole lines, up to the first that no sampler writes; that becomes a warning."""
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            size_bytes -= len(line)
            if size_bytes < 0 or not line.endswith(b"\n"):
                return  # torn, or written since
            try:
                if line.startswith(b'{"event":'):
                    _EVENT.decode(line)
                    yield msgspec.json.decode(line)
                else:
                    yield _LINE.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                reason = f"its journal is damaged from line {number} on"
                yield {"event": WARNING, "reason": reason, "device": path.name}
                return


def _batch(rows: list[Row]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = schema("telemetry")
    arrays = [pa.array([row[field.name] for row in rows], type=field.type) for field in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
