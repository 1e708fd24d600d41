"""What the figures have in common: colours, and the two kinds of chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl

from analysis.comparison.groups import natural
from analysis.configurations import displayed
from analysis.figures._marks import HOLLOW, mark, pale, shapes
from analysis.figures._panels import INK, PANEL_WIDTH, panel, panels, records, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.reader import Runs

DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [1, 3])
# Okabe and Ito's colours, distinct with any kind of colour blindness; their yellow is too pale for lines. Nobody
# distinguishes 16 hues: a hue is a family (blue: replicas, green: sharded, orange: by layers, pink: by tensors, violet:
# servers and outer loops; lime: by tokens), and its members differ in lightness and, where they are lines, in dashes.
STYLES = {
    "single": ("#4d4d4d", 0),
    "ddp": ("#0072b2", 1),
    "ring_ddp": ("#00344f", 2),
    "data_parallel": ("#56b4e9", 3),
    "fsdp": ("#009e73", 4),
    "hsdp": ("#004d38", 1),
    "zero1": ("#66cdaa", 2),
    "model_parallel": ("#d55e00", 2),
    "model_parallel_tutorial": ("#5e2a00", 4),
    "pipeline": ("#e69f00", 1),
    "dp_pp": ("#9c6b00", 3),
    "dp_pp_tp": ("#f0c05a", 4),
    "tensor_parallel": ("#cc79a7", 3),
    "dp_tp": ("#8a2c62", 1),
    "context_parallel": ("#7cb518", 2),
    "fsdp_cp": ("#42620a", 4),
    "parameter_server": ("#332288", 2),
    "downpour": ("#8f7fd6", 3),
    "sandblaster_lbfgs": ("#6a3fb5", 4),
}
"""Strategy → its colour in all reports, and the first of its `DASHES`: one device alone is solid, below all others."""
SPARE = ("#882255", "#999933", "#44aa99", "#aa4499", "#117733", "#7f7f7f", "#b2182b")
"""For a user's own strategies, and for a strategy's further variants."""
SIDE = pl.col("side").replace({"test": "Test set", "training": "Training set, while training"})
"""Panel labels of what `learning` returns."""
_WHOLE: Any = {"condition": {"test": "datum.value % 1 != 0", "value": 0}, "value": 1}
EPOCHS = alt.Axis(
    tickMinStep=1,
    format="d",
    labelFlush=False,
    labelExpr="datum.value % 1 != 0 ? '' : datum.label",
    tickOpacity=_WHOLE,
    gridOpacity=_WHOLE,
)
"""Ticks at whole epochs: vega takes `tickMinStep` for a wish, and makes halves of few epochs."""
_LONG_NAME = 28
MOST_POINTS = 12_000
"""Most points of a figure's repeats; with more, medians are drawn."""
LEGEND = alt.Legend(
    title=None, symbolLimit=0, symbolType="stroke", symbolOpacity=1, symbolSize=500, symbolStrokeWidth=2.5
)


def variants(runs: pl.DataFrame) -> dict[str, str]:
    """Variant → colour, in the order of first appearance.

    The first variant of a strategy has the strategy's colour; others, and strategies without one, take spares by their
    place among those present.
    """
    rows = runs.select("variant", "strategy").unique(maintain_order=True).rows()
    firsts = {strategy: variant for variant, strategy in reversed(rows)}
    own = {variant: STYLES[name][0] for name, variant in firsts.items() if name in STYLES}
    others = [variant for variant, _ in rows if variant not in own]
    spare = {variant: SPARE[place % len(SPARE)] for place, variant in enumerate(others)}
    return {variant: own.get(variant) or spare[variant] for variant, _ in rows}


def drawn(data: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Add `value`, the position of a mark: the one of these columns that the row has. Its name stays in the chart."""
    return data.with_columns(value=pl.coalesce(columns))


def with_medians(data: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Add the `median` of `value` over repeats, its largest, and which row draws them.

    Of very many repeats, a point at the median stands for all; its `repeat` says so.
    """
    data = data.with_columns(
        median=pl.col("value").median().over(by),
        largest=pl.col("value").max().over(by),
        first=pl.int_range(pl.len()).over(by) == 0,
    )
    if shown(data).height <= MOST_POINTS:
        return data
    repeats = pl.format("median of {}", pl.len().over(by))
    return data.with_columns(value=pl.col("median"), repeat=repeats).filter("first")


def bars(
    data: pl.DataFrame,
    *,
    columns: Sequence[str] = ("value",),
    title: str,
    unit: str,
    labels: pl.Expr,
    goal: str | None = None,
    room: float = 1.22,
) -> alt.FacetChart:
    """Horizontal bars of medians over repeats, every repeat as a point; a line at `goal`, where that is a column.

    `data` has the columns group, panel, configuration, variant, strategy, repeat, in the order to be drawn, and of
    `columns` at most one per row (none: no bar); `labels` makes the text beside a bar from its `median`. The axis is
    `room` times as long as needed.
    """
    data = with_medians(drawn(data, columns), ("panel", "configuration"))
    ends = pl.max_horizontal("largest", goal, 0) if goal else pl.col("largest")
    # Room for the text: the panels of one group share their scale, groups of other work have their own.
    data = data.with_columns(label=labels + mark(data), largest=ends, room=ends.max().over("group") * room)
    y = names_axis(data)
    tooltip = [alt.Tooltip(f"{name}:N") for name in ("configuration", "repeat")]
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 34})
    only_first, measured = base.transform_filter("datum.first"), base.transform_filter("datum.value != null")
    bar = only_first.transform_filter("datum.median != null").mark_bar(height={"band": 0.68})
    bar = bar.encode(
        opacity=pale(0.85),
        x=alt.X("median:Q", title=unit, axis=alt.Axis(tickCount=5)),
        y=y,
        color=bar_colour(data),
        tooltip=[tooltip[0], alt.Tooltip("median:Q", title=f"median, {unit}", format=".4~g")],
    )
    points = measured.mark_point(filled=True, size=34, color="black", opacity=0.75, stroke="white", strokeWidth=0.8)
    points = points.encode(x="value:Q", y=y, tooltip=[*tooltip, alt.Tooltip("value:Q", title=unit, format=".4~g")])
    marks = [bar, points, *label_marks(only_first, y, at="largest")]
    if goal:
        marks.insert(1, _goal(only_first, goal).encode(x=alt.X(f"{goal}:Q", title=unit), y=y))
    return panels(alt.layer(*marks), data, title=title, own_axes=True)


def _goal(rows: alt.Chart, goal: str) -> alt.Chart:
    """A line at each value of the column `goal`."""
    line: alt.Chart = rows.transform_filter(f"datum.{goal} != null").mark_tick(
        color="black", thickness=3, opacity=1, height={"band": 0.95}
    )
    return line.encode(tooltip=["configuration:N", f"{goal}:Q"])


def names_axis(data: pl.DataFrame) -> alt.Y:
    """A row per configuration, in the order of the data."""
    names = list(data["configuration"].unique(maintain_order=True))
    axis = alt.Axis(domain=False, ticks=False, labelPadding=8, labelLimit=370, labelOverlap=False)
    return alt.Y("configuration:N", sort=names, title=None, axis=axis)


def bar_colour(data: pl.DataFrame) -> alt.Color:
    """The variants' colours, without a legend: the bars are named."""
    colours = variants(data)
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color("variant:N", scale=scale, legend=None)


def label_marks(base: alt.Chart, y: alt.Y, *, at: str) -> tuple[alt.Chart, alt.Chart]:
    """The column `label` beside the bars' ends, and invisible marks at `room` that make the axis long enough for it."""
    first = base.transform_filter("datum.first")
    label = first.mark_text(align="left", dx=8, fontSize=12, color=INK).encode(x=f"{at}:Q", y=y, text="label:N")
    room = first.mark_point(opacity=0).encode(x=alt.X("room:Q", scale=alt.Scale(nice=False)), y=y)
    return label, room


def lines(
    data: pl.DataFrame,
    *,
    columns: Sequence[str] = ("value",),
    title: str,
    x: alt.X,
    y: alt.Y,
    own_axes: bool = False,
) -> alt.FacetChart:
    """Lines of medians over repeats, every repeat as a point; a line per configuration.

    `data` has the columns panel, configuration, variant, strategy, repeat and x, in the order to be drawn, and of
    `columns` one per row.
    """
    data = with_medians(drawn(data, columns), ("panel", "configuration", "x"))
    key: dict[str, Any] = series(data)
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=240)
    line = base.transform_filter("datum.first").mark_line(strokeWidth=2.2).encode(x=x, y=y.copy(), **key)
    y.shorthand = "value:Q"
    tooltip = [
        *(alt.Tooltip(f"{name}:N") for name in ("configuration", "repeat")),
        alt.Tooltip("x:Q", title=x["title"]),
        alt.Tooltip("value:Q", title=y["title"], format=".4~g"),
    ]
    dots = base.mark_point(filled=True, size=26, strokeOpacity=0.45, strokeWidth=0.8)
    points = dots.encode(x=x, y=y, color=key["color"], tooltip=tooltip, fillOpacity=HOLLOW)
    return panels(alt.layer(line, points), data, title=title, own_axes=own_axes)


def dashes(strategies: Sequence[str]) -> list[list[int]]:
    """The dashes of lines whose strategies these are: the strategy's own for its first line, then the next ones."""
    begins = [STYLES[name][1] if name in STYLES else strategies.index(name) for name in strategies]
    places = [strategies[:index].count(name) for index, name in enumerate(strategies)]
    return [DASHES[(begin + place) % len(DASHES)] for begin, place in zip(begins, places, strict=True)]


def series(data: pl.DataFrame, *, points: bool = False) -> dict[str, Any]:
    """Colour by variant, dashes by strategy and place: one legend, and lines that lie on each other still show.

    Points have a shape by their number of devices, as configurations of one variant have one colour.
    """
    colours = variants(data)
    rows = data.select("configuration", "variant", "strategy").unique(maintain_order=True).rows()
    names = [row[0] for row in rows]
    legend = LEGEND.copy()
    if points:
        legend.symbolType, legend.symbolSize = alt.Undefined, 110
    if max(map(len, names)) > _LONG_NAME:  # four columns of these would leave the panels no width
        legend.columns = 2
    key: dict[str, Any] = {"shape": shapes(data, legend)} if points else {}
    return key | {
        "color": alt.Color(
            "configuration:N",
            scale=alt.Scale(domain=names, range=[colours[row[1]] for row in rows]),
            legend=legend,
        ),
        "strokeDash": alt.StrokeDash(
            "configuration:N", scale=alt.Scale(domain=names, range=dashes([row[2] for row in rows])), legend=legend
        ),
    }


def timed(runs: Runs, labels: Mapping[str, str | pl.Expr], **also: pl.Expr) -> pl.DataFrame:
    """What `bars` needs of every displayed run: a row per column that it has measured, in the panel of its label.

    `also`: further columns of each row, by name.
    """
    names = ("group", "configuration", "variant", "strategy", "devices", "repeat")
    of_some = ("memory_kind", "accuracy_target", "theoretical_state_bytes", "disturbed")
    rows = displayed(runs)
    parts = [
        panel(rows.select(*names, *of_some, name, **also).drop_nulls(name), label) for name, label in labels.items()
    ]
    return pl.concat(parts, how="diagonal").sort(natural("group"), maintain_order=True)
