"""Figures of bars that are made of parts: a bar per configuration, or per engine, in panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl

from analysis import text
from analysis.comparison.configurations import displayed, prepared, summary
from analysis.comparison.work import groups_across, natural
from analysis.figures.chart import (
    PANEL_WIDTH,
    Chart,
    Sentence,
    label_marks,
    mark,
    names_axis,
    panel,
    panels,
    per_group,
    records,
    scale,
    tips,
    written,
)
from analysis.metrics.runs import KINDS_SENT, PHASES, phase_times

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.runs.reader import Runs


@dataclass(frozen=True, kw_only=True)
class Stacked(Chart):
    """Stacked bars: `rows` has a row per bar, with group, panel, configuration, `total`, `label`, and a column per part
    (null: none).
    """

    part: str
    """What a part is called."""
    colours: Mapping[str, str]
    """Of the parts, from left to right."""
    axis: str
    unit: str

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """Each panel has its own axes."""
        data = _stacked(data, list(self.colours), self.part)
        y = names_axis(data)
        base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 30})
        bar = base.mark_bar(height={"band": 0.68}, opacity=0.9).encode(
            x=alt.X("from:Q", title=self.axis, axis=alt.Axis(tickCount=5)),
            x2=alt.X2("to:Q"),
            y=y,
            color=alt.Color(f"{self.part}:N", scale=scale(self.colours), legend=alt.Legend(title=None)),
            tooltip=[
                *tips("configuration:N", f"{self.part}:N"),
                alt.Tooltip("value:Q", title=self.unit, format=".4~g"),
            ],
        )
        return panels(alt.layer(bar, *label_marks(base, y, at="total")), data, own_axes=True)


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
        )
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
    unit="MiB per step",
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
    label = written(lambda total_ms: f"{text.number(total_ms)} ms", "total") + mark(measured)
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
    unit="ms per step",
    finding=Sentence(
        rows=_phases,
        each=_shares,
        whole="of a step, {}",
        ranks=False,
        footnote="Measured in steps of their own after the last epoch, which enter no other figure.",
        nothing="No run that counts was attributed: measure.attribution_steps=20 says what its steps are spent on.",
    ),
)


_PREPARING = {
    "start_s": ("start and imports", "#999999"),
    "read_s": ("reading", "#f0e442"),
    "take_in_s": ("taking in", "#56b4e9"),
    "compute_s": ("the recipe", "#0072b2"),
    "give_out_s": ("giving out", "#009e73"),
}


def _engines(runs: Runs) -> pl.DataFrame:
    """Times of preprocessing in a new process, medians over repeats: a row per engine, recipe and kind of work."""
    works = groups_across(runs, ("preprocess",))
    columns = {"group": "run_id", "configuration": "preprocess_engine", "recipe": "preprocess_recipe"}
    first = runs.select("preprocess", "run_id", "execution", *_PREPARING).filter(pl.col("execution") == 1)
    times = ("preprocess_cold_time_s", "preprocess_warm_time_s")
    named = prepared(runs).select("run_id", *times, "preprocess_threads", **columns)
    named = named.with_columns(group=pl.col("group").replace_strict(works, default=None, return_dtype=pl.String))
    several = named["preprocess_threads"].n_unique() > 1
    engine = pl.format("{} × {}", "configuration", "preprocess_threads") if several else pl.col("configuration")
    return (
        named.join(first, on="run_id")
        .with_columns(configuration=engine, panel=pl.format("{} — {}", "group", "recipe"))
        .group_by("group", "panel", "recipe", "configuration")
        .agg(pl.col(*_PREPARING).median(), total=pl.col(times[0]).median(), warm=pl.col(times[1]).median())
        .sort(natural("group"), "recipe", "total")
    )


def _to_first_result(runs: Runs) -> pl.DataFrame:
    parts = {name: part for part, (name, _) in _PREPARING.items()}
    return _engines(runs).select(
        "group", "panel", "configuration", "total", label=written(_cold_and_warm, "total", "warm"), **parts
    )


def _cold_and_warm(row: dict[str, float | None]) -> str:
    warm = "" if row["warm"] is None else f", warm {text.number(row['warm'] * 1e3)} ms"
    return f"{text.number(row['total'])} s{warm}"


def _of_recipes(runs: Runs) -> str:
    """The times of each recipe's engines, cold and warm. It names no fastest: nothing here says what is chance."""
    measured = _engines(runs)
    if measured.is_empty():
        return "No run that counts was preprocessed: preprocess.engine and preprocess.recipe choose how."
    lines, named = [], "panel" if measured["group"].n_unique() > 1 else "recipe"
    for (recipe,), rows in measured.group_by(named, maintain_order=True):
        words = f"{recipe}: the first result comes after {_of_engines(rows, 'total')}"
        warm = rows.drop_nulls("warm")
        lines.append(words if warm.is_empty() else f"{words}; once warm it takes {_of_engines(warm, 'warm')}")
    return f"{text.listed(lines, sep='; ')}; these are medians over repeats, and no verdict."


def _of_engines(rows: pl.DataFrame, column: str) -> str:
    """ "0.52 s with numpy and 0.71 s with polars", the smallest first."""
    times = rows.sort(column).select(column, "configuration").rows()
    return text.listed([f"{text.number(time)} s with {engine}" for time, engine in times], most=len(times))


preprocessing = Stacked(
    order=19,
    title="What preprocessing costs",
    rows=_to_first_result,
    part="part",
    colours=dict(_PREPARING.values()),
    axis="Time to the result (s)",
    unit="s",
    finding=_of_recipes,
)
