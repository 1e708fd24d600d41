"""How stale pushes to parameter servers were: updates by others between a worker's fetch and the use of its push."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from analysis.comparison.configurations import displayed
from analysis.figures.chart import PANEL_WIDTH, Own, Sentence, bar_colour, panel, panels, records, tips
from analysis.metrics.runs import staleness_histogram

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

_MOST_BINS = 30


def _draw(data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
    """Share of the pushes by staleness, one panel per configuration."""
    width = int(data["width"].first())  # type: ignore[arg-type]
    what = "Updates by others since the fetch" + (f" ({width} per bar)" if width > 1 else "")
    longest = int(data["bin"].max()) + width  # type: ignore[arg-type]
    across = alt.Scale(domain=[-0.6 * width, longest - 0.4 * width], nice=False)
    x = alt.X("begin:Q", title=what, scale=across, axis=alt.Axis(format="d", tickMinStep=1, grid=False))
    share = alt.Y("median:Q", title="Share of the pushes (%)", scale=alt.Scale(domainMin=0))
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=200)
    tooltip = [*tips("configuration:N", "bin:Q"), alt.Tooltip("median:Q", title="median share, %", format=".3~g")]
    bar = base.transform_filter("datum.first").mark_bar(opacity=0.85)
    bar = bar.encode(x=x, x2=alt.X2("end:Q"), y=share, y2=alt.Y2Datum(0), color=bar_colour(data, runs), tooltip=tooltip)
    points = base.mark_point(filled=True, size=30, color="black", opacity=0.75, stroke="white", strokeWidth=0.8).encode(
        x=alt.X("bin:Q"),
        y=alt.Y("value:Q"),
        tooltip=[*tips("configuration:N", "repeat:Q"), alt.Tooltip("value:Q", format=".3~g")],
    )
    return panels(alt.layer(bar, points), data)


def _binned(runs: Runs) -> pl.DataFrame:
    """One row per counted run with pushes and bin of staleness: the share of the run's pushes in it, in per cent.

    A bin that some other repeat of the configuration has is 0, not missing.
    """
    names = ("group", "configuration", "variant", "strategy", "repeat", "disturbed")
    members = displayed(runs).select("run_id", *names)
    shares = members.join(staleness_histogram(runs), on="run_id", maintain_order="left_right")
    if shares.is_empty():
        return shares
    width = int(shares["staleness"].max()) // _MOST_BINS + 1  # type: ignore[arg-type]
    shares = shares.with_columns(bin=pl.col("staleness") // width * width)
    pushing = members.filter(pl.col("run_id").is_in(shares["run_id"].unique().to_list()))
    bins = shares.select("group", "configuration", "bin").unique(maintain_order=True)
    per_bin = shares.group_by("run_id", "bin").agg(value=100 * pl.col("share").sum())
    data = (
        pushing.join(bins, on=["group", "configuration"], maintain_order="left_right")
        .join(per_bin, on=["run_id", "bin"], how="left", maintain_order="left")
        .with_columns(pl.col("value").fill_null(0))
    )
    by = ("group", "configuration", "bin")
    return panel(data.drop("run_id"), pl.col("configuration")).with_columns(
        median=pl.col("value").median().over(by),
        first=pl.int_range(pl.len()).over(by) == 0,
        begin=pl.col("bin") - 0.42 * width,
        end=pl.col("bin") + 0.42 * width,
        width=pl.lit(width),
    )


staleness = Own(
    order=9,
    title="Staleness of the pushes to parameter servers",
    rows=_binned,
    draw=_draw,
    finding=Sentence(
        by="staleness_mean",
        each=lambda row: f"{row['staleness_mean']:.2f} with {row['configuration']} (at most {row['staleness_max']})",
        whole="between fetch and use, others' updates per push are on average {}",
        sep=", ",
        ranks=False,
        nothing="No run that counts pushed to a parameter server.",
    ),
)
