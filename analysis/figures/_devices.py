"""Lines over the number of devices: each begins at what one device of the same work measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl

from analysis.comparison.policy import IS_BASELINE
from analysis.figures._chart import LEGEND, drawn, variants, with_medians
from analysis.figures._marks import HOLLOW
from analysis.figures._panels import INK, PANEL_WIDTH, panels, records

if TYPE_CHECKING:
    from collections.abc import Mapping

_LINEAR_UP_TO = 8
"""Most devices with a linear axis; with more, it is logarithmic."""
_ROOM_BESIDE, _ROOM_FOR_WORDS = 0.1, 0.5
"""Room beside the lines, as a share of their width: for points, and for the words where lines begin."""


def lines_over_devices(
    data: pl.DataFrame, column: str, *, by: str, title: str, unit: str, widths: Mapping[str, float] | None = None
) -> alt.FacetChart:
    """A line of medians per variant and value of the column `by`, every repeat as a point; each panel has its own axes.

    `data` has the columns group, panel, configuration, variant, strategy, devices, framework, repeat, disturbed, `by`
    and `column`. `widths`: of the lines, by the values of `by`; None: those values are written where lines begin.
    """
    colours = variants(data)
    devices = sorted(set(data["devices"]) | {1})
    data = with_medians(drawn(data, [column]), ("panel", by, "variant", "devices"))
    data = _with_origins(data, by)
    scale = _across(devices, room=_ROOM_BESIDE if widths else _ROOM_FOR_WORDS)
    x = alt.X("devices:Q", title="Devices", scale=scale, axis=alt.Axis(values=devices, format="d", grid=False))
    y = alt.Y("median:Q", title=unit, scale=alt.Scale(domainMin=0), axis=alt.Axis(titleColor=INK, tickCount=6))
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    colour = alt.Color("variant:N", scale=scale, legend=LEGEND)
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=260)
    line = base.transform_filter("datum.first").mark_line()
    line = line.encode(x=x, y=y, color=colour, **_told_apart(by, widths))
    tooltip = [*(f"{name}:N" for name in ("configuration", by, "repeat")), alt.Tooltip("value:Q", format=".4~g")]
    dots = base.transform_filter("datum.repeat != null").mark_point(filled=True, size=30, strokeWidth=0.8)
    dots = dots.encode(x=x, y="value:Q", color=colour, fillOpacity=HOLLOW, tooltip=tooltip)
    marks = [line, dots] if widths else [line, dots, _beginnings(base, x)]
    return panels(alt.layer(*marks), data, title=title, own_axes=True)


def _told_apart(by: str, widths: Mapping[str, float] | None) -> dict[str, Any]:
    if widths is None:
        return {"detail": f"{by}:N", "strokeWidth": alt.value(2.2)}
    scale = alt.Scale(domain=list(widths), range=list(widths.values()))
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=500, symbolStrokeColor=INK)
    return {"strokeWidth": alt.StrokeWidth(f"{by}:O", scale=scale, legend=legend)}


def _beginnings(base: alt.Chart, x: alt.X) -> alt.Chart:
    """The column `label` to the left of where lines begin."""
    named = base.transform_filter("datum.label != null")
    words: alt.Chart = named.mark_text(align="right", dx=-8, fontSize=12, color=INK)
    placed: alt.Chart = words.encode(x=x, y="median:Q", text="label:N")
    return placed


def _with_origins(data: pl.DataFrame, by: str) -> pl.DataFrame:
    """Add the starts of lines without a run on one device: the median of their framework's baseline in that work.

    These rows are of no configuration and no repeat. A `label` is on the row in which the highest line of each value of
    `by` begins.
    """
    keys = ["panel", "framework", by]
    beginning = data.filter(IS_BASELINE & pl.col("first")).select(*keys, "median")
    ways = data.filter(pl.col("devices") > 1).select(*keys, "group", "variant").unique(maintain_order=True)
    without = ways.join(data.filter(pl.col("devices") == 1), on=[*keys, "variant"], how="anti", maintain_order="left")
    origins = without.join(beginning, on=keys, maintain_order="left").with_columns(
        devices=pl.lit(1, pl.Int32), first=pl.lit(True), disturbed=pl.lit(False)
    )
    data = pl.concat([data, origins], how="diagonal")
    starts = pl.col("devices") == pl.col("devices").min().over("panel", by)
    highest = pl.col("median") == pl.col("median").filter(starts).max().over("panel", by)
    once = (starts & highest & pl.col("first")).cum_sum().over("panel", by) == 1
    label = pl.col(by).map_elements(lambda value: f"{value:,}" if isinstance(value, int) else value, pl.String)
    return data.with_columns(label=pl.when(starts & highest & pl.col("first") & once).then(label))


def _across(devices: list[int], *, room: float) -> alt.Scale:
    """With room to the left of one device, a share of what lies between the fewest devices and the most."""
    top = devices[-1]
    if top <= _LINEAR_UP_TO:
        between = top - 1
        return alt.Scale(domain=[1 - room * between, top + _ROOM_BESIDE * between], nice=False)
    return alt.Scale(type="log", base=2, domain=[top**-room, top ** (1 + _ROOM_BESIDE)], nice=False)
