"""What steps are spent on, by configuration: the pass after the last epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl

from analysis import text
from analysis.configurations import counted
from analysis.figures._chart import PANEL_WIDTH, label_marks, names_axis, panel, panels, per_group, records
from analysis.metrics import PHASES, phase_times

if TYPE_CHECKING:
    from analysis.reader import Runs

ORDER = 10
TITLE = "What a step is spent on"
_NAMES = {
    "data_wait": ("waiting for data", "#999999"),
    "host_to_device": ("host to device", "#f0e442"),
    "forward": ("forward", "#56b4e9"),
    "backward": ("backward", "#0072b2"),
    "communication": ("exposed communication", "#d55e00"),
    "bubble": ("bubble", "#e69f00"),
    "optimizer": ("optimizer", "#009e73"),
    "other": ("other", "#4d4d4d"),
}


def figure(runs: Runs) -> alt.FacetChart | None:
    """Milliseconds per step, stacked by phase, one bar per configuration; None where nothing was attributed."""
    measured = _per_configuration(runs)
    if measured.is_empty():
        return None
    data = panel(_stacked(measured), "Mean over ranks, steps and repeats")
    y = names_axis(data)
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 30})
    names, colours = zip(*_NAMES.values(), strict=True)
    bar = base.mark_bar(height={"band": 0.68}, opacity=0.9).encode(
        x=alt.X("from:Q", title="Time per step (ms)", axis=alt.Axis(tickCount=5)),
        x2="to:Q",
        y=y,
        color=alt.Color(
            "phase:N", scale=alt.Scale(domain=list(names), range=list(colours)), legend=alt.Legend(title=None)
        ),
        tooltip=["configuration:N", "phase:N", alt.Tooltip("value:Q", title="ms per step", format=".4~g")],
    )
    return panels(
        alt.layer(bar, *label_marks(base, y, at="total")),
        list(data["panel"].unique(maintain_order=True)),
        title=TITLE,
        own_axes=True,
    )


def _per_configuration(runs: Runs) -> pl.DataFrame:
    """Means over repeats, one row per configuration; a phase that no run of it has is null."""
    times = [f"{phase}_s" for phase in PHASES]
    return (
        counted(runs)
        .join(phase_times(runs), on="run_id", maintain_order="left")
        .group_by("group", "configuration", maintain_order=True)
        .agg(pl.col("step_time_s", *times).mean())
    )


def _stacked(measured: pl.DataFrame) -> pl.DataFrame:
    """One row per configuration and phase that it has: where its part of the bar begins and ends, and the label."""
    rows: list[dict[str, Any]] = []
    for row in measured.iter_rows(named=True):
        begin, total = 0.0, 1e3 * row["step_time_s"]
        for phase in PHASES:
            if row[f"{phase}_s"] is None:
                continue
            value = 1e3 * row[f"{phase}_s"]
            place = {"value": value, "from": begin, "to": begin + value, "total": total}
            label = {"label": f"{text.number(total)} ms", "first": not begin}
            rows.append(
                {key: row[key] for key in ("group", "configuration")} | {"phase": _NAMES[phase][0]} | place | label
            )
            begin += value
    return pl.DataFrame(rows).with_columns(room=pl.col("total").max().over("group") * 1.25)


def finding(runs: Runs) -> str:
    """What takes most of a step, and how much of it is waiting for others."""
    sentences = []
    for (group,), rows in _per_configuration(runs).group_by("group", maintain_order=True):
        shown = [_spent(row) for row in rows.iter_rows(named=True)]
        sentences.append((str(group), f"of a step, {text.listed(shown, sep='; ')}"))
    if not sentences:
        return "No run that counts was attributed: measure.attribution_steps=20 says what its steps are spent on."
    return f"{per_group(sentences)}\nMeasured in steps of their own after the last epoch, which enter no other figure."


def _spent(row: dict[str, Any]) -> str:
    shares = {phase: row[f"{phase}_s"] / row["step_time_s"] for phase in PHASES if row[f"{phase}_s"] is not None}
    largest = max(shares, key=lambda phase: shares[phase])
    told = [largest, *(phase for phase in ("communication", "bubble") if phase in shares and phase != largest)]
    return (
        f"{row['configuration']} spends {text.listed([f'{text.percent(shares[p])} on {_NAMES[p][0]}' for p in told])}"
    )
