"""Figures of bars that are made of parts: a bar per configuration, or per engine, in panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import altair as alt
import polars as pl

from analysis import text
from analysis.comparison.summary import displayed, summary
from analysis.comparison.work import natural
from analysis.figures.chart import (
    PANEL_WIDTH,
    Chart,
    label_marks,
    mark,
    names_axis,
    pale,
    panel,
    panels,
    records,
    scale,
    written,
)
from analysis.figures.finding import Sentence, per_group
from analysis.metrics.runs import KINDS_SENT, PHASES, phase_times

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.runs.reader import Runs


@dataclass(frozen=True, kw_only=True)
class Stacked(Chart):
    """Stacked bars: `rows` has a row per bar, with group, panel, configuration, `total`, `label`, `disturbed`, and a
    column per part (null: none). Disturbed bars are pale.
    """

    part: str
    """What a part is called."""
    colours: Mapping[str, str]
    """Of the parts, from left to right."""
    axis: str
    NEEDED: ClassVar[tuple[str, ...]] = ("group", "panel", "configuration", "total", "label", "disturbed")

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """Each panel has its own axes."""
        data = data.with_columns(label=pl.col("label") + mark(data))
        data = _stacked(data, list(self.colours), self.part)
        words = pl.format("{}; {}: {}", "configuration", self.part, written(text.number, "value"))
        data = data.with_columns(words=words + f" ({self.axis})")
        y = names_axis(data)
        base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 30})
        bar = base.mark_bar(height={"band": 0.68}).encode(
            x=alt.X("from:Q", title=self.axis, axis=alt.Axis(tickCount=5)),
            x2=alt.X2("to:Q"),
            y=y,
            color=alt.Color(f"{self.part}:N", scale=scale(self.colours), legend=alt.Legend(title=None)),
            opacity=pale(0.9),
            description=alt.Description("words:N"),
        )
        return panels(alt.layer(bar, *label_marks(base, y, at="total")), data, own_axes=True)

    def table(self, data: pl.DataFrame, runs: Runs) -> pl.DataFrame:
        """A row per bar: group, panel, configuration, the parts that any bar has, and the sum, which is the axis's."""
        parts = [name for name in self.colours if data[name].count()]
        return data.select("group", "panel", "configuration", *parts, pl.col("total").alias(self.axis))


def _stacked(data: pl.DataFrame, parts: list[str], part: str) -> pl.DataFrame:
    """One row per bar and part: where the part begins and ends, and which row draws the label."""
    data = data.with_row_index("bar").with_columns(room=pl.col("total").max().over("panel") * 1.25)
    rows = data.unpivot(parts, index=pl.selectors.exclude(parts), variable_name=part, value_name="value")
    end = pl.col("value").cum_sum()
    return (
        rows.drop_nulls("value")
        .sort("bar", maintain_order=True)
        .with_columns(
            end.over("bar").alias("to"),
            end.shift(fill_value=0.0).over("bar").alias("from"),
            first=pl.int_range(pl.len()).over("bar") == 0,
        )
        .drop("bar")
    )


_SENT = {
    "gradient": ("gradients", "#0072b2"),
    "activation": ("activations and their gradients", "#e69f00"),
    "parameter": ("parameters and buffers", "#009e73"),
}
_SENDERS = {"sum": "All processes together", "busiest": "Busiest process"}


def _sent(runs: Runs) -> pl.DataFrame:
    """The configurations that sent something."""
    return summary(runs).filter(pl.col("bytes_sent_per_step_sum") > 0)


def _in_mebibytes(runs: Runs) -> pl.DataFrame:
    """What was sent per step: of all processes, and of the busiest; none where nothing was sent."""
    sent = summary(runs).drop_nulls("bytes_sent_per_step_sum").filter((pl.col("bytes_sent_per_step_sum") > 0).any())
    parts = []
    for way, label in _SENDERS.items():
        total = f"bytes_sent_per_step_{way}"
        kinds = {name: pl.col(f"{kind}_{total}") / text.MIB for kind, (name, _) in _SENT.items()}
        rows = sent.select(
            "group", "configuration", total=pl.col(total) / text.MIB, label=written(text.sent, total), **kinds
        ).with_columns(disturbed=pl.lit(False))  # bytes rest on no clock
        parts.append(panel(rows, label))
    return pl.concat(parts).sort(natural("group"), maintain_order=True)


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
    what = _SENT[largest][0]
    mostly = what if share == 1 else f"{_percent(share)} of it {what}"
    return f"{text.sent(row['bytes_sent_per_step_sum'])} MiB with {row['configuration']} ({mostly})"


def _percent(share: float) -> str:
    """ "75.0 %"; a digit after the point of 100 % would say that nothing is left."""
    return text.percent(share).replace("100.0", "100")


communication = Stacked(
    order=7,
    title="Bytes sent per step by kind",
    rows=_in_mebibytes,
    part="kind",
    colours=dict(_SENT.values()),
    axis="Sent per step (MiB)",
    finding=lambda runs: (
        per_group(_sent(runs), _least_and_most) or "No run that counts sent anything between processes."
    ),
)


_SPENT = {
    "data_wait": ("waiting for data", "#999999"),
    "host_to_device": ("host to device", "#f0e442"),
    "forward": ("forward", "#56b4e9"),
    "backward": ("backward", "#0072b2"),
    "communication": ("exposed communication", "#d55e00"),
    "bubble": ("bubble", "#e69f00"),
    "optimizer": ("optimizer", "#009e73"),
    "other": ("other", "#4d4d4d"),
}


def _phases(runs: Runs) -> pl.DataFrame:
    """Means over repeats, one row per configuration; a phase that no run of it has is null."""
    times = [f"{phase}_s" for phase in PHASES]
    return (
        displayed(runs)
        .join(phase_times(runs), on="run_id", maintain_order="left")
        .group_by("group", "configuration", maintain_order=True)
        .agg(pl.col("step_time_s", *times).mean(), pl.col("disturbed").any())
    )


def _in_milliseconds(runs: Runs) -> pl.DataFrame:
    measured = _phases(runs)
    total = pl.col("step_time_s") * 1e3
    times = {name: pl.col(f"{phase}_s") * 1e3 for phase, (name, _) in _SPENT.items()}
    rows = measured.select("group", "configuration", "disturbed", total=total, **times)
    label = written(lambda total_ms: f"{text.number(total_ms)} ms", "total")
    return panel(rows.with_columns(label=label), "Mean over ranks, steps and repeats")


def _shares(row: dict[str, Any]) -> str:
    shares = {phase: row[f"{phase}_s"] / row["step_time_s"] for phase in PHASES if row[f"{phase}_s"] is not None}
    largest = max(shares, key=lambda phase: shares[phase])
    named = [largest, *(phase for phase in ("communication", "bubble") if phase in shares and phase != largest)]
    return f"{row['configuration']} spends {text.listed([f'{_percent(shares[p])} on {_SPENT[p][0]}' for p in named])}"


attribution = Stacked(
    order=10,
    title="What a step is spent on",
    rows=_in_milliseconds,
    part="phase",
    colours=dict(_SPENT.values()),
    axis="Time per step (ms)",
    finding=Sentence(
        rows=_phases,
        each=_shares,
        whole="of a step, {}",
        ranks=False,
        footnote="Measured in steps of their own after the last epoch, which enter no other figure.",
        nothing="No run that counts was attributed: measure.attribution_steps=20 says what its steps are spent on.",
    ),
)
