"""Peak memory by strategy and device count: of the largest process, and of all together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.configurations import summary
from analysis.figures._chart import bars, timed
from analysis.figures._sentences import ranked

if TYPE_CHECKING:
    import altair as alt

    from analysis.reader import Runs

ORDER = 3
TITLE = "Peak memory by strategy and device count"
_PANELS = {"peak_memory_max_bytes": "largest process", "peak_memory_sum_bytes": "sum of all processes"}
_KINDS = {"host": "Host memory (RSS)", "device": "Device memory (allocated)"}


def figure(runs: Runs) -> alt.FacetChart | None:
    """Peak memory in MiB; None where none was measured."""
    kind = pl.col("memory_kind").replace(_KINDS)
    data = timed(runs, {name: pl.format("{}, {}", kind, pl.lit(label)) for name, label in _PANELS.items()})
    if data.is_empty():
        return None
    # A CPU's processes hold more of libraries than of a model; and the formula is about one device.
    of_device = (pl.col("memory_kind") == "device") & pl.col("panel").str.ends_with(_PANELS["peak_memory_max_bytes"])
    formula = pl.when(of_device).then(pl.col("theoretical_state_bytes") / text.MIB)
    data = data.with_columns(pl.col(*_PANELS) / text.MIB, formula=formula)
    labels = (pl.col("median") * text.MIB).map_elements(text.mebibytes, return_dtype=pl.String)
    known = data["formula"].is_not_null().any()
    unit = "Peak memory (MiB)" + (", line: model and optimizer in theory" if known else "")
    return bars(data, columns=[*_PANELS], title=TITLE, unit=unit, labels=labels, goal="formula" if known else None)


def finding(runs: Runs) -> str:
    """How much memory the leanest and the largest configuration take per process, and how much of it by formula."""
    measured = summary(runs).drop_nulls("peak_memory_max_bytes")
    return ranked(runs, measured, _peaks) or "No run that counts measured its memory."


def _peaks(rows: pl.DataFrame) -> str:
    shown = [_taken(row) for row in rows.sort("peak_memory_max_bytes").iter_rows(named=True)]
    return f"the largest process takes {text.listed(shown)}"


def _taken(row: dict[str, Any]) -> str:
    whole = f"{text.mebibytes(row['peak_memory_sum_bytes'])} MiB over all its processes"
    states = row["theoretical_state_bytes"]
    if row["memory_kind"] == "device" and states is not None:
        whole += f"; parameters, gradients and optimizer state by formula {text.mebibytes(states)} MiB"
    return f"{text.mebibytes(row['peak_memory_max_bytes'])} MiB with {row['configuration']} ({whole})"
