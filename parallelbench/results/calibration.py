"""The table that `parallelbench calibrate` writes: what one machine's devices and links take for pieces of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError
from parallelbench.results.declaration import Column, count, text
from parallelbench.results.files import write_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


CALIBRATION_VERSION = 3
"""3: all kinds of operations by their shapes, all devices of a node at once."""
FACTS = "calibration"
"""Key of the Parquet file's metadata that holds the facts of all rows as JSON."""
BACKWARD = "_backward"
"""Behind the names of operations that are measured both ways."""
# fmt: off
CALIBRATION = (
    text("operation",
        "matmul, copy or launch on one device; of GPUs unaligned (a product whose sides 8 does not divide), "
        "train_launch (the host's time per operation of forward in training, a third of forward and backward) and "
        "step (its time for a step besides); forward, with `_backward` behind it backward: image_convolution (of "
        "the model's input), convolution, grouped, attention, elementwise (ReLU), gelu, layer_norm, batch_norm, "
        "max_pool; all_reduce, all_gather, all_to_all or send between devices; shard: what a layer's forward and "
        "backward take longer where devices share its parameters (fully_shard)"),
    text("precision", "arithmetic of products, convolutions, attention and layers", null="none is involved"),
    text("tier", "link: between devices of a node; network: between nodes", null="one device"),
    count("ranks", "devices that work together"),
    count("nodes", "nodes that they are on"),
    count("busy", "devices of a node that do the same at the same time"),
    Column("size_bytes", "of one message, as its definition has it; of a copy, the bytes that are read; of a layer, "
        "its parameters; of a convolution, the weights of one group, of attention, the keys of a head, both "
        "as in fp32; of other operations, what they write forward", null="a product or launch"),
    Column("flop", "floating-point operations of a product, convolution or attention, forward", null="none"),
    Column("time_s", "of one piece of work, on the slowest device"),
)
# fmt: on
Row = dict[str, Any]


def write_calibration(path: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Write rows and facts (machine and environment) as one Parquet file, whole or not at all."""
    import msgspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field(each.name, pa.type_for_alias(each.type), nullable=each.nullable) for each in CALIBRATION]
    metadata = {FACTS: msgspec.json.encode({"version": CALIBRATION_VERSION, **facts})}
    table = pa.Table.from_pylist(list(rows), schema=pa.schema(fields, metadata=metadata))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, sink.getvalue().to_pybytes())


def read_calibration(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows and facts; raises `ConfigError` for a file that holds none, or is of another release."""
    import msgspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: `parallelbench calibrate` writes one and says where") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path} is no calibration ({error}): write one with `parallelbench calibrate`") from None
    try:
        facts: dict[str, Any] = msgspec.json.decode((table.schema.metadata or {})[FACTS.encode()])
    except (KeyError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no calibration (no {error}): write one with `parallelbench calibrate`") from None
    if facts["version"] != CALIBRATION_VERSION:
        raise ConfigError(f"{path} was written by another release, which measures other things: calibrate again")
    rows = table.to_pylist()
    if lacking := sorted({"matmul", "copy", "launch"} - {row.get("operation") for row in rows}):
        raise ConfigError(f"{path} lacks rows of operation={lacking[0]}, which every calibration has: calibrate again")
    return rows, facts
