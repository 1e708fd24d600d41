"""What the figures have in common: how they are declared, what of many is drawn, colours, panels, words on marks.

Panels are wrapped facets, so that the report can give them as many columns as there is room for.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from abc import ABC, abstractmethod
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import altair as alt
import numpy as np
import polars as pl
import polars.selectors as cs

from analysis import text
from analysis.comparison.campaign import campaign
from analysis.comparison.summary import displayed, facts, summary
from analysis.metrics.disturbance import is_disturbed
from analysis.runs.reader import once
from analysis.text import DISTURBED_MARK
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from analysis.runs.reader import Runs


class Drawing(NamedTuple):
    """A figure of some runs."""

    chart: alt.FacetChart
    values: pl.DataFrame
    """The numbers behind it, of all configurations and panels: see `Chart.table`."""
    remark: str
    """Which of its configurations and panels are drawn, and what marks disturbed ones; empty: nothing to say."""


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """A figure as a module of this folder, or of `analysis/claims/figures`, declares it under its name."""

    order: int
    """Its place in a report; equal ones are in the order of their names."""
    title: str
    rows: Callable[[Runs], pl.DataFrame]
    """What is drawn, in the order to be drawn, with the kind's `NEEDED` columns. Without a row there is no figure."""
    finding: Callable[[Runs], str]
    remark: str = ""
    """What its subtitle says in any case."""
    drawn_for: Callable[[Runs], bool] = lambda runs: True
    """Whether a report on these runs has it; a figure that is asked for by name is drawn in any case."""
    NEEDED: ClassVar[tuple[str, ...]] = ("panel",)

    def figure(self, runs: Runs) -> alt.FacetChart | None:
        """Draw it; None where there is nothing to show."""
        drawing = self.drawing(runs)
        return drawing and drawing.chart

    def drawing(self, runs: Runs) -> Drawing | None:
        """Draw it, with its numbers; None where there is nothing to show."""
        rows = self.rows(runs)
        if rows.is_empty():
            return None
        rows = self.prepared(rows)
        if missing := set(self.NEEDED) - set(rows.columns):
            raise TypeError(f"{self.title}: its rows lack {', '.join(sorted(missing))}")
        data, left_out = few(rows, runs, self.curve)
        chart = self.drawn(data, runs)
        remark = " ".join(filter(None, [left_out, *_remarks(data), self.remark]))
        chart.title = _title(self.title, remark, columns=min(COLUMNS, len(drawn_panels(data))))
        return Drawing(chart, self.table(rows, runs), remark)

    @property
    def curve(self) -> str:
        """Column that tells bars or curves of a panel apart."""
        return "configuration"

    def prepared(self, data: pl.DataFrame) -> pl.DataFrame:
        """The rows, with what is added to them whatever is drawn."""
        return data

    @abstractmethod
    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """Draw these rows, which are those of these runs."""

    @abstractmethod
    def table(self, data: pl.DataFrame, runs: Runs) -> pl.DataFrame:
        """The numbers as a small table whose columns are called as people read them."""


@dataclass(frozen=True, kw_only=True)
class Own(Chart):
    """A figure of a kind of its own."""

    draw: Callable[[pl.DataFrame, Runs], alt.FacetChart]
    tabulate: Callable[[pl.DataFrame], pl.DataFrame] = lambda data: data
    """Its numbers as a small table, from all its rows."""

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """As the figure's module says."""
        return self.draw(data, runs)

    def table(self, data: pl.DataFrame, runs: Runs) -> pl.DataFrame:
        """As the figure's module says."""
        return self.tabulate(data)


REPEATED = ("group", "panel", "configuration", "variant", "strategy", "repeat", "disturbed", "value")
"""Columns of rows of repeats. `disturbed`: whether the value rests on what others disturbed."""
NAMES = ("group", "configuration", "variant", "strategy", "devices", "nodes", "repeat", "disturbed")
"""Columns of a displayed run by which its marks are placed, named and coloured."""
MEMORY = {"host": "Host memory (RSS)", "device": "Device memory (allocated)"}
"""`memory_kind` → what a peak of memory is one of."""


def rests_on_disturbed(runs: Runs, column: str) -> pl.Expr:
    """Of rows of `displayed`, whether the run is disturbed, or this number of it was measured in a disturbed window."""
    return pl.col("disturbed") | pl.col("run_id").is_in(list(is_disturbed(runs, column)))


def baselines(runs: Runs) -> dict[tuple[str, str], str]:
    """Group and configuration → the configuration of that group that it is compared with, itself for a baseline."""
    found = campaign(runs)
    pairs = ((each, found.baseline_of(each)) for each in found.counted)
    return {(each.group, each.name): one.name for each, one in pairs if one is not None}


def measured(runs: Runs, column: str, *also: str | pl.Expr, **named: pl.Expr) -> pl.DataFrame:
    """A row per displayed run that has this column: `NAMES`, run_id, the column, the others asked for, and `value`.

    `disturbed` where the run is, or where this number of it rests on disturbed epochs.
    """
    rows = displayed(runs).drop_nulls(column).with_columns(disturbed=rests_on_disturbed(runs, column))
    return rows.select(
        *dict.fromkeys(["run_id", *NAMES, column]), *also, value=pl.col(column).cast(pl.Float64), **named
    )


MOST_CONFIGURATIONS = 12
"""Most configurations of a figure that are drawn, of lines over devices most variants: the same in every figure."""


def few(data: pl.DataFrame, runs: Runs, curve: str) -> tuple[pl.DataFrame, str]:
    """The rows of the configurations that are drawn, and a sentence that says which, empty where it is all of them.

    One rule for all figures: every baseline, then the configurations that train fastest in steady state, each kind of
    work's first one, then each one's second one, and so on.
    """
    if not {"group", "configuration", curve} <= set(data.columns):
        return data, ""
    names = shown(data)[curve].drop_nulls().unique(maintain_order=True).to_list()
    if len(names) <= MOST_CONFIGURATIONS:
        return data, ""
    rows = shown(data).select(curve=pl.col(curve), group="group", configuration="configuration").unique()
    best = rows.join(_places(runs), on=["group", "configuration"]).group_by("curve").agg(pl.col("place").min())
    places = dict(best.rows())
    if not places:
        return data, ""
    drawn = sorted(names, key=lambda name: places.get(name, len(places)))[:MOST_CONFIGURATIONS]
    what = {"configuration": "configurations", "variant": "variants of strategies"}.get(curve, curve)
    return data.filter(pl.col(curve).is_in(drawn)), (
        f"{len(drawn)} of {len(names)} {what} are drawn: the baselines, then the fastest in steady state; all are in "
        "the table."
    )


@once
def _places(runs: Runs) -> pl.DataFrame:
    """Group and configuration → its `place` among those of its group: 0 for a baseline, then by time per epoch."""
    ones = [(group, configuration) for (group, _), configuration in baselines(runs).items()]
    of_groups = pl.DataFrame(ones, {"group": pl.String, "configuration": pl.String}, orient="row").unique()
    return (
        summary(runs)
        .select("group", "configuration", "steady_epoch_time_s")
        .join(of_groups.with_columns(first=pl.lit(True)), on=["group", "configuration"], how="left")
        .sort(pl.col("first").is_null(), "steady_epoch_time_s", nulls_last=True, maintain_order=True)
        .select(
            "group",
            "configuration",
            place=pl.when("first").then(0).otherwise(1 + pl.int_range(pl.len()).over("group")),
        )
    )


DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [12, 2, 2, 2, 2, 2])
# Okabe and Ito's colours, distinct with any kind of colour blindness; their yellow is too pale for lines. Nobody
# distinguishes 24 hues: a hue is a family (blue: replicas, green: sharded, orange: by layers, pink: by tensors, violet:
# servers and outer loops, lime: by tokens, cyan: by experts, red: TensorFlow's), and its members differ in lightness
# and, where they are lines, in dashes. So do those of other families that look alike to some.
STYLES = {
    "single": ("#4d4d4d", 0),
    "ddp": ("#0072b2", 1),
    "ring_ddp": ("#00344f", 4),
    "data_parallel": ("#56b4e9", 3),
    "fsdp": ("#009e73", 4),
    "hsdp": ("#004d38", 1),
    "zero1": ("#90d8b8", 5),
    "model_parallel": ("#d55e00", 2),
    "model_parallel_tutorial": ("#5e2a00", 4),
    "pipeline": ("#e69f00", 1),
    "dp_pp": ("#886633", 3),
    "dp_pp_tp": ("#f0c05a", 5),
    "tensor_parallel": ("#cc79a7", 3),
    "dp_tp": ("#8a2c62", 1),
    "context_parallel": ("#88bb66", 2),
    "fsdp_cp": ("#42620a", 1),
    "expert_parallel": ("#00aabb", 1),
    "parameter_server": ("#332288", 2),
    "downpour": ("#8f7fd6", 3),
    "sandblaster_lbfgs": ("#6a3fb5", 4),
    "tf_single": ("#550000", 3),
    "tf_mirrored": ("#dd0033", 4),
    "tf_multi_worker": ("#ee6677", 5),
    "tf_parameter_server": ("#aa5577", 1),
}
"""Strategy → its colour in all reports, and the first of its `DASHES`: `single` is solid, below all others."""
THEORY = "#999999"
"""The colour of lines that nobody measured."""
_LONG_NAME = 28
MOST_POINTS = 1_000
"""Most points of a figure's repeats; with more, medians are drawn, or the bands that repeats of lines span."""


def are_too_many(points: int) -> bool:
    """Whether so many points of repeats are not drawn one by one."""
    return points > MOST_POINTS


LEGEND = alt.Legend(
    title=None, symbolLimit=0, symbolType="stroke", symbolOpacity=1, symbolSize=500, symbolStrokeWidth=2.5
)


def variants(data: pl.DataFrame, runs: Runs) -> dict[str, str]:
    """The variants of these rows, in the order of first appearance → their colours."""
    colours = _colours(runs)
    return {name: colours[name] for name in data["variant"].unique(maintain_order=True)}


@once
def _colours(runs: Runs) -> dict[str, str]:
    """Variant → its colour, whatever else is in a figure: of all that these runs are, also of the lines of `lines_of`.

    The first variant of a strategy has the strategy's colour; others, and those of plugins, have spare ones.
    """
    rows = facts(runs).select("variant", "strategy", "nodes")
    apart = rows.filter(pl.col("nodes") > 1).with_columns(variant=_ON_NODES)
    of = dict(pl.concat([rows, apart]).select("variant", "strategy").unique(maintain_order=True).rows())
    firsts = {strategy: variant for variant, strategy in reversed(of.items())}
    own = {variant: STYLES[strategy][0] for strategy, variant in firsts.items() if strategy in STYLES}
    spare = _spares([THEORY, *own.values()])
    return {variant: own.get(variant) or next(spare) for variant in of}


def _spares(taken: Iterable[str]) -> Iterator[str]:
    """Colours, neither pale nor glaring: each as unlike as can be to those taken and to those before it."""
    colours = list(product(range(0x22, 0xCC, 0x11), repeat=3))
    weights = np.sqrt([2, 4, 3])  # what eyes see of red, green and blue
    others = [tuple(bytes.fromhex(colour[1:])) for colour in taken]
    while True:
        apart = [np.linalg.norm((np.array(colours) - other) * weights, axis=1) for other in others]
        others.append(colours[np.min(apart, axis=0).argmax()])
        yield "#" + bytes(others[-1]).hex()


def lines_of(data: pl.DataFrame) -> pl.DataFrame:
    """The same, where a variant that was measured on as many devices of one node and of several has a line for each."""
    several = (pl.col("configuration").n_unique().over("panel", "variant", "devices") > 1).any().over("variant")
    return data.with_columns(variant=pl.when(several & (pl.col("nodes") > 1)).then(_ON_NODES).otherwise("variant"))


_ON_NODES = pl.concat_str(
    pl.col("variant").str.extract("^([^,]*)"),
    pl.format(" on {} nodes", "nodes"),
    pl.col("variant").str.extract("(,.*)$").fill_null(""),
)
"""What the line of a variant on several nodes is called."""


MEDIAN = pl.col("value").median()
RATIO_MEDIAN = pl.col("value").log().median().exp()
"""As `analysis.comparison.ratio.ratio_median`."""


def with_medians(data: pl.DataFrame, by: Sequence[str], median: pl.Expr = MEDIAN) -> pl.DataFrame:
    """Add the `median` of `value` over repeats, its `low`est and `high`est, how many `repeats` have one, and whether
    the row is the `first` of them, which draws them.
    """
    return data.with_columns(
        median=median.over(by),
        low=pl.col("value").min().over(by),
        high=pl.col("value").max().over(by),
        repeats=pl.col("value").count().over(by),
        first=pl.int_range(pl.len()).over(by) == 0,
    )


def tabulated(
    data: pl.DataFrame, value: str, *also: pl.Expr, by: Mapping[str, str] | None = None, median: pl.Expr = MEDIAN
) -> pl.DataFrame:
    """A row per panel, configuration and value of the columns `by` (→ what they hold), in the order of the data.

    Columns: group, panel unless it is the group, configuration, those of `by`, the median over repeats, which is called
    `value`, lowest, highest, repeats, `also`, and disturbed where any row is.
    """
    by = by or {}
    found = data.group_by("group", "panel", "configuration", *by, maintain_order=True).agg(
        median.alias(value),
        pl.col("value").min().alias("lowest"),
        pl.col("value").max().alias("highest"),
        pl.col("value").count().alias("repeats"),
        *also,
        disturbed=pl.when(pl.col("disturbed").any()).then(pl.lit(DISTURBED_MARK)),
    )
    # The table stands below the group's name.
    inner = pl.col("panel").str.strip_prefix(pl.concat_str("group", pl.lit(BETWEEN)))
    found = found.drop_nulls(value).with_columns(panel=inner).rename(by)
    found = found.drop("panel") if (found["panel"] == found["group"]).all() else found
    return found if found["disturbed"].count() else found.drop("disturbed")


def with_words(data: pl.DataFrame, *quantities: tuple[str, str], who: str = "configuration") -> pl.DataFrame:
    """Add what marks say to who points at them: `words` of a row with a repeat, `words_of_median` of its median.

    `quantities`: columns with what they hold and its unit; the last one is that of `value` and `median`. Text such as
    "ddp × 2, repeat 3; Epoch: 4; Accuracy (%): 97.1".
    """
    *before, (_, unit) = quantities

    def of(row: dict[str, Any], *, median: bool) -> str:
        repeat = row["repeat"]
        name = str(row[who]) if median or repeat is None else f"{row[who]}, {_repeat(repeat)}"
        at = [f"{what}: {_plain(row[column])}" for column, what in before]
        value = text.number(row["median" if median else "value"])
        spread = ""
        if median and row["repeats"] > 1:
            ends = " to ".join(dict.fromkeys(map(text.number, (row["low"], row["high"]))))
            spread = f" (median of {row['repeats']} repeats, {ends})"
        told = [name, *at, f"{unit}: {value}{spread}"]
        return "; ".join(told + ["others disturbed it"] * bool(row["disturbed"]))

    rows = list(data.iter_rows(named=True))
    return data.with_columns(
        pl.Series("words", [of(row, median=False) for row in rows], pl.String),
        pl.Series("words_of_median", [of(row, median=True) if row["first"] else None for row in rows], pl.String),
    )


def _repeat(repeat: Any) -> str:
    return f"repeat {repeat}" if isinstance(repeat, int) else str(repeat)


def _plain(value: Any) -> str:
    return text.number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def written(words: Callable[[Any], str], *columns: str) -> pl.Expr:
    """The words for each value of the column, or for each row of several."""
    values = pl.col(*columns) if len(columns) == 1 else pl.struct(*columns)
    return values.map_elements(words, return_dtype=pl.String)


def names_axis(data: pl.DataFrame) -> alt.Y:
    """A row per configuration, in the order of the data."""
    names = list(data["configuration"].unique(maintain_order=True))
    axis = alt.Axis(domain=False, ticks=False, labelPadding=8, labelLimit=370, labelOverlap=False)
    return alt.Y("configuration:N", sort=names, title=None, axis=axis)


DOUBLING = alt.Scale(type="log", base=2, padding=12, nice=False)
"""As far from each value to its double everywhere."""


def scale(of: Mapping[str, Any]) -> alt.Scale:
    """Each name's colour, dashes or width."""
    return alt.Scale(domain=list(of), range=list(of.values()))


def bar_colour(data: pl.DataFrame, runs: Runs) -> alt.Color:
    """The variants' colours, without a legend: the bars are named."""
    return alt.Color("variant:N", scale=scale(variants(data, runs)), legend=None)


def label_marks(base: alt.Chart, y: alt.Y, *, at: str) -> tuple[alt.Chart, alt.Chart]:
    """The column `label` beside the bars' ends, and invisible marks at `room` that make the axis long enough for it."""
    first = base.transform_filter("datum.first")
    label = first.mark_text(align="left", dx=8, fontSize=12, color=INK, aria=False).encode(
        x=alt.X(f"{at}:Q"), y=y, text=alt.Text("label:N")
    )
    room = first.mark_point(opacity=0, aria=False).encode(x=alt.X("room:Q", scale=alt.Scale(nice=False)), y=y)
    return label, room


def dashes(strategies: Sequence[str], runs: Runs) -> list[list[int]]:
    """The dashes of lines whose strategies these are: the strategy's own for its first line, then the next ones.

    Those of plugins begin by their place among the plugins' strategies of these runs.
    """
    others = [name for name in facts(runs)["strategy"].unique(maintain_order=True) if name not in STYLES]
    begins = [STYLES[name][1] if name in STYLES else 1 + others.index(name) for name in strategies]
    places = [strategies[:index].count(name) for index, name in enumerate(strategies)]
    steps = [begin + place for begin, place in zip(begins, places, strict=True)]
    return [DASHES[step and 1 + (step - 1) % (len(DASHES) - 1)] for step in steps]  # solid again, one would hide others


def series(data: pl.DataFrame, runs: Runs, curve: str = "configuration", theory: Sequence[str] = ()) -> dict[str, Any]:
    """Colour by variant, dashes by strategy and place: one legend, and lines that lie on each other still show.

    `theory`: names of lines that nobody measured; they come last.
    """
    colours = variants(data, runs)
    rows = data.select(curve=pl.col(curve), variant="variant", strategy="strategy").unique("curve", maintain_order=True)
    names = [*rows["curve"], *theory]
    of_theory = [DASHES[place % len(DASHES)] for place in range(len(theory))]
    legend = LEGEND.copy()
    if max(map(len, names)) > _LONG_NAME:  # four columns of these would leave the panels no width
        legend.columns = 2
    looks: dict[str, list[Any]] = {
        "color": [*(colours[name] for name in rows["variant"]), *[THEORY] * len(theory)],
        "strokeDash": [*dashes(rows["strategy"].to_list(), runs), *of_theory],
    }
    channels = {"color": alt.Color, "strokeDash": alt.StrokeDash}
    return {
        name: channels[name](f"{curve}:N", scale=alt.Scale(domain=names, range=look), legend=legend)
        for name, look in looks.items()
    }


def legible(colour: str) -> str:
    """The colour, or as much of it as words on white need: a contrast of 4.5 (WCAG 2.2, 1.4.3)."""
    whole = np.array(list(bytes.fromhex(colour[1:])))
    for share in np.arange(1, 0, -0.02):
        part = whole * share / 255
        linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
        if 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05) >= 4.5:
            return "#" + bytes(np.round(part * 255).astype(np.uint8)).hex()
    return "#000000"


INK = "#333333"
PANEL_WIDTH = 330
COLUMNS = 2
MOST_PANELS = 24
"""Most panels of a figure that are drawn."""
BETWEEN = " — "
"""Stands between the kind of work and what a panel shows of it."""
_WORDS: ContextVar[str | None] = ContextVar("words of the panels that are drawn", default=None)
_MOST_NAMED = 6
"""Panels that an error names, the nearest first."""
_HEADING_LETTERS = 42
"""Letters of a panel's heading that are no wider than the narrowest panel."""


def panels(chart: alt.LayerChart | alt.FacetChart, data: pl.DataFrame, *, own_axes: bool = False) -> alt.FacetChart:
    """Lay out one panel per value of `panel`, each with its axes, and style it; `own_axes`: of its own scale."""
    order = drawn_panels(data)
    header = alt.Header(
        title=None,
        labelFontSize=13,
        labelFontWeight="bold",
        labelAnchor="start",
        labelColor=INK,
        labelLimit=600,
        labelExpr=f"({json.dumps({name: _heading(name) for name in order})})[datum.label]",
    )
    axis: dict[str, Any] = dict.fromkeys(("labelColor", "titleColor"), INK)
    axis |= dict.fromkeys(("labelFontSize", "titleFontSize"), 12)
    axis |= dict.fromkeys(("domainColor", "tickColor"), "#999999")
    axis |= {"titleFontWeight": "normal", "gridColor": "#e6e6e6"}
    axis |= {"labelLimit": 260, "labelOverlap": "greedy", "labelSeparation": 6}
    facet = alt.Facet("panel:N", sort=order, header=header)
    laid_out: alt.FacetChart = chart.facet(facet=facet, columns=min(COLUMNS, len(order)))
    # Altair's methods would copy the chart, with all that is in it, for each of these.
    laid_out.spacing = 28
    laid_out.config = alt.Config(
        font="Arial, Helvetica, 'Liberation Sans', sans-serif",
        background="white",
        axis=alt.AxisConfig(**axis),
        legend=alt.LegendConfig(labelFontSize=12, orient="top", columns=4, labelLimit=370, labelColor=INK),
        view=alt.ViewConfig(stroke=None),
    )
    each = {"x": "independent", "y": "independent"}
    laid_out.resolve = alt.Resolve(axis=each, scale=each if own_axes else alt.Undefined)
    return laid_out


def _heading(panel: str | None) -> list[str]:
    """The lines of a panel's heading: none is wider than the panel, which would make the whole figure smaller.

    Rows of results that are older than the panel's column have none.
    """
    spaced = (panel or "").replace(" ", "\u00a0").replace("\u00a0·\u00a0", "\u00a0· ")  # lines end where a term does
    lines: list[str] = []
    for part in spaced.split(BETWEEN.replace(" ", "\u00a0")):
        for terms in textwrap.wrap(part, _HEADING_LETTERS, break_on_hyphens=False, break_long_words=False) or [part]:
            plain = terms.replace("\u00a0", " ")  # of a term that is longer than a line, lines end where a word does
            lines += textwrap.wrap(plain, _HEADING_LETTERS, break_on_hyphens=False) or [plain]
    return lines


def _remarks(data: pl.DataFrame) -> list[str]:
    """Where not all panels are drawn how to get the others, and what marks disturbed runs."""
    known, drawn = data["panel"].n_unique(), len(drawn_panels(data))
    told = []
    if drawn < known and _WORDS.get() is None:
        told = [f"{drawn} of {known} panels are drawn; the tables have all, and report --figure --panel draws any."]
    return [*told, DISTURBED] if disturbed(data).any() else told


_SUBTITLE_LETTERS = 64
"""Letters of a line of the subtitle above one column of panels."""


def _title(title: str, remark: str, *, columns: int) -> alt.Title:
    """The remark is the subtitle, in lines that are no wider than the panels."""
    words = alt.Title(title, anchor="start", fontSize=15, offset=12, color=INK)
    if remark:
        words.subtitle = textwrap.wrap(remark, _SUBTITLE_LETTERS * columns)
    return words


def drawn_panels(data: pl.DataFrame) -> list[str]:
    """The panels that are drawn, in the data's order: all; of more than `MOST_PANELS`, those of works that lie evenly
    among all works; inside `only`, those that its words name.
    """
    names: list[str] = data["panel"].unique(maintain_order=True).to_list()
    if (words := _WORDS.get()) is not None:
        return named(words, names)
    if len(names) <= MOST_PANELS:
        return names
    works = list(dict.fromkeys(name.partition(BETWEEN)[0] for name in names))
    each = -(-len(names) // len(works))
    kept = max(1, MOST_PANELS // each)
    places = {round(place * (len(works) - 1) / max(1, kept - 1)) for place in range(kept)}
    chosen = {works[place] for place in places}
    return [name for name in names if name.partition(BETWEEN)[0] in chosen][:MOST_PANELS]


def named(words: str, names: Sequence[str]) -> list[str]:
    """The panel of exactly this heading, else those whose headings hold each of these words; raises `ConfigError`."""
    wanted = _letters(words)
    exact = [name for name in names if _letters(name) == wanted]
    found = exact or [name for name in names if wanted and set(wanted) <= set(_letters(name))]
    if not found:
        near = sorted(names, key=lambda name: -len(set(wanted) & set(_letters(name))))
        told = "; ".join(name.replace(BETWEEN, ", ") for name in near[:_MOST_NAMED])
        more = f"; and {len(near) - _MOST_NAMED} more" if len(near) > _MOST_NAMED else ""
        asked = words if wanted else repr(words)
        raise ConfigError(f"no panel's heading holds {asked}: choose words of one of these: {told}{more}")
    return found


def _letters(heading: str) -> list[str]:
    return re.sub(r"[·—,]", " ", heading).lower().split()


@contextlib.contextmanager
def only(words: str | None) -> Iterator[None]:
    """Figures that are made inside draw the panels that these words name; None: as ever."""
    token = _WORDS.set(words)
    try:
        yield
    finally:
        _WORDS.reset(token)


def panel(data: pl.DataFrame, label: str | pl.Expr) -> pl.DataFrame:
    """Add the column `panel`: the label, below the group where there are several."""
    label = pl.lit(label) if isinstance(label, str) else label
    return data.with_columns(panel=pl.format("{} — {}", "group", label) if data["group"].n_unique() > 1 else label)


def shown(data: pl.DataFrame) -> pl.DataFrame:
    """The rows of the panels that are drawn. Very many would take minutes to draw."""
    return data.filter(pl.col("panel").is_in(pl.Series(drawn_panels(data)).implode()))


def records(data: pl.DataFrame) -> alt.Data:
    """The rows of the panels that are drawn, inlined. What has no place on an axis, and none in JSON, is null."""
    data = data.with_columns(pl.when(cs.float().is_finite()).then(cs.float()))
    # Altair copies lists, with all that is in them, for each part of a chart; a tuple it takes as it is.
    return alt.InlineData(values=tuple(shown(data).to_dicts()))


DISTURBED = (
    f"Paler, hollow or marked {DISTURBED_MARK}: it rests on what others disturbed, and is compared with nothing."
)
HOLLOW: Any = alt.condition("datum.disturbed", alt.value(0.0), alt.value(0.45))
"""How filled a point of lines is: disturbed runs have none."""


def disturbed(data: pl.DataFrame) -> pl.Series:
    """Of each row, whether others disturbed its run; rows of no run were not."""
    known = data["disturbed"] if "disturbed" in data.columns else pl.repeat(False, data.height, eager=True)
    return known.fill_null(False)


def pale(value: float, column: str = "disturbed") -> Any:
    """An opacity, or half of it where this column is true."""
    return alt.condition(f"datum.{column}", alt.value(value / 2), alt.value(value))


def mark(data: pl.DataFrame) -> pl.Series:
    """What stands behind the label of each row."""
    return disturbed(data).replace_strict({True: DISTURBED_MARK, False: ""}, return_dtype=pl.String)
