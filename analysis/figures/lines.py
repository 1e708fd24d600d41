"""Figures of lines: over epochs, over a quantity in which otherwise equal runs differ, and over devices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import altair as alt
import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import BESIDE_SPEED_UPS
from analysis.comparison.notes import Subject, write
from analysis.comparison.pairing import Pairing, paired
from analysis.comparison.run import compared_runs
from analysis.comparison.sides import RATE
from analysis.comparison.summary import learned, learning
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import groups_across, natural
from analysis.figures.chart import (
    BETWEEN,
    DOUBLING,
    HOLLOW,
    INK,
    MEDIAN,
    MEMORY,
    PANEL_WIDTH,
    REPEATED,
    Chart,
    are_too_many,
    baselines,
    legible,
    lines_of,
    measured,
    pale,
    panel,
    panels,
    records,
    scale,
    series,
    shown,
    tabulated,
    variants,
    with_medians,
    with_words,
)
from analysis.figures.finding import per_group
from parallelbench.config.build import LATER_COMPONENTS
from parallelbench.config.identity import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs

_LINEAR_UP_TO = 8
"""Most devices with a linear axis; with more, it is logarithmic."""
_ROOM, _ROOM_FOR_LABELS, _ROOM_FOR_NAMES = 0.08, 0.22, 0.5
"""Room beside the lines, as a share of their width: points, labels at the ends, names at the beginnings."""
_APART = 0.055
"""Least distance between labels, as a share of the axis."""
_WHOLE: Any = {"condition": {"test": "datum.value % 1 != 0", "value": 0}, "value": 1}


@dataclass(frozen=True)
class Axis:
    """An axis of `Lines`."""

    kind: Literal["linear", "zero", "doubling", "devices"]
    """linear: as far as the values reach. zero: from 0 on. doubling: as far from each value to its double everywhere.
    devices: from 0 on with few devices, doubling with more.
    """
    title: str
    whole: bool = False
    """Ticks at whole numbers only: vega takes `tickMinStep` for a wish, and makes halves of few epochs."""

    def is_doubling(self, devices: Sequence[int]) -> bool:
        """Whether the axis of a figure with these numbers of devices, if it has any, is logarithmic."""
        return self.kind == "doubling" or (self.kind == "devices" and max(devices, default=1) > _LINEAR_UP_TO)

    def across(self, levels: Sequence[float], *, left: float, right: float) -> alt.X:
        """The axis of x, with such shares of its length free beside the values."""
        if self.whole:
            only = "datum.value % 1 != 0 ? '' : datum.label"
            ticks: dict[str, Any] = {"tickMinStep": 1, "format": "d", "labelFlush": False}
            axis = alt.Axis(**ticks, labelExpr=only, tickOpacity=_WHOLE, gridOpacity=_WHOLE)
            return alt.X("x:Q", title=self.title, axis=axis, scale=alt.Scale(nice=False, padding=8))
        if self.kind in ("linear", "zero"):
            return alt.X("x:Q", title=self.title, axis=alt.Axis(tickCount=8), scale=alt.Scale(nice=False, padding=8))
        axis = alt.Axis(values=sorted(levels), format=",d", grid=False)
        if self.kind == "doubling":
            return alt.X("x:Q", title=self.title, axis=axis, scale=DOUBLING)
        low, high = float(min(levels)), float(max(levels))
        if self.is_doubling([int(high)]):
            ends = [low * (low / high) ** left, high * (high / low) ** right]
            return alt.X(
                "x:Q", title=self.title, axis=axis, scale=alt.Scale(type="log", base=2, domain=ends, nice=False)
            )
        length = max(high - low, 1.0)
        ends = [low - left * length, high + right * length]
        return alt.X("x:Q", title=self.title, axis=axis, scale=alt.Scale(domain=ends, nice=False))

    def up(self, devices: Sequence[int]) -> alt.Y:
        """The axis of medians; `devices` as in `is_doubling`."""
        if self.is_doubling(devices):
            scale = DOUBLING
        else:
            scale = alt.Scale(zero=False) if self.kind == "linear" else alt.Scale(domainMin=0)
        return alt.Y("median:Q", title=self.title, scale=scale, axis=alt.Axis(titleColor=INK, tickCount=6))


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """A line of medians per configuration, over devices per variant, with every repeat as a point; of very many repeats
    the band that they span. Lines of theory are grey.

    `rows` has the columns of `REPEATED` and x, over devices `devices` and `nodes` instead of x; `least`, where it has
    this column, is the other end of a rule at each point.
    """

    x: Axis
    y: Axis | Callable[[Runs], Axis]
    own_axes: bool = False
    """Each panel has its own: beside a small model's rates, a large one's would lie flat on the ground."""
    by: str | None = None
    """A column: each value of it has lines of its own."""
    widths: Mapping[str, float] | None = None
    """Of the lines, by the values of `by`; None: those values are written where lines begin."""
    origins: bool = False
    """Whether lines without a run on their baseline's devices begin at the baseline."""
    references: Callable[[pl.DataFrame], pl.DataFrame] | None = None
    """What makes lines of theory from the rows: panel, line (its name), x, value, and `label` if any is written."""
    labels: pl.Expr | None = None
    """Text where a line ends, in its colour, from its `median` and columns of its rows."""
    points: bool = True
    """Whether repeats are drawn."""
    joined: bool = True
    """Whether lines join medians; else there are points, and lines of theory."""
    median: pl.Expr = MEDIAN
    """Over the repeats of `value`."""
    NEEDED: ClassVar[tuple[str, ...]] = (*REPEATED, "x")

    @property
    def curve(self) -> str:
        """Over devices a line is a variant, otherwise a configuration."""
        return "variant" if self.x.kind == "devices" else "configuration"

    def prepared(self, data: pl.DataFrame) -> pl.DataFrame:
        """Over devices a variant that was measured on as many devices of one node and of several has two lines."""
        return lines_of(data).with_columns(x=pl.col("devices")) if self.x.kind == "devices" else data

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """All panels have the same axes, if not `own_axes`."""
        y = self._y(runs)
        inks = {name: legible(colour) for name, colour in variants(data, runs).items()}
        data = shown(data)
        many = are_too_many(data["value"].count())
        data = self._with_curves(data, y, runs, only_medians=many and "least" not in data.columns)
        data = data.with_columns(ink=pl.col("variant").replace_strict(inks, default=INK, return_dtype=pl.String))
        theory = data.filter("theory")[self.curve].unique(maintain_order=True).to_list()
        key = series(data.filter(~pl.col("theory")), runs, self.curve, theory)
        base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=260)
        levels = data.filter(~pl.col("theory"))["x"].drop_nulls().unique().to_list()
        right = _ROOM if self.labels is None else _ROOM_FOR_LABELS
        across = self.x.across(levels, left=self._room_for_names(), right=right)
        up = y.up(levels if self.x.kind == "devices" else ())
        marks = [self._line(base).encode(x=across, y=up, **key)]
        value = up.copy()
        value.shorthand = "value:Q"
        place: dict[str, Any] = {"x": across, "color": key["color"]}
        if self.points and not many:
            marks.append(_points(base).encode(y=value, **place))
        elif self.points and data.filter(pl.col("low") < pl.col("high")).height:
            marks.insert(0, _band(base, self._detail()).encode(y=_of(up, "low"), **place))
        if "least" in data.columns:
            rule = base.transform_filter("datum.least != null").mark_rule(strokeWidth=1.2, aria=False)
            marks.append(rule.encode(y=value, y2="least:Q", **place))
        marks += _words(base, across, _of(up, "label_y"), data)
        return panels(alt.layer(*marks), data, own_axes=self.own_axes)

    def _y(self, runs: Runs) -> Axis:
        return self.y if isinstance(self.y, Axis) else self.y(runs)

    def _room_for_names(self) -> float:
        return _ROOM if self.by is None or self.widths else _ROOM_FOR_NAMES

    def _keys(self) -> tuple[str, ...]:
        return ("panel", self.curve, *([self.by] if self.by else []))

    def _detail(self) -> Any:
        return alt.Detail(f"{self.by}:N") if self.by else alt.Undefined

    def _line(self, base: alt.Chart) -> alt.Chart:
        line = base.transform_filter("datum.first" if self.joined else "datum.theory").mark_line(aria=False)
        if self.widths is None:
            width: Any = alt.value(2.0)
        else:
            legend = alt.Legend(title=None, symbolType="stroke", symbolSize=500, symbolStrokeColor=INK)
            width = alt.StrokeWidth(f"{self.by}:O", scale=scale(self.widths), legend=legend)
        drawn: alt.Chart = line.encode(detail=self._detail(), strokeWidth=width, opacity=pale(1.0, "faint"))
        return drawn

    def _with_curves(self, data: pl.DataFrame, y: Axis, runs: Runs, *, only_medians: bool) -> pl.DataFrame:
        """Rows of repeats with medians and words; rows without a repeat where lines begin, and of lines of theory.

        `only_medians`: of the repeats of a point only the first row, which draws their median and the band.
        """
        keys = self._keys()
        data = with_medians(data, (*keys, "x"), self.median)
        data = data.with_columns(faint=pl.col("disturbed").all().over(keys))
        theory = None if self.references is None else self.references(data)  # which may rest on all repeats
        if only_medians:
            data = data.filter("first")
        quantities = [("x", self.x.title), *([(self.by, self.by.replace("_", " "))] if self.by else [])]
        of_devices = self.x.kind == "devices"
        data = with_words(data, *quantities[of_devices:], ("value", y.title))
        ending = pl.lit(None, pl.String) if self.labels is None else self.labels
        data = data.with_columns(ending=ending, theory=pl.lit(False))
        parts = [data]
        if self.origins:
            parts.append(_origins(data, baselines(runs), keys))
        if theory is not None:
            lines = theory.rename({"line": self.curve, "value": "median"})
            parts.append(lines.with_columns(pl.lit(True).alias("theory"), first=pl.lit(True), disturbed=pl.lit(False)))
        devices = data["x"].to_list() if of_devices else ()
        return _labelled(pl.concat(parts, how="diagonal_relaxed"), self, doubling=y.is_doubling(devices))

    def table(self, data: pl.DataFrame, runs: Runs) -> pl.DataFrame:
        """As `tabulated`, by x and `by`; of very long lines some points, the first and the last always."""
        by = {"x": self.x.title} | ({self.by: self.by.replace("_", " ")} if self.by else {})
        data = data.drop_nulls("x")
        place = pl.col("x").rank("dense").over("panel", "configuration").cast(pl.Int64) - 1
        last = place.max().over("panel", "configuration")
        every = (last // MOST_OF_LINE + 1).clip(1)
        data = data.filter((place % every == 0) | (place == last))
        return tabulated(data, self._y(runs).title, by=by, median=self.median)


MOST_OF_LINE = 12
"""Most points of a line that its figure's table has, besides the last one."""


def _of(channel: alt.Y, column: str) -> alt.Y:
    """The same axis for another column."""
    of = channel.copy()
    of.shorthand = f"{column}:Q"
    return of


def _points(base: alt.Chart) -> alt.Chart:
    dots = base.transform_filter("datum.value != null").mark_point(
        filled=True, size=30, strokeOpacity=0.6, strokeWidth=0.8, opacity=1
    )
    found: alt.Chart = dots.encode(fillOpacity=HOLLOW, description=alt.Description("words:N"))
    return found


def _band(base: alt.Chart, detail: Any) -> alt.Chart:
    band = base.transform_filter("datum.first && datum.low != null").mark_area(opacity=0.18, aria=False)
    found: alt.Chart = band.encode(y2=alt.Y2("high:Q"), detail=detail)
    return found


def _origins(data: pl.DataFrame, of: Mapping[tuple[str, str], str], keys: Sequence[str]) -> pl.DataFrame:
    """Starts of lines without a run on as few devices as their baseline has: its median, in the same panel.

    These rows are of no configuration and no repeat.
    """
    by = [name for name in keys if name != "variant"]
    firsts = data.filter("first").sort("x", maintain_order=True)
    at = {
        (*(row[name] for name in by), row["group"], row["configuration"]): row for row in firsts.iter_rows(named=True)
    }
    starts = []
    for row in firsts.unique(keys, keep="first", maintain_order=True).iter_rows(named=True):
        one = of.get((row["group"], row["configuration"]))
        baseline = at.get((*(row[name] for name in by), row["group"], one))
        if baseline is not None and baseline["x"] < row["x"]:
            kept = {name: row[name] for name in (*keys, "group", "strategy")}
            starts.append(kept | {"x": baseline["x"], "median": baseline["median"]})
    schema = {name: data.schema[name] for name in (*keys, "group", "strategy", "x", "median")}
    of_none = {"first": True, "theory": False, "disturbed": False, "faint": False}
    return pl.DataFrame(starts, schema=schema, orient="row").with_columns(
        **{name: pl.lit(value) for name, value in of_none.items()}
    )


def _labelled(data: pl.DataFrame, lines: Lines, *, doubling: bool) -> pl.DataFrame:
    """Add `label`, the text of a row if it has one, its height `label_y`, which keeps texts apart, and whether it
    `leads` a line: then it stands left of that.
    """
    keys = lines._keys()
    label = pl.col("label") if "label" in data.columns else pl.lit(None, pl.String)
    real = pl.col("first") & ~pl.col("theory")
    leads = pl.lit(False)
    if lines.by is not None and lines.widths is None:
        # Where the highest line of each value begins.
        begins = real & (pl.col("x") == pl.col("x").min().over("panel", lines.by))
        highest = pl.col("median") == pl.col("median").filter(begins).max().over("panel", lines.by)
        leads = begins & highest & ((begins & highest).cum_sum().over("panel", lines.by) == 1)
        label = pl.when(leads).then(pl.col(lines.by).map_elements(_thousands, pl.String)).otherwise(label)
    if lines.labels is not None:
        ends = real & (pl.col("x") == pl.col("x").max().over(keys))
        label = pl.when(ends).then("ending").otherwise(label)
    data = data.with_columns(label=label, leads=leads, label_y=pl.col("median")).with_row_index("row")
    heights: dict[int, float] = {}
    worth = log2 if doubling else float
    span = _span_of(data["median"], worth)
    for _, texts in data.filter(pl.col("label").fill_null("") != "", ~pl.col("theory")).group_by("panel", "x", "leads"):
        least = float("-inf")
        for row, median in texts.sort("median").select("row", "median").rows():
            least = max(worth(median), least + _APART * span)
            heights[row] = 2**least if doubling else least
    moved = pl.col("row").replace_strict(heights, default=None, return_dtype=pl.Float64)
    return data.with_columns(label_y=pl.coalesce(moved, "label_y")).drop("row", "ending")


def _span_of(values: pl.Series, worth: Callable[[float], float]) -> float:
    known = [worth(value) for value in values.drop_nulls() if worth is float or value > 0]
    return max(known, default=1.0) - (min(known, default=0.0) if worth is log2 else min(0.0, *known, 0.0))


def _thousands(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _words(base: alt.Chart, x: alt.X, y: alt.Y, data: pl.DataFrame) -> list[alt.Chart]:
    """The labels: at the ends of lines in their colour, with a white rim, as they lie on lines; left of beginnings."""
    marks: list[alt.Chart] = []
    told = base.transform_filter("datum.label != null && datum.label != ''")
    for leads in (False, True):
        if not data.filter(pl.col("label").fill_null("") != "", pl.col("leads") == leads).height:
            continue
        some = told.transform_filter(f"datum.leads == {str(leads).lower()}")
        look: dict[str, Any] = {"fontSize": 12, "aria": False}
        look |= {"align": "right", "dx": -8} if leads else {"align": "left", "dx": 9}
        rim = some.mark_text(**look, color="white", stroke="white", strokeWidth=4, strokeJoin="round")
        ink = some.mark_text(**look, color=INK)
        layers = [ink] if leads else [rim, some.mark_text(**look).encode(color=alt.Color("ink:N", scale=None))]
        marks += [each.encode(x=x, y=y, text=alt.Text("label:N")) for each in layers]
    return marks


_SIDES = pl.col("side").replace({"test": "Test set", "training": "Training set, while training"})
_EPOCH = Axis("linear", "Epoch", whole=True)


def _learned(runs: Runs, of: str) -> pl.DataFrame:
    """What is learned rests on no clock: nothing of it is disturbed."""
    rows = panel(learning(runs, test=f"test_{of}", training=f"train_{of}"), _SIDES)
    return rows.with_columns(disturbed=pl.lit(False))


def _spread(rows: pl.DataFrame) -> str:
    final = pl.col("final_test_accuracy")
    low, high = rows.select(low=final.min(), high=final.max()).row(0)
    several = pl.col("configuration").n_unique().over("repeat") > 1
    spread = rows.filter(several).group_by("repeat").agg(spread=final.max() - final.min())
    ends = list(dict.fromkeys(map(text.percent, (low, high))))  # one where no printed digit tells them apart
    sentence = f"final test accuracy {'is' if len(ends) == 1 else 'lies between'} {' and '.join(ends)}"
    if spread.height:
        apart = 100 * float(spread["spread"].max())  # type: ignore[arg-type]
        gap = f"differ by at most {apart:.2g} percentage points" if apart else "end exactly alike"
        sentence += f"; with equal seeds, configurations {gap}"
    return sentence


accuracy = Lines(
    order=4,
    title="Accuracy against epoch",
    rows=lambda runs: _learned(runs, "accuracy").with_columns(pl.col("value") * 100),
    x=_EPOCH,
    y=Axis("linear", "Accuracy (%)"),
    finding=lambda runs: (
        per_group(learned(runs).drop_nulls("final_test_accuracy"), _spread, every=True) or "No run trained to its end."
    ),
)


def loss_label(configs: Iterable[str]) -> str:
    """What the axis shows of runs with these configurations; runs from before there was a choice had cross entropy."""
    losses = (msgspec.json.decode(each, type=_Chosen).loss for each in configs)
    found = {canonical_json(each or LATER_COMPONENTS["loss"]) for each in losses}
    if len(found) > 1:
        return "Loss"
    options: dict[str, Any] = msgspec.json.decode(found.pop())
    if options["_target_"] != LATER_COMPONENTS["loss"]["_target_"]:
        return f"Loss ({options['name']})"
    smoothing = options.get("label_smoothing", 0)
    return f"Loss ({options['name']}, label_smoothing={smoothing})" if smoothing else "Cross entropy (nats)"


class _Chosen(msgspec.Struct):
    """What the axis is labelled by, of a configuration."""

    loss: dict[str, Any] | None = None


def _course(rows: pl.DataFrame) -> str:
    last = pl.col("x").max().over("configuration", "repeat")
    begun, ended = (
        rows.filter(pl.col("x") == epoch).group_by("configuration").agg(pl.col("value").median())["value"]
        for epoch in (1, last)
    )
    of = "" if max(begun.len(), ended.len()) == 1 else ", by configuration"
    return f"median test loss is {_span(begun)} after epoch 1 and {_span(ended)} after the last{of}"


def _span(values: pl.Series) -> str:
    """The least and the largest of some medians; one number where no printed digit tells them apart."""
    ends = (values.min(), values.max())
    return " to ".join(dict.fromkeys(text.number(end) for end in ends if isinstance(end, float))) or text.MISSING


loss = Lines(
    order=5,
    title="Loss against epoch",
    rows=partial(_learned, of="loss"),
    x=_EPOCH,
    y=lambda runs: Axis("zero", loss_label(learned(runs)["config_json"])),
    finding=lambda runs: (
        per_group(_learned(runs, "loss").filter(pl.col("side") == "test"), _course, every=True)
        or "No run trained to its end."
    ),
)


@dataclass(frozen=True)
class Across:
    """A quantity in which otherwise equal runs differ, and the rate that is shown against it."""

    column: str
    roots: tuple[str, ...]
    """The keys of the configuration that differ with it."""
    name: str
    metric: str = RATE
    """Of `per_run`."""
    counted: str = "samples per second"
    follow: tuple[str, ...] = ()
    """Of the keys, those that need not: where they differ at one level, each of their values is a panel of its own."""

    def rates(self, runs: Runs, *also: str) -> pl.DataFrame:
        """The rate in steady state of every displayed run that another differs from in the quantity only.

        Columns: run_id, panel, group, configuration, variant, strategy, devices, repeat, disturbed, x, value, the
        rate's own, and those of `also`.
        """
        wide, narrow = (
            pl.col("run_id").replace_strict(groups_across(runs, keys), return_dtype=pl.String)
            for keys in (self.roots, tuple(key for key in self.roots if key not in self.follow))
        )
        rows = measured(runs, self.metric, *also, x=pl.col(self.column), panel=wide, narrow=narrow)
        unlike = pl.col("group").n_unique().over("panel", "configuration", "x") > 1
        rows = rows.with_columns(panel=pl.when(unlike.any().over("panel")).then("narrow").otherwise("panel"))
        several = pl.col("x").n_unique().over("panel", "configuration") > 1
        return (
            rows.drop("narrow")
            .drop_nulls((self.metric, "x"))
            .filter(several)
            .sort(natural("panel"), "devices", "configuration", "x", "repeat", maintain_order=True)
        )

    def finding(self, runs: Runs) -> str:
        """How the rate changes from the smallest to the largest level, per configuration; repeats are paired."""
        nothing = f"No two runs that count differ in {self.name.lower()} only."
        undisturbed = self.rates(runs).filter(~pl.col("disturbed"))
        compared = undisturbed.filter(pl.col("x").n_unique().over("panel", "configuration") > 1)
        pairings = {
            (work, configuration): _smallest_and_largest(runs, members)
            for (work, configuration), members in compared.group_by("panel", "configuration", maintain_order=True)
        }
        ratios = {key: ratio for key, pairing in pairings.items() if (ratio := pairing.ratio(self.metric))}
        told = per_group(compared, partial(_changes, self, pairings), by="panel") or nothing
        several = compared["panel"].n_unique() > 1
        notes = (
            caveat.about(Subject(str(configuration), str(work) if several else ""))
            for work, configuration in ratios
            for caveat in pairings[work, configuration].caveats()
            if caveat.code in BESIDE_SPEED_UPS
        )
        return "\n".join([told, *write(notes, of=len(ratios))])


def _changes(across: Across, pairings: Mapping[tuple[Any, Any], Pairing], rows: pl.DataFrame) -> str:
    # Not all need have been measured over the same levels: the largest batch may not have fitted all.
    shown: dict[tuple[int, int], list[str]] = defaultdict(list)
    refused = []
    for (work, configuration), members in rows.group_by("panel", "configuration", maintain_order=True):
        pairing = pairings[work, configuration]
        refused += [f"{configuration} is not compared: {issue}" for issue in pairing.blockers()]
        if ratio := pairing.ratio(across.metric):
            ends = members.select(low=pl.col("x").min(), high=pl.col("x").max()).row(0)
            shown[ends].append(f"{_gain(ratio)} with {configuration}")
    steps = [
        f"from {across.name.lower()} {low:,} to {high:,}, {across.counted} are {text.listed(gains, most=4)}"
        for (low, high), gains in shown.items()
    ]
    return "; ".join([*steps, *refused])


def _gain(ratio: Ratio) -> str:
    why = f" ({SpeedVerdict.NOT_INTERLEAVED})" if ratio.is_apart else ""
    told = why if ratio.low is None or ratio.high is None else f" ({text.ends(ratio.low, ratio.high)})"
    return f"{text.estimate(ratio.median, ratio.low, ratio.high)} times as many{told}"


def _smallest_and_largest(runs: Runs, rows: pl.DataFrame) -> Pairing:
    """The runs of one configuration at its smallest level, paired with those at its largest."""
    x, known = pl.col("x"), compared_runs(runs)
    small, large = ([known[run_id] for run_id in rows.filter(x == end)["run_id"]] for end in (x.min(), x.max()))
    return paired(small, large)


def against(
    across: Across,
    *,
    order: int,
    title: str,
    y: str,
    rows: Callable[[Runs], pl.DataFrame] | None = None,
    **options: Any,
) -> Lines:
    """A figure of the rate against the quantity, or of what else `rows` has; `options` of `Lines`."""
    return Lines(
        order=order,
        title=title,
        rows=rows or across.rates,
        x=Axis("doubling", across.name),
        y=Axis("zero", y),
        own_axes=True,
        finding=across.finding,
        **options,
    )


SAMPLES_PER_S = "Samples per second, steady state"
_BATCH = Across("batch_size", ("batch_size",), "Batch size")
throughput_batch = against(_BATCH, order=11, title="Throughput against batch size", y=SAMPLES_PER_S)
# A sweep of lengths may keep the tokens of a step, and so change how many samples it has.
_LENGTH = Across(
    "tokens_per_sample",
    ("data.sequence", "model.sequence", "data.train_samples", "batch_size"),
    "Tokens per sample",
    follow=("data.train_samples", "batch_size"),
    metric="tokens_per_s",
    counted="tokens per second",
)


def _time_and_memory(runs: Runs) -> pl.DataFrame:
    """Time per token, and memory of the fullest device."""
    rows = _LENGTH.rates(runs, "memory_kind", "peak_memory_device_bytes").drop("value")
    time_us, memory_mib = 1e6 / pl.col("tokens_per_s"), pl.col("peak_memory_device_bytes") / text.MIB
    whose = pl.when(pl.col("memory_kind") == "device").then(pl.lit("device")).otherwise(pl.lit("process"))
    memory = pl.format("{}, largest {} (MiB)", pl.col("memory_kind").replace_strict(MEMORY, default=None), whose)
    data = pl.concat(
        [
            rows.with_columns(value=time_us, time_per_token_us=time_us, what=pl.lit("Time per token (µs)")),
            rows.with_columns(value=memory_mib, memory_mib=memory_mib, what=memory).drop_nulls(("what", "memory_mib")),
        ],
        how="diagonal",
    )
    data = data.with_columns(panel=pl.format(f"{{}}{BETWEEN}{{}}", "panel", "what"))
    return data.drop("what", "memory_kind", "peak_memory_device_bytes", "tokens_per_s")


context_length = against(
    _LENGTH,
    order=14,
    title="Time per token and memory against the length of the context",
    rows=_time_and_memory,
    y="In the unit of the panel",
)
