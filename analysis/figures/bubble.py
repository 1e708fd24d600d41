"""The bubble of a pipeline's schedule, in theory, beside what is missing from the ideal speed-up, and as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import displayed, gains, summary
from analysis.comparison.work import natural
from analysis.figures._chart import bars, panel, per_group
from analysis.metrics import measured_bubbles

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 8
TITLE = "Shortfall from ideal speed-up and the schedule's theoretical bubble"
_UNIT = "Shortfall or bubble (bar) and theoretical bubble (line), %"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Bars of 1 − efficiency, a point per pair of repeats, a line where the schedule's bubble is; None without one."""
    planned = summary(runs).drop_nulls("theoretical_bubble")
    if planned.is_empty():
        return None
    steady = gains(runs).filter(pl.col("kind") == "steady").select("group", "configuration", "repeat", "value")
    columns = ("group", "configuration", "variant", "strategy", "devices", "theoretical_bubble")
    rows = planned.select(columns).join(steady, on=["group", "configuration"], how="left", maintain_order="left_right")
    data = panel(rows, "Steady state").with_columns(
        value=100 * (1 - pl.col("value") / pl.col("devices")), bubble=100 * pl.col("theoretical_bubble")
    )
    data = pl.concat([data, _measured(runs).select(data.columns)]).sort(natural("group"), maintain_order=True)
    labels = pl.struct("median", "bubble").map_elements(_label, return_dtype=pl.String)
    return bars(data, title=TITLE, unit=_UNIT, labels=labels, goal="bubble", room=1.6)


def _measured(runs: Runs) -> pl.DataFrame:
    """The bubbles of the runs that were attributed."""
    rows = displayed(runs).drop_nulls("theoretical_bubble").join(measured_bubbles(runs), on="run_id")
    return panel(rows, "Bubble as measured after the last epoch").with_columns(
        value=100 * pl.col("measured_bubble"), bubble=100 * pl.col("theoretical_bubble")
    )


def _label(row: dict[str, float | None]) -> str:
    shortfall, bubble = (text.percent(None if value is None else value / 100) for value in row.values())
    return f"{shortfall}, bubble {bubble}"


def finding(runs: Runs) -> str:
    """How much of the shortfall the schedule alone would explain."""
    shortfalls = per_group(summary(runs).drop_nulls("theoretical_bubble"), _shortfalls)
    if not shortfalls:
        return "No configuration that counts runs by a schedule with a known bubble (pipelines do)."
    return f"{shortfalls}\n{_idle(runs)}"


def _shortfalls(rows: pl.DataFrame) -> str:
    shown = [_explained(row) for row in rows.drop_nulls("efficiency").iter_rows(named=True)]
    if shown:
        return f"of the ideal speed-up, {text.listed(shown, sep='; ')}"
    idle = [f"{r['configuration']} {text.percent(r['theoretical_bubble'])}" for r in rows.to_dicts()]
    return f"by schedule, devices idle for {text.listed(idle)} of a step; nothing shows the speed-up"


def _idle(runs: Runs) -> str:
    """The measured bubble, or how to measure it."""
    measured = _measured(runs).group_by("group", "configuration", maintain_order=True)
    rows = measured.agg(pl.col("value", "bubble").median() / 100).rows(named=True)
    if not rows:
        return (
            "Idle time itself was not measured (measure.attribution_steps does): the shortfall also includes "
            "communication, uneven stages and the cost of smaller pieces of work."
        )
    shown = [f"{r['configuration']} {text.percent(r['value'])} (by formula {text.percent(r['bubble'])})" for r in rows]
    return f"Idle share measured after the last epoch, transfers and uneven stages included: {text.listed(shown)}."


def _explained(row: dict[str, float]) -> str:
    missing, bubble = 1 - row["efficiency"], row["theoretical_bubble"]
    if missing < 0:
        idle = f"whose devices idle for {text.percent(bubble)} by its schedule"
        return f"{row['configuration']}, {idle}, exceeds it by {text.percent(-missing)}"
    lacks = f"{row['configuration']} lacks {text.percent(missing)}"
    if missing < bubble:
        return f"{lacks}, less than the {text.percent(bubble)} that equal stages would idle by its schedule"
    return f"{lacks}, of which equal stages idling by its schedule explain {text.percent(bubble)}"
