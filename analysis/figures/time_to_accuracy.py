"""Training time until a test accuracy that all compared runs reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.configurations import summary
from analysis.figures._chart import bars, panel, per_group, timed

if TYPE_CHECKING:
    import altair as alt

    from analysis.reader import Runs

ORDER = 6
TITLE = "Time to accuracy"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Training time in seconds to the group's target; None where no group has a target."""
    target = (pl.col("accuracy_target") * 100).map_elements(
        lambda share: f"To {share:g} % test accuracy", return_dtype=pl.String
    )
    data = panel(timed(runs, "time_to_accuracy_s"), target)
    if data.is_empty():
        return None
    labels = pl.col("median").map_elements(text.seconds, return_dtype=pl.String)
    return bars(
        data, columns=["time_to_accuracy_s"], title=TITLE, unit="Training time to the target (s)", labels=labels
    )


def finding(runs: Runs) -> str:
    """Who reaches the target first."""
    sentences = []
    reached = summary(runs).drop_nulls("time_to_accuracy_s")
    for (group,), rows in reached.group_by("group", maintain_order=True):
        target = f"{100 * rows['accuracy_target'][0]:g}\u202f%"
        ordered = rows.sort("time_to_accuracy_s").select("configuration", "time_to_accuracy_s").rows()
        shown = [f"{name} after {text.seconds(time)}" for name, time in ordered]
        what = f"{target} test accuracy, the highest target that all reach,"
        sentences.append((str(group), f"{what} is reached by {text.listed(shown)}"))
    return per_group(sentences) if sentences else "No target accuracy is reached by all runs that count."
