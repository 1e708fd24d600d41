"""Peak memory by strategy and device count: of the largest device, and of all processes together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.configurations import summary
from analysis.figures._chart import bars, ranked, timed

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 3
TITLE = "Peak memory by strategy and device count"
_DEVICE, _PROCESS = "largest device", "largest process"
_UNKNOWN = "largest process, several devices each"
_PANELS = ("peak_memory_device_bytes", "peak_memory_max_bytes", "peak_memory_sum_bytes")
_KINDS = {"host": "Host memory (RSS)", "device": "Device memory (allocated)"}


def figure(runs: Runs) -> alt.FacetChart | None:
    """Peak memory in MiB; None where none was measured."""
    of_device, kind = pl.col("memory_kind") == "device", pl.col("memory_kind").replace(_KINDS)
    # On CPUs a device is a process, which holds more of libraries than of a model.
    largest, process = (
        pl.when(of_device).then(pl.lit(label)).otherwise(pl.lit(_PROCESS)) for label in (_DEVICE, _UNKNOWN)
    )
    whose = dict(zip(_PANELS, (largest, process, pl.lit("sum of all processes")), strict=True))
    labels = {name: pl.format("{}, {}", kind, label) for name, label in whose.items()}
    data = timed(runs, labels, known=pl.col("peak_memory_device_bytes").is_not_null())
    data = data.filter(pl.col("peak_memory_max_bytes").is_null() | ~pl.col("known")).drop("known")
    if data.is_empty():
        return None
    # The formula is about one device, without libraries.
    formula = pl.when(of_device, pl.col("peak_memory_device_bytes").is_not_null()).then(
        pl.col("theoretical_state_bytes") / text.MIB
    )
    data = data.with_columns(pl.col(*_PANELS) / text.MIB, formula=formula)
    texts = (pl.col("median") * text.MIB).map_elements(text.mebibytes, return_dtype=pl.String)
    known = data["formula"].is_not_null().any()
    unit = "Peak memory (MiB)" + (", line: model and optimizer in theory" if known else "")
    return bars(data, columns=[*_PANELS], title=TITLE, unit=unit, labels=texts, goal="formula" if known else None)


def finding(runs: Runs) -> str:
    """How much memory the leanest and the largest configuration take per device, and how much of it by formula."""
    measured = summary(runs).drop_nulls("peak_memory_max_bytes")
    return ranked(runs, measured, _peaks) or "No run that counts measured its memory."


def _peaks(rows: pl.DataFrame) -> str:
    rows = rows.with_columns(peak=pl.coalesce("peak_memory_device_bytes", "peak_memory_max_bytes")).sort("peak")
    shown = [_taken(row) for row in rows.iter_rows(named=True)]
    whose = _DEVICE if (rows["memory_kind"] == "device").any() else _PROCESS
    return f"the {whose} takes {text.listed(shown)}"


def _taken(row: dict[str, Any]) -> str:
    whole = f"{text.mebibytes(row['peak_memory_sum_bytes'])} MiB over all its processes"
    states = row["theoretical_state_bytes"]
    if row["memory_kind"] == "device" and states is not None:
        whole += f"; parameters, gradients and optimizer state by formula {text.mebibytes(states)} MiB"
    if row["memory_kind"] == "device" and row["peak_memory_device_bytes"] is None:
        whole += "; that is the largest process, whose several devices were not measured one by one"
    return f"{text.mebibytes(row['peak'])} MiB with {row['configuration']} ({whole})"
