"""How stale pushes to parameter servers were: updates by others between a worker's fetch and the use of its push."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis.comparison.summary import displayed
from analysis.figures.chart import NAMES, panel
from analysis.figures.finding import Sentence
from analysis.figures.lines import Axis, Lines
from analysis.metrics.runs import staleness_histogram

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

_MOST_BINS = 30


def _binned(runs: Runs) -> pl.DataFrame:
    """One row per displayed run with pushes and bin of staleness: the share of the run's pushes in it, in per cent.

    `x` is the least staleness of the bin; a bin without a push is 0, not missing.
    """
    members = displayed(runs).select("run_id", *NAMES)
    shares = members.join(staleness_histogram(runs), on="run_id", maintain_order="left_right")
    if shares.is_empty():
        return shares
    most = int(shares["staleness"].max())  # type: ignore[arg-type]
    width = most // _MOST_BINS + 1
    per_bin = (
        shares.with_columns(x=pl.col("staleness").cast(pl.Int64) // width * width)
        .group_by("run_id", "x")
        .agg(value=100 * pl.col("share").sum())
    )
    pushing = members.join(shares.select("run_id").unique(), on="run_id", how="semi", maintain_order="left")
    bins = pl.DataFrame({"x": range(0, most + 1, width)})
    data = pushing.join(bins, how="cross").join(per_bin, on=["run_id", "x"], how="left", maintain_order="left")
    # No line goes on beyond what any repeat of its configuration had.
    last = pl.col("x").filter(pl.col("value") > 0).max().over("group", "configuration")
    data = data.filter(pl.col("x") <= last).with_columns(pl.col("value").fill_null(0.0)).drop("run_id")
    return panel(data, "Per push" if width == 1 else f"Per push, in bins of {width} updates")


staleness = Lines(
    order=9,
    title="Staleness of the pushes to parameter servers",
    rows=_binned,
    x=Axis("linear", "Updates by others since the fetch", whole=True),
    y=Axis("zero", "Share of the pushes (%)"),
    finding=Sentence(
        by="staleness_mean",
        each=lambda row: f"{row['staleness_mean']:.2f} with {row['configuration']} (at most {row['staleness_max']})",
        whole="between fetch and use, others' updates per push are on average {}",
        sep=", ",
        ranks=False,
        nothing="No run that counts pushed to a parameter server.",
    ),
)
