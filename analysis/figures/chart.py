"""What the figures have in common: how they are declared, colours, panels, marks, and the sentences below them.

Panels are wrapped facets, so that the report can give them as many columns as there is room for.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from abc import ABC, abstractmethod
from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import polars as pl
import polars.selectors as cs

from analysis import text
from analysis.comparison.baseline import unlike_groups
from analysis.comparison.configurations import facts, summary
from analysis.runs.reader import once
from analysis.text import DISTURBED_MARK
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from analysis.comparison.issues import Issue
    from analysis.runs.reader import Runs


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """A figure as a module of this folder declares it, under its name."""

    order: int
    """Its place in a report; equal ones are in the order of their names."""
    title: str
    rows: Callable[[Runs], pl.DataFrame]
    """What is drawn, in the order to be drawn: its kind says which columns. Without a row there is no figure."""
    finding: Callable[[Runs], str]
    remark: str = ""
    """What its subtitle says in any case."""

    def figure(self, runs: Runs) -> alt.FacetChart | None:
        """Draw it; None where there is nothing to show."""
        data = self.rows(runs)
        if data.is_empty():
            return None
        chart = self.drawn(data, runs)
        chart.title = _title(self.title, data, self.remark)
        return chart

    @abstractmethod
    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """Draw these rows, which are those of these runs."""


@dataclass(frozen=True, kw_only=True)
class Own(Chart):
    """A figure of a kind of its own."""

    draw: Callable[[pl.DataFrame, Runs], alt.FacetChart]

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """As the figure's module says."""
        return self.draw(data, runs)


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
MOST_POINTS = 3_000
"""Most points of a figure's repeats; with more, medians are drawn."""
NAMES = ("group", "configuration", "variant", "strategy", "devices", "nodes", "repeat", "disturbed")
"""Columns of a displayed run by which its marks are placed, named and coloured."""
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
    """Add the `median` of `value` over repeats, its largest, and which row draws them.

    Of very many repeats, a point at the median stands for all; its `repeat` says so.
    """
    data = data.with_columns(
        median=median.over(by),
        largest=pl.col("value").max().over(by),
        first=pl.int_range(pl.len()).over(by) == 0,
    )
    if shown(data).height <= MOST_POINTS:
        return data
    repeats = pl.format("median of {}", pl.len().over(by))
    return data.with_columns(value=pl.col("median"), repeat=repeats).filter("first")


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


def doubling(data: pl.DataFrame, title: str) -> alt.X:
    """The axis of x, with a tick at each value."""
    axis = alt.Axis(values=sorted(set(data["x"])), format=",d", grid=False)
    return alt.X("x:Q", title=title, scale=DOUBLING, axis=axis)


def scale(of: Mapping[str, Any]) -> alt.Scale:
    """Each name's colour, dashes or width."""
    return alt.Scale(domain=list(of), range=list(of.values()))


def bar_colour(data: pl.DataFrame, runs: Runs) -> alt.Color:
    """The variants' colours, without a legend: the bars are named."""
    return alt.Color("variant:N", scale=scale(variants(data, runs)), legend=None)


def label_marks(base: alt.Chart, y: alt.Y, *, at: str) -> tuple[alt.Chart, alt.Chart]:
    """The column `label` beside the bars' ends, and invisible marks at `room` that make the axis long enough for it."""
    first = base.transform_filter("datum.first")
    label = first.mark_text(align="left", dx=8, fontSize=12, color=INK).encode(
        x=alt.X(f"{at}:Q"), y=y, text=alt.Text("label:N")
    )
    room = first.mark_point(opacity=0).encode(x=alt.X("room:Q", scale=alt.Scale(nice=False)), y=y)
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


def variant_dashes(data: pl.DataFrame, runs: Runs) -> dict[str, list[int]]:
    """The variants of these rows, in the order of first appearance → their dashes."""
    strategies = dict(data.select("variant", "strategy").unique(maintain_order=True).rows())
    return dict(zip(strategies, dashes(list(strategies.values()), runs), strict=True))


def series(data: pl.DataFrame, runs: Runs, *, points: bool = False) -> dict[str, Any]:
    """Colour by variant, dashes by strategy and place: one legend, and lines that lie on each other still show.

    Points have a shape by their number of devices, as configurations of one variant have one colour.
    """
    colours = variants(data, runs)
    rows = data.select("configuration", "variant", "strategy").unique(maintain_order=True).rows()
    names, strategies = [row[0] for row in rows], [row[2] for row in rows]
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
            "configuration:N",
            scale=alt.Scale(domain=names, range=dashes(strategies, runs)),
            legend=legend,
        ),
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
    laid_out.usermeta = _omitted(data, order)
    each = {"x": "independent", "y": "independent"}
    laid_out.resolve = alt.Resolve(axis=each, scale=each if own_axes else alt.Undefined)
    return laid_out


def tips(*shorthands: str) -> list[alt.Tooltip]:
    """Tooltips of these columns. Given as texts, Altair would compare each with all classes of its schema."""
    return [alt.Tooltip(shorthand) for shorthand in shorthands]


def _omitted(data: pl.DataFrame, order: Sequence[str]) -> Any:
    """How many panels are not drawn, by which the page's script tells why a filter leaves nothing."""
    left = 0 if _WORDS.get() is not None else data["panel"].n_unique() - len(order)
    return {"omitted": left} if left else alt.Undefined


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


def _title(title: str, data: pl.DataFrame, remark: str) -> alt.Title:
    """A subtitle says where not all panels are drawn how to get the others, and what marks disturbed runs."""
    words = alt.Title(title, anchor="start", fontSize=15, offset=12, color=INK)
    known, drawn = data["panel"].n_unique(), len(drawn_panels(data))
    told = []
    if drawn < known and _WORDS.get() is None:
        told = [f"{drawn} of {known} panels are drawn; the tables have all, and report --figure --panel draws any."]
    if disturbed(data).any():
        told.append(DISTURBED)
    if remark:
        told.append(remark)
    if told:
        words.subtitle = " ".join(told)
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


def pale(value: float) -> Any:
    """An opacity, or less of it for disturbed runs."""
    return alt.condition("datum.disturbed", alt.value(value / 2), alt.value(value))


def mark(data: pl.DataFrame) -> pl.Series:
    """What stands behind the label of each row."""
    return disturbed(data).replace_strict({True: DISTURBED_MARK, False: ""}, return_dtype=pl.String)


SHAPES = ("circle", "triangle-up", "square", "diamond", "cross", "triangle-down")
"""By number of devices, the fewest first."""


def shapes(data: pl.DataFrame, legend: alt.Legend) -> alt.Shape:
    """A shape for each number of devices."""
    of = dict(data.select("configuration", "devices").unique(maintain_order=True).rows())
    levels = sorted(set(of.values()))
    shapes = [SHAPES[levels.index(devices) % len(SHAPES)] for devices in of.values()]
    return alt.Shape("configuration:N", scale=alt.Scale(domain=list(of), range=shapes), legend=legend)


MOST_TOLD = 4
"""Configurations in order that one sentence names; of more, the first three and the last one."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A finding that says something of each configuration, one sentence for each group."""

    rows: Callable[[Runs], pl.DataFrame] = summary
    """A row per configuration."""
    by: str | None = None
    """The column that orders them, the smallest first; those without it are left out. None: they are in order."""
    descending: bool = False
    each: Callable[[dict[str, Any]], str]
    """What is said of a row."""
    whole: str | Callable[[pl.DataFrame], str]
    """The sentence, with {} where what is said of the rows stands."""
    nothing: str
    """Where there is no row."""
    sep: str = "; "
    group: str = "group"
    ranks: bool = True
    """Whether the order says which is better: then the sentence says where it may not, and why."""
    footnote: str = ""
    """A line below the sentences."""
    more: Callable[[Runs], list[str]] = lambda runs: []
    """Further lines, also where there is no row."""

    def __call__(self, runs: Runs) -> str:
        """The finding about these runs."""
        rows = self.rows(runs)
        rows = rows if self.by is None else rows.drop_nulls(self.by)
        told = per_group(rows, self._ranked if self.ranks else self._of, by=self.group, every=True)
        works = rows[self.group].n_unique()
        why = _not_ranked(unlike_groups(runs), rows, by=self.group) if told and self.ranks else {}
        for reason, groups in why.items():
            of = "each kind of work" if len(groups) == works else text.listed(groups, sep="; ")
            where = f"Of {of}, " if works > 1 else "But "
            told += f"\n{where}this does not rank them, since {reason} (see the warnings)."
        lines = [told, self.footnote if told else "", *self.more(runs)]
        return "\n".join(filter(None, lines)) or self.nothing

    def _of(self, rows: pl.DataFrame) -> str:
        if self.by is not None:
            rows = rows.sort(self.by, descending=self.descending, maintain_order=True)
        whole = self.whole if isinstance(self.whole, str) else self.whole(rows)
        each = [self.each(row) for row in rows.iter_rows(named=True)]
        if self.by is None or len(each) <= MOST_TOLD:
            return whole.format(text.listed(each, most=MOST_TOLD if self.by else 3, sep=self.sep))
        return whole.format(f"{text.listed(each[:-1], sep=self.sep)}{self.sep}at the other end {each[-1]}")

    def _ranked(self, rows: pl.DataFrame) -> str:
        """Configurations of which others disturbed runs are told of behind the others, so that they are neither first
        nor last.
        """
        marked = pl.col("disturbed").fill_null(False)
        parts = [part for part in (rows.filter(~marked), rows.filter(marked)) if part.height]
        return "; apart from these, ".join(filter(None, map(self._of, parts)))


def _not_ranked(unlike: Mapping[str, Issue], rows: pl.DataFrame, *, by: str) -> dict[str, list[str]]:
    """Why configurations are not ranked → the groups of which that is true, among those that have a sentence."""
    found: dict[str, list[str]] = defaultdict(list)
    for (group,), members in islice(rows.group_by(by, maintain_order=True) if rows.height else (), MOST_SENTENCES):
        disturbed = members.filter(pl.col("disturbed").fill_null(False))["configuration"].to_list()
        issue = next((unlike[each] for each in members["group"] if each in unlike), None)
        if issue is not None or disturbed:
            found[issue.brief if issue else f"others disturbed runs of {text.listed(disturbed)}"].append(str(group))
    return found


MOST_SENTENCES = 4
"""Groups that have a sentence of their own."""


def per_group(
    rows: pl.DataFrame, sentence: Callable[[pl.DataFrame], str], *, by: str = "group", every: bool = False
) -> str:
    """The sentence about the rows of each group, but for empty ones; of several groups each gets a line with its name.

    Empty where there is no sentence. `every`: no group's sentence is empty, so those that are not shown are not made.
    """
    groups = rows[by].n_unique() if rows.height else 0
    of_groups = ((str(group), sentence(members)) for (group,), members in rows.group_by(by, maintain_order=True))
    sentences = [(group, words) for group, words in islice(of_groups, MOST_SENTENCES if every else None) if words]
    if len(sentences) == 1:
        return sentences[0][1][:1].upper() + sentences[0][1][1:] + "."
    more = (groups if every else len(sentences)) - MOST_SENTENCES
    lines = [f"{group}: {words}." for group, words in sentences[:MOST_SENTENCES]]
    return "\n".join(lines + ([f"The others: see the table ({more})."] if more > 0 else []))
