"""Training time until a test accuracy that most compared runs reach."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import displayed, summary, unreached
from analysis.figures._chart import bars, ranked, timed
from analysis.metrics import disturbed_to_accuracy

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 6
TITLE = "Time to accuracy"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Training time in seconds to the group's target; None where no group has a target."""
    target = pl.col("accuracy_target").map_elements(
        lambda share: f"To {text.accuracy(share)} test accuracy", return_dtype=pl.String
    )
    data = timed(runs, {"time_to_accuracy_s": target})
    if data.is_empty():
        return None
    labels = pl.col("median").map_elements(text.seconds, return_dtype=pl.String)
    return bars(
        data, columns=["time_to_accuracy_s"], title=TITLE, unit="Training time to the target (s)", labels=labels
    )


def finding(runs: Runs) -> str:
    """Who reaches the target first; where it was chosen, also who does not."""
    reached = summary(runs).drop_nulls("time_to_accuracy_s")
    rows = displayed(runs)
    slowed = disturbed_to_accuracy(runs, dict(rows.select("run_id", "accuracy_target").rows()))
    resting = set(rows.filter(pl.col("run_id").is_in(list(slowed))).select("group", "configuration").rows())
    rests = pl.Series([key in resting for key in reached.select("group", "configuration").rows()], dtype=pl.Boolean)
    reached = reached.with_columns(disturbed=pl.col("disturbed") | rests)
    first = ranked(runs, reached, functools.partial(_reached, chosen=runs.target is not None))
    if runs.target is not None:
        return "\n".join(filter(None, (first, *unreached(runs))))
    return first or "No target accuracy is reached by all configurations."


def _reached(rows: pl.DataFrame, *, chosen: bool) -> str:
    target = text.accuracy(rows["accuracy_target"][0])
    ordered = rows.sort("time_to_accuracy_s").select("configuration", "time_to_accuracy_s").rows()
    shown = [f"{name} after {text.seconds(time)}" for name, time in ordered]
    most = "the target that was chosen" if chosen else "the highest target that most runs of every configuration reach"
    return f"{target} test accuracy, {most}, is reached by {text.listed(shown)}"
