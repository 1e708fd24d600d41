"""Bytes sent per optimizer step, by what they are: by all processes together, and by the busiest one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from analysis import text
from analysis.configurations import summary
from analysis.figures._chart import PANEL_WIDTH, label_marks, names_axis, panel, panels, per_group, records
from analysis.metrics import KINDS_SENT

if TYPE_CHECKING:
    from analysis.reader import Runs

ORDER = 7
TITLE = "Bytes sent per step by kind"
_PANELS = {"sum": "All processes together", "busiest": "Busiest process"}
_KINDS = {
    "gradient": ("gradients", "#0072b2"),
    "activation": ("activations and their gradients", "#e69f00"),
    "parameter": ("parameters and buffers", "#009e73"),
}


def figure(runs: Runs) -> alt.FacetChart | None:
    """MiB per step to other processes, one bar per configuration; None where nothing was sent."""
    sent = summary(runs).drop_nulls("bytes_sent_per_step_sum")
    if not (sent["bytes_sent_per_step_sum"] > 0).any():
        return None
    data = pl.concat([panel(_stacked(sent, way), label) for way, label in _PANELS.items()]).sort(
        "group", maintain_order=True
    )
    y = names_axis(data)
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 30})
    names, colours = zip(*_KINDS.values(), strict=True)
    bar = base.mark_bar(height={"band": 0.68}, opacity=0.9).encode(
        x=alt.X("from:Q", title="Sent per step (MiB)", axis=alt.Axis(tickCount=5)),
        x2="to:Q",
        y=y,
        color=alt.Color(
            "kind:N", scale=alt.Scale(domain=list(names), range=list(colours)), legend=alt.Legend(title=None)
        ),
        tooltip=["configuration:N", "kind:N", alt.Tooltip("value:Q", title="MiB per step", format=".4~g")],
    )
    return panels(
        alt.layer(bar, *label_marks(base, y, at="total")),
        list(data["panel"].unique(maintain_order=True)),
        title=TITLE,
        own_axes=True,
    )


def _stacked(sent: pl.DataFrame, way: str) -> pl.DataFrame:
    """One row per configuration and kind: where its part of the bar begins and ends, and the bar's label."""
    rows = []
    for row in sent.iter_rows(named=True):
        begin, total = 0.0, row[f"bytes_sent_per_step_{way}"]
        for kind in KINDS_SENT:
            value = row[f"{kind}_bytes_sent_per_step_{way}"] / text.MIB
            rows.append(
                {
                    "group": row["group"],
                    "configuration": row["configuration"],
                    "kind": _KINDS[kind][0],
                    "value": value,
                    "from": begin,
                    "to": begin + value,
                    "total": total / text.MIB,
                    "label": text.sent(total),
                    "first": kind == KINDS_SENT[0],
                }
            )
            begin += value
    room = pl.col("total").max().over("group") * 1.22
    return pl.DataFrame(rows).with_columns(room=room)


def finding(runs: Runs) -> str:
    """Who sends most and least per step."""
    sentences = []
    sent = summary(runs).filter(pl.col("bytes_sent_per_step_sum") > 0)
    for (group,), rows in sent.group_by("group", maintain_order=True):
        ordered = rows.sort("bytes_sent_per_step_sum", maintain_order=True).to_dicts()
        least, most = ordered[0], ordered[-1]
        sentence = f"per optimizer step, {_amount(most)}"
        if most["configuration"] != least["configuration"]:
            sentence = f"per optimizer step, from {_amount(least)} to {_amount(most)}"
        sentences.append((str(group), sentence + " are sent between processes"))
    if not sentences:
        return "No run that counts sent anything between processes."
    return per_group(sentences)


def _amount(row: dict[str, float]) -> str:
    kinds = {kind: row[f"{kind}_bytes_sent_per_step_sum"] for kind in KINDS_SENT}
    largest = max(kinds, key=lambda kind: kinds[kind])
    share = kinds[largest] / row["bytes_sent_per_step_sum"]
    what = _KINDS[largest][0]
    mostly = what if share == 1 else f"{text.percent(share)} of it {what}"
    return f"{text.sent(row['bytes_sent_per_step_sum'])} MiB with {row['configuration']} ({mostly})"
