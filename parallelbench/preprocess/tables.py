"""Tables of engines as Arrow and as NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from parallelbench.preprocess.recipes import Columns

BATCH_ROWS = 65_536
"""Most rows of a record batch: what an engine with several threads divides among them."""
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def batch(columns: Columns) -> pa.RecordBatch:
    """A record batch of these arrays; a two-dimensional one becomes lists of fixed length."""
    arrays = {
        name: pa.array(values)
        if values.ndim == 1
        else pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        for name, values in columns.items()
    }
    return pa.record_batch(arrays)


def cut(whole: pa.RecordBatch, *, values: int, most: int = 2**31 - 1) -> list[pa.RecordBatch]:
    """The batch in pieces whose rows have at most `most` values together, `values` each: offsets of lists are int32.

    Nothing is copied.
    """
    rows = max(1, most // values)
    return [whole.slice(start, rows) for start in range(0, max(1, whole.num_rows), rows)]


def load_pandas() -> None:
    """Arrow loads pandas at its first conversion, where it is installed: let that be part of the start."""
    pa.array([0]).to_numpy(zero_copy_only=False)


def columns_of(table: pa.Table) -> Columns:
    """The table's columns; of one record batch without nulls nothing is copied, but what is no integer or float."""
    table = table.combine_chunks()
    found: Columns = {}
    for name in table.column_names:
        column = table[name]
        array = column.chunk(0) if column.num_chunks == 1 else pa.array([], column.type)
        if any(is_list(array.type) for is_list in _LISTS):
            values = pc.list_flatten(array).to_numpy(zero_copy_only=False)
            found[name] = values.reshape(len(array), -1) if len(array) else values.reshape(0, 0)
        else:
            found[name] = array.to_numpy(zero_copy_only=False)
    return found


def write(table: pa.Table, path: Path) -> int:
    """Write an Arrow IPC file; returns its size in bytes."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH_ROWS)
    return path.stat().st_size


def read(path: Path) -> pa.Table:
    """Read an Arrow IPC file into memory; nothing stays mapped, so that what is read is counted."""
    with pa.OSFile(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def addresses(table: pa.Table) -> dict[int, int]:
    """Address → bytes of all buffers that hold values."""
    chunks = [chunk for column in table.columns for chunk in column.chunks]
    return {buffer.address: buffer.size for chunk in chunks for buffer in chunk.buffers() if buffer and buffer.size}


def difference(found: Columns, expected: Columns, *, tolerance: float) -> str:
    """How a result differs from the expected one, as in "3 of 10 values of mean"; empty: it doesn't."""
    if found.keys() != expected.keys():
        return f"its columns are {', '.join(found)}, not {', '.join(expected)}"
    for name, values in expected.items():
        own = found[name]
        if len(own) != len(values):
            return f"it has {len(own)} rows, not {len(values)}"
        if not values.size:
            continue
        if own.shape != values.shape:
            return f"{name} has the shape {own.shape}, not {values.shape}"
        floats = np.issubdtype(values.dtype, np.floating)
        if floats and own.dtype != values.dtype:
            return f"{name} is {own.dtype}, not {values.dtype}"
        if floats and tolerance:
            unlike = ~(np.abs(own - values) <= tolerance * np.maximum(1, np.abs(values)))
        else:
            unlike = _bits(own) != _bits(values)
        if unlike.any():
            return f"{int(unlike.sum())} of {values.size} values of {name}"
    return ""


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    """The values as whole numbers of the same bits: 0.0 and −0.0 differ."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
