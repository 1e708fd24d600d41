"""Power of the GPUs by strategy and device count: of all together, and of the one that drew most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import summary
from analysis.figures._chart import bars, ranked, timed

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 10
TITLE = "Power by strategy and device count"
_PANELS = {
    "steady_gpu_power_mean_w": "All GPUs, mean of training windows",
    "steady_gpu_power_max_w": "Highest sample of one GPU",
}


def figure(runs: Runs) -> alt.FacetChart | None:
    """Power in W; None where none was measured."""
    data = timed(runs, _PANELS)
    if data.is_empty():
        return None
    labels = pl.col("median").map_elements(_watts, return_dtype=pl.String)
    return bars(data, columns=[*_PANELS], title=TITLE, unit="Power (W)", labels=labels)


def _watts(power_w: float) -> str:
    return f"{text.number(power_w)} W"


def finding(runs: Runs) -> str:
    """What the GPUs of each configuration draw together."""
    measured = summary(runs).drop_nulls("steady_gpu_power_mean_w")
    return ranked(runs, measured, _powers) or "No run that counts measured the power of its GPUs."


def _powers(rows: pl.DataFrame) -> str:
    ordered = rows.sort("steady_gpu_power_mean_w").select("configuration", "steady_gpu_power_mean_w").rows()
    shown = [f"{_watts(power_w)} with {name}" for name, power_w in ordered]
    return f"the GPUs draw {text.listed(shown, sep='; ')}"
