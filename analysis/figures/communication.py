"""Bytes sent per optimizer step by kind: of all processes together, and of the busiest one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import summary
from analysis.comparison.work import natural
from analysis.figures._chart import panel, per_group, stacked_bars
from analysis.metrics import KINDS_SENT

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

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
    data = pl.concat([panel(_in_mebibytes(sent, way), label) for way, label in _PANELS.items()])
    return stacked_bars(
        data.sort(natural("group"), maintain_order=True),
        dict(_KINDS.values()),
        part="kind",
        title=TITLE,
        axis="Sent per step (MiB)",
        unit="MiB per step",
    )


def _in_mebibytes(sent: pl.DataFrame, way: str) -> pl.DataFrame:
    """What `stacked_bars` needs of the bytes that one way of counting them gives."""
    total = pl.col(f"bytes_sent_per_step_{way}")
    kinds = {name: pl.col(f"{kind}_bytes_sent_per_step_{way}") / text.MIB for kind, (name, _) in _KINDS.items()}
    label = total.map_elements(text.sent, return_dtype=pl.String)
    return sent.select("group", "configuration", total=total / text.MIB, label=label, **kinds)


def finding(runs: Runs) -> str:
    """Who sends most and least per step."""
    sent = summary(runs).filter(pl.col("bytes_sent_per_step_sum") > 0)
    return per_group(sent, _least_and_most) or "No run that counts sent anything between processes."


def _least_and_most(rows: pl.DataFrame) -> str:
    ordered = rows.sort("bytes_sent_per_step_sum", maintain_order=True).to_dicts()
    least, most = ordered[0], ordered[-1]
    amounts = _amount(most)
    if most["configuration"] != least["configuration"]:
        amounts = f"from {_amount(least)} to {_amount(most)}"
    return f"per optimizer step, {amounts} are sent between processes"


def _amount(row: dict[str, float]) -> str:
    kinds = {kind: row[f"{kind}_bytes_sent_per_step_sum"] for kind in KINDS_SENT}
    largest = max(kinds, key=lambda kind: kinds[kind])
    share = kinds[largest] / row["bytes_sent_per_step_sum"]
    what = _KINDS[largest][0]
    mostly = what if share == 1 else f"{text.percent(share)} of it {what}"
    return f"{text.sent(row['bytes_sent_per_step_sum'])} MiB with {row['configuration']} ({mostly})"
