"""Peak memory by strategy and device count: of the largest process, and of all together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.figures._chart import bars, panel, per_group, timed
from analysis.summary import summary

if TYPE_CHECKING:
    import altair as alt

    from analysis.load import Runs

ORDER = 3
TITLE = "Peak memory by strategy and device count"
_PANELS = {"peak_memory_max_bytes": "largest process", "peak_memory_sum_bytes": "sum of all processes"}
_KINDS = {"host": "Host memory (RSS)", "device": "Device memory (allocated)"}


def figure(runs: Runs) -> alt.FacetChart | None:
    """Peak memory in MiB; None where none was measured."""
    kind = pl.col("memory_kind").replace(_KINDS)
    data = pl.concat(
        panel(timed(runs, name), pl.format("{}, {}", kind, pl.lit(label))) for name, label in _PANELS.items()
    ).sort("group", maintain_order=True)
    if data.is_empty():
        return None
    data = data.with_columns(pl.col("value") / text.MIB)
    labels = (pl.col("median") * text.MIB).map_elements(text.mebibytes, return_dtype=pl.String)
    return bars(data, title=TITLE, unit="Peak memory (MiB)", labels=labels)


def finding(runs: Runs) -> str:
    """How much memory the leanest and the largest configuration take per process."""
    sentences = []
    measured = summary(runs).drop_nulls("peak_memory_max_bytes")
    for (group,), rows in measured.group_by("group", maintain_order=True):
        shown = [
            f"{text.mebibytes(row['peak_memory_max_bytes'])} MiB with {row['configuration']} "
            f"({text.mebibytes(row['peak_memory_sum_bytes'])} MiB over all its processes)"
            for row in rows.sort("peak_memory_max_bytes").iter_rows(named=True)
        ]
        sentences.append((str(group), f"the largest process takes {text.listed(shown)}"))
    return per_group(sentences) if sentences else "No run that counts measured its memory."
