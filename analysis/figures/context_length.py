"""Time per token and memory of the fullest device against the length of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from analysis import text
from analysis.figures import _across
from analysis.figures._chart import BETWEEN, lines

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

ORDER = 14
TITLE = "Time per token and memory against the length of the context"
_LENGTH = _across.Across(
    "tokens_per_sample",
    ("data.sequence", "model.sequence", "data.train_samples", "batch_size"),
    "Tokens per sample",
    metric="tokens_per_s",
    counted="tokens per second",
)
"""A sweep of lengths may keep the tokens of a step, and so change how many samples it has."""
_MEMORY = {
    "host": "host memory of the largest process, MiB",
    "device": "memory of the largest device, MiB",
}


def figure(runs: Runs) -> alt.FacetChart | None:
    """A line per configuration, panels of time and of memory; None where nothing differs in the length only."""
    rows = _across.rates(runs, _LENGTH, "memory_kind", "peak_memory_device_bytes")
    memory = pl.col("memory_kind").replace_strict(_MEMORY, default=None)
    data = pl.concat(
        [
            rows.with_columns(time_per_token_us=1e6 / pl.col("tokens_per_s"), what=pl.lit("time per token, µs")),
            rows.with_columns(memory_mib=pl.col("peak_memory_device_bytes") / text.MIB, what=memory).drop_nulls(
                ("what", "memory_mib")
            ),
        ],
        how="diagonal",
    )
    if data.is_empty():
        return None
    data = data.with_columns(panel=pl.format(f"{{}}{BETWEEN}{{}}", "panel", "what"))
    return lines(
        data.drop("what", "memory_kind", "peak_memory_device_bytes", "tokens_per_s"),
        columns=["time_per_token_us", "memory_mib"],
        title=TITLE,
        x=_across.doubling(data, _LENGTH),
        y=alt.Y("median:Q", title="In the unit of the panel", scale=alt.Scale(domainMin=0)),
        own_axes=True,
    )


def finding(runs: Runs) -> str:
    """What the longest context changes against the shortest, per configuration."""
    return _across.finding(runs, _LENGTH)
