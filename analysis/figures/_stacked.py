"""Bars that are stacked of parts, one bar per configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from analysis.figures._chart import label_marks, names_axis
from analysis.figures._panels import PANEL_WIDTH, panels, records

if TYPE_CHECKING:
    from collections.abc import Mapping


def stacked_bars(
    data: pl.DataFrame, colours: Mapping[str, str], *, part: str, title: str, axis: str, unit: str
) -> alt.FacetChart:
    """`data` has a row per bar: group, panel, configuration, `total`, `label`, and a column per part (null: none).

    `colours` are those of the parts, from left to right; `part` is what a part is called.
    """
    data = _stacked(data, list(colours), part)
    y = names_axis(data)
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 30})
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    bar = base.mark_bar(height={"band": 0.68}, opacity=0.9).encode(
        x=alt.X("from:Q", title=axis, axis=alt.Axis(tickCount=5)),
        x2="to:Q",
        y=y,
        color=alt.Color(f"{part}:N", scale=scale, legend=alt.Legend(title=None)),
        tooltip=["configuration:N", f"{part}:N", alt.Tooltip("value:Q", title=unit, format=".4~g")],
    )
    return panels(alt.layer(bar, *label_marks(base, y, at="total")), data, title=title, own_axes=True)


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
