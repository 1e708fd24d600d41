"""Exposed communication of all-reduces, beside the time of a ring at the probed bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import displayed
from analysis.figures._chart import bars, panel, per_group
from analysis.metrics import ring_times

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 10
TITLE = "Exposed communication against the ring's formula"


def _measured(runs: Runs) -> pl.DataFrame:
    """The counted runs that all-reduce and were attributed, with both times in ms per step."""
    times = pl.col("exposed_s", "ring_s") * 1e3
    return displayed(runs).join(ring_times(runs).with_columns(times), on="run_id", maintain_order="left")


def figure(runs: Runs) -> alt.FacetChart | None:
    """Bars of the waiting time, a line at the formula; None where nothing was attributed."""
    columns = ("group", "configuration", "variant", "strategy", "devices", "repeat", "disturbed")
    ring = pl.col("ring_s").median().over("group", "configuration")
    rows = _measured(runs).select(*columns, "exposed_s", ring=ring)
    if rows.is_empty():
        return None
    labels = pl.struct("median", "ring").map_elements(_label, return_dtype=pl.String)
    unit = "Waiting (bar) and a ring's time (line) per step (ms)"
    data = panel(rows, "After the last epoch")
    return bars(data, columns=["exposed_s"], title=TITLE, unit=unit, labels=labels, goal="ring", room=1.6)


def _label(row: dict[str, float]) -> str:
    return f"{text.number(row['median'])} ms, ring {text.number(row['ring'])}"


def finding(runs: Runs) -> str:
    """How much of a ring's time backward hides, or how much longer ranks wait."""
    rows = _measured(runs).group_by("group", "configuration", maintain_order=True)
    waits = per_group(rows.agg(pl.col("exposed_s", "ring_s").median()), _waits)
    if not waits:
        return "No run that counts all-reduces and was attributed: measure.attribution_steps=20 measures its waiting."
    return (
        f"{waits}\nMeasured after the last epoch, waiting for slower ranks included; a ring's formula "
        "for all gradients, by latency and bandwidth probed on the same ranks."
    )


def _waits(medians: pl.DataFrame) -> str:
    shown = [
        f"{row['configuration']} waits {text.number(row['exposed_s'])} ms (a ring: {text.number(row['ring_s'])} ms)"
        for row in medians.rows(named=True)
    ]
    return f"per step, computing leaves unhidden: {text.listed(shown)}"
