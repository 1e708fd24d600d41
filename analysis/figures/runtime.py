"""Time per epoch by strategy and device count: the first epoch, with its warm-up, beside the later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import summary
from analysis.figures._chart import bars, ranked, timed

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 1
TITLE = "Time per epoch by strategy and device count"
_PANELS = {"steady_epoch_time_s": "Later epochs (median)", "first_epoch_time_s": "First epoch"}


def figure(runs: Runs) -> alt.FacetChart | None:
    """Training window of an epoch on the slowest rank, in seconds; None where no run counts."""
    data = timed(runs, _PANELS)
    if data.is_empty():
        return None
    labels = pl.col("median").map_elements(text.seconds, return_dtype=pl.String)
    return bars(data, columns=[*_PANELS], title=TITLE, unit="Time per epoch, slowest rank (s)", labels=labels)


def finding(runs: Runs) -> str:
    """Which configuration has the shortest epochs once warm, and how long the others take."""
    steady = summary(runs).drop_nulls("steady_epoch_time_s")
    nothing = "No run that counts has a second epoch: nothing is known about a steady state."
    return ranked(runs, steady, _times) or nothing


def _times(rows: pl.DataFrame) -> str:
    ordered = rows.sort("steady_epoch_time_s").select("configuration", "steady_epoch_time_s").rows()
    shown = [f"{name} takes {text.seconds(time)}" for name, time in ordered]
    return f"once warm, an epoch of {text.listed(shown)}"
