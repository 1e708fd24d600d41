"""A history as a table for the terminal, as CSV, and as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
from rich.markup import escape

from analysis import text
from analysis.comparison.history import rows
from analysis.comparison.ratio import ratio_median
from analysis.report.tables import Table, cells
from parallelbench.errors import ConfigError
from parallelbench.results.files import storage_errors
from parallelbench.world.allowance import require_figures

if TYPE_CHECKING:
    from pathlib import Path

    import altair as alt

    from analysis.comparison.history import Change, History, Point

_SCHEMA = {
    "series": pl.Int32,
    "machine": pl.String,
    "measured_at": pl.Float64,
    "date": pl.String,
    "commit": pl.String,
    "uncommitted": pl.Boolean,
    "repeats": pl.Int32,
    "submits": pl.Int32,
    "metric": pl.String,
    **dict.fromkeys(("median", "low", "high", "change", "change_low", "change_high", "p"), pl.Float64),
    "worse": pl.Boolean,
}


def frame(found: History) -> pl.DataFrame:
    """One row per point; `change` and what follows it are null but where a change begins."""
    return pl.DataFrame(list(rows(found)), schema=_SCHEMA)


def write_csv(found: History, path: Path) -> None:
    """The same as a file; raises `StorageError` where it can't be written."""
    if path.suffix != ".csv":
        raise ConfigError(f"--csv {path}: expected the name of a file that ends in .csv")
    with storage_errors(path, option="--csv FILE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Table(path.stem, frame(found)).write(path.parent)


def table(found: History) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, in rich's markup: a row per point; of several series each has a row with its machine."""
    columns = ["measured (UTC)", "commit", "repeats", f"{found.metric.column.title}\n(95 % interval)", "change"]
    shown: list[list[str]] = []
    for number, series in enumerate(found.series, 1):
        if len(found.series) > 1:
            shown.append([f"[bold]series {number}: {escape(series.machine)}[/bold]", *[""] * (len(columns) - 1)])
        changes = {change.at: change for change in series.changes}
        for place, point in enumerate(series.points):
            change = changes.get(place)
            told = "" if change is None else _change(change)
            shown.append([point.date, escape(point.commit), str(point.n), _value(found, point), told])
    return columns, shown


def _value(found: History, point: Point) -> str:
    column = found.metric.column
    (median,) = cells({column.name: point.median}, [column])
    if point.interval is None:
        return median.shown
    low, high = (cells({column.name: end}, [column])[0].shown for end in point.interval)
    return f"{median.shown} ({low}–{high})"


def _change(change: Change) -> str:
    words = "worse" if change.is_worse else "better"
    ratio = text.interval(change.ratio, change.low, change.high, digits=3)
    return f"[{'red' if change.is_worse else 'green'}]{words}: × {ratio}[/]"


def write_figure(found: History, path: Path) -> None:
    """The points with their intervals, the level between changes, and the changes, as SVG or PDF."""
    require_figures()
    if path.suffix not in (".svg", ".pdf"):
        raise ConfigError(f"--figure {path}: expected the name of a file that ends in .svg or .pdf")
    import vl_convert

    from analysis.figures import specification, svg

    image = svg(specification(chart(found)))
    with storage_errors(path, option="--figure FILE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".pdf":
            path.write_bytes(vl_convert.svg_to_pdf(image))
        else:
            path.write_text(image, encoding="utf-8")


_POINT_WIDTH, _WIDTHS = 16, (420, 1100)
_COLOURS = {"better": "#009e73", "worse": "#d55e00", "as before": "#4d4d4d"}


def chart(found: History) -> alt.FacetChart:
    """A panel per series, its points from left to right in the order in which they were measured."""
    import altair as alt

    from analysis.figures.chart import INK, panels

    data = pl.DataFrame(_drawn(found))
    longest = max(len(series.points) for series in found.series)
    width = min(max(_POINT_WIDTH * longest, _WIDTHS[0]), _WIDTHS[1])
    names = list(dict.fromkeys(data["name"]))
    axis = alt.Axis(labelAngle=-60, labelLimit=200, labelOverlap="greedy", grid=False)
    x = alt.X("name:O", axis=axis, title="sources, in the order in which they were measured", sort=names)
    y_scale = alt.Scale(zero=False, nice=True, padding=8)
    column = found.metric.column
    y_title = column.title if column.heading else column.name
    y = alt.Y("value:Q", title=y_title, scale=y_scale)
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(_COLOURS), range=list(_COLOURS.values())),
        legend=alt.Legend(title=None),
    )
    base = alt.Chart(data)
    levels = base.mark_line(interpolate="step", strokeWidth=2, opacity=0.45, color=INK).encode(
        x=x, y=alt.Y("level:Q", scale=y_scale, title=y_title), detail="stretch:N"
    )
    bars = base.mark_rule(strokeWidth=1.5).encode(x=x, y=alt.Y("low:Q", title=y_title), y2="high:Q", color=colour)
    points = base.mark_point(filled=True, size=55, opacity=1).encode(x=x, y=y, color=colour)
    # A label beside each change alone: the points' own values are in the table.
    told = base.transform_filter("datum.told != ''").mark_text(dy=-12, fontSize=12, fontWeight="bold").encode(
        x=x, y=y, text="told:N", color=colour
    )  # fmt: skip
    laid_out = panels((levels + bars + points + told).properties(width=width, height=260), data, own_axes=True)
    laid_out.columns = 1
    title = alt.Title(f"{column.name}: {found.configuration}", anchor="start", fontSize=15, color=INK)
    title.subtitle = "medians with 95 % intervals over repeats; lines: the level between changes"
    laid_out.title = title
    return laid_out


_UNITS = {"bytes": text.MIB}
"""What a unit is divided by where people read it otherwise."""


def _drawn(found: History) -> list[dict[str, Any]]:
    drawn = []
    unit = _UNITS.get(found.metric.column.unit or "", 1)
    for number, series in enumerate(found.series, 1):
        begins = {change.at: change for change in series.changes}
        stretch = -1
        edges = [0, *begins, len(series.points)]
        panel = series.machine if len(found.series) == 1 else f"{number}: {series.machine}"
        for place, point in enumerate(series.points):
            change = begins.get(place)
            stretch += place in edges
            within = [each.median for each in series.points[edges[stretch] : edges[stretch + 1]]]
            low, high = point.interval or (None, None)
            drawn.append(
                {
                    "panel": panel,
                    "name": f"{place + 1} · {point.commit if point.state.commit else point.date}",
                    "value": point.median / unit,
                    "low": None if low is None else low / unit,
                    "high": None if high is None else high / unit,
                    "level": ratio_median(within) / unit,
                    "stretch": f"{number}.{stretch}",
                    "kind": _kind(series.changes, place),
                    "told": "" if change is None else f"{100 * (change.ratio - 1):+.3g} %",
                }
            )
    return drawn


def _kind(changes: tuple[Change, ...], place: int) -> str:
    before = [change for change in changes if change.at <= place]
    if not before:
        return "as before"
    return "worse" if before[-1].is_worse else "better"
