"""Figures of lines: over epochs, over a quantity in which otherwise equal runs differ, and over devices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import altair as alt
import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import LIMITS
from analysis.comparison.configurations import displayed, has_disturbed, learned, learning
from analysis.comparison.issues import said_once
from analysis.comparison.pairing import Pairing, paired
from analysis.comparison.run import compared_runs
from analysis.comparison.sides import RATE
from analysis.comparison.verdict import of_speed
from analysis.comparison.work import IS_BASELINE, groups_across, natural
from analysis.figures.chart import (
    BETWEEN,
    HOLLOW,
    INK,
    LEGEND,
    NAMES,
    PANEL_WIDTH,
    Chart,
    Sentence,
    doubling,
    lines_of,
    panel,
    panels,
    per_group,
    records,
    scale,
    series,
    tips,
    variant_dashes,
    variants,
    with_medians,
)
from analysis.metrics.epochs import AS_TEXT, numbered_epochs
from parallelbench.config.build import LATER_COMPONENTS
from parallelbench.config.identity import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Lines of medians over repeats, every repeat as a point; a line per configuration.

    `rows` has the columns panel, configuration, variant, strategy, repeat, x and value.
    """

    x: alt.X | Callable[[pl.DataFrame], alt.X]
    """The axis, or what makes it from the rows."""
    y: alt.Y | Callable[[Runs], alt.Y]
    own_axes: bool = False
    """Each panel has its own: beside a small model's rates, a large one's would lie flat on the ground."""

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """All panels have the same axes, if not `own_axes`."""
        x, y = self.x(data) if callable(self.x) else self.x, self.y(runs) if callable(self.y) else self.y
        data = with_medians(data, ("panel", "configuration", "x"))
        key: dict[str, Any] = series(data, runs)
        base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=240)
        line = base.transform_filter("datum.first").mark_line(strokeWidth=2.2).encode(x=x, y=y, **key)
        y = y.copy()
        y.shorthand = "value:Q"
        tooltip = [
            *tips("configuration:N", "repeat:N"),
            alt.Tooltip("x:Q", title=x["title"]),
            alt.Tooltip("value:Q", title=y["title"], format=".4~g"),
        ]
        dots = base.mark_point(filled=True, size=26, strokeOpacity=0.45, strokeWidth=0.8)
        points = dots.encode(x=x, y=y, color=key["color"], tooltip=tooltip, fillOpacity=HOLLOW)
        return panels(alt.layer(line, points), data, own_axes=self.own_axes)


_SIDES = pl.col("side").replace({"test": "Test set", "training": "Training set, while training"})
_WHOLE: Any = {"condition": {"test": "datum.value % 1 != 0", "value": 0}, "value": 1}
_EPOCHS = alt.Axis(
    tickMinStep=1,
    format="d",
    labelFlush=False,
    labelExpr="datum.value % 1 != 0 ? '' : datum.label",
    tickOpacity=_WHOLE,
    gridOpacity=_WHOLE,
)
"""Ticks at whole epochs: vega takes `tickMinStep` for a wish, and makes halves of few epochs."""
_EPOCH = alt.X("x:Q", title="Epoch", axis=_EPOCHS, scale=alt.Scale(nice=False, padding=8))


def _learned(runs: Runs, of: str) -> pl.DataFrame:
    return panel(learning(runs, test=f"test_{of}", training=f"train_{of}"), _SIDES)


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
    y=alt.Y("median:Q", title="Accuracy (%)", scale=alt.Scale(zero=False)),
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
    y=lambda runs: alt.Y("median:Q", title=loss_label(learned(runs)["config_json"]), scale=alt.Scale(nice=True)),
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
        rows = displayed(runs).select(
            "run_id",
            *NAMES,
            self.metric,
            *also,
            x=pl.col(self.column),
            value=pl.col(self.metric),
            panel=wide,
            narrow=narrow,
        )
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
        caveats = (
            (f"{configuration} ({work})" if several else str(configuration), caveat)
            for work, configuration in ratios
            for caveat in pairings[work, configuration].caveats()
            if caveat.kind in LIMITS
        )
        return "\n".join([told, *said_once(caveats, of=len(ratios))])


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
    why = f" ({of_speed(ratio)})" if ratio.is_apart else ""
    told = why if ratio.low is None or ratio.high is None else f" ({text.ends(ratio.low, ratio.high)})"
    return f"{text.estimate(ratio.median, ratio.low, ratio.high)} times as many{told}"


def _smallest_and_largest(runs: Runs, rows: pl.DataFrame) -> Pairing:
    """The runs of one configuration at its smallest level, paired with those at its largest."""
    x, known = pl.col("x"), compared_runs(runs)
    small, large = ([known[run_id] for run_id in rows.filter(x == end)["run_id"]] for end in (x.min(), x.max()))
    return paired(small, large)


def _against(
    across: Across, *, order: int, title: str, rows: Callable[[Runs], pl.DataFrame] | None = None, y: str
) -> Lines:
    """A figure of the rate against the quantity, or of what else `rows` has."""
    return Lines(
        order=order,
        title=title,
        rows=rows or across.rates,
        x=partial(doubling, title=across.name),
        y=alt.Y("median:Q", title=y, scale=alt.Scale(domainMin=0)),
        own_axes=True,
        finding=across.finding,
    )


_RATE = "Samples per second, steady state"
_BATCH = Across("batch_size", ("batch_size",), "Batch size")
_SAMPLES = Across("train_samples", ("data.copies", "data.train_samples"), "Training samples")
throughput_batch = _against(_BATCH, order=11, title="Throughput against batch size", y=_RATE)
throughput_data = _against(_SAMPLES, order=12, title="Throughput against the size of the training set", y=_RATE)
"""Figures 5b and 5e of publication 003."""
# A sweep of lengths may keep the tokens of a step, and so change how many samples it has.
_LENGTH = Across(
    "tokens_per_sample",
    ("data.sequence", "model.sequence", "data.train_samples", "batch_size"),
    "Tokens per sample",
    follow=("data.train_samples", "batch_size"),
    metric="tokens_per_s",
    counted="tokens per second",
)
_MEMORY = {"host": "host memory of the largest process, MiB", "device": "memory of the largest device, MiB"}


def _time_and_memory(runs: Runs) -> pl.DataFrame:
    """Time per token, and memory of the fullest device."""
    rows = _LENGTH.rates(runs, "memory_kind", "peak_memory_device_bytes").drop("value")
    time_us, memory_mib = 1e6 / pl.col("tokens_per_s"), pl.col("peak_memory_device_bytes") / text.MIB
    memory = pl.col("memory_kind").replace_strict(_MEMORY, default=None)
    data = pl.concat(
        [
            rows.with_columns(value=time_us, time_per_token_us=time_us, what=pl.lit("time per token, µs")),
            rows.with_columns(value=memory_mib, memory_mib=memory_mib, what=memory).drop_nulls(("what", "memory_mib")),
        ],
        how="diagonal",
    )
    data = data.with_columns(panel=pl.format(f"{{}}{BETWEEN}{{}}", "panel", "what"))
    return data.drop("what", "memory_kind", "peak_memory_device_bytes", "tokens_per_s")


context_length = _against(
    _LENGTH,
    order=14,
    title="Time per token and memory against the length of the context",
    rows=_time_and_memory,
    y="In the unit of the panel",
)


_LINEAR_UP_TO = 8
"""Most devices with a linear axis; with more, it is logarithmic."""
_ROOM_BESIDE, _ROOM_FOR_WORDS = 0.1, 0.5
"""Room beside the lines, as a share of their width: for points, and for the words where lines begin."""


@dataclass(frozen=True, kw_only=True)
class OverDevices(Chart):
    """A line of medians per variant and value of the column `by`, every repeat as a point; each panel has its own axes.

    `rows` has the columns group, panel, configuration, variant, strategy, devices, framework, repeat, disturbed, `by`
    and value.
    """

    by: str
    unit: str
    widths: Mapping[str, float] | None = None
    """Of the lines, by the values of `by`; None: those values are written where lines begin."""

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """Lines without a run on one device begin at their framework's baseline."""
        by, widths, data = self.by, self.widths, lines_of(data)
        devices = sorted(set(data["devices"]) | {1})
        colour = alt.Color("variant:N", scale=scale(variants(data, runs)), legend=LEGEND)
        dash = alt.StrokeDash("variant:N", scale=scale(variant_dashes(data, runs)), legend=LEGEND)
        data = _with_origins(with_medians(data, ("panel", by, "variant", "devices")), by)
        across = _across(devices, room=_ROOM_BESIDE if widths else _ROOM_FOR_WORDS)
        x = alt.X("devices:Q", title="Devices", scale=across, axis=alt.Axis(values=devices, format="d", grid=False))
        y = alt.Y("median:Q", title=self.unit, scale=alt.Scale(domainMin=0), axis=alt.Axis(titleColor=INK, tickCount=6))
        base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=260)
        line = base.transform_filter("datum.first").mark_line()
        line = line.encode(x=x, y=y, color=colour, strokeDash=dash, **_told_apart(by, widths))
        tooltip = [*tips("configuration:N", f"{by}:N", "repeat:N"), alt.Tooltip("value:Q", format=".4~g")]
        dots = base.transform_filter("datum.repeat != null").mark_point(filled=True, size=30, strokeWidth=0.8)
        dots = dots.encode(x=x, y=alt.Y("value:Q"), color=colour, fillOpacity=HOLLOW, tooltip=tooltip)
        marks = [line, dots] if widths else [line, dots, _beginnings(base, x)]
        return panels(alt.layer(*marks), data, own_axes=True)


def _told_apart(by: str, widths: Mapping[str, float] | None) -> dict[str, Any]:
    if widths is None:
        return {"detail": f"{by}:N", "strokeWidth": alt.value(2.2)}
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=500, symbolStrokeColor=INK)
    return {"strokeWidth": alt.StrokeWidth(f"{by}:O", scale=scale(widths), legend=legend)}


def _beginnings(base: alt.Chart, x: alt.X) -> alt.Chart:
    """The column `label` to the left of where lines begin."""
    named = base.transform_filter("datum.label != null")
    words: alt.Chart = named.mark_text(align="right", dx=-8, fontSize=12, color=INK)
    placed: alt.Chart = words.encode(x=x, y=alt.Y("median:Q"), text=alt.Text("label:N"))
    return placed


def _with_origins(data: pl.DataFrame, by: str) -> pl.DataFrame:
    """Add the starts of lines without a run on one device: the median of their framework's baseline in that work.

    These rows are of no configuration and no repeat. A `label` is on the row in which the highest line of each value of
    `by` begins.
    """
    keys = ["panel", "framework", by]
    # With several sets of options, lines begin at their own first point: the table says which set each is held against.
    beginning = data.filter(IS_BASELINE & pl.col("first")).unique(keys, keep="none").select(*keys, "median")
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


FIRST, SECOND = "First epoch", "Second epoch"


def _epoch_rates(runs: Runs) -> pl.DataFrame:
    """A row per displayed run and epoch, of the first two, in works that were measured on several numbers of devices;
    none where no run has a second epoch. `which` is the first or the second epoch.
    """
    marked = {f"disturbed_{which}": has_disturbed(f"{which}_epoch_time_s") for which in ("first", "second")}
    rows = displayed(runs).select("run_id", *NAMES, pl.col("framework").fill_null("torch"), panel="group", **marked)
    rows = rows.filter(pl.col("devices").n_unique().over("group") > 1)
    epoch, warm = pl.col("epoch"), ~pl.col("warm_up")
    which = pl.when(epoch == 2, warm).then(pl.lit(SECOND)).when(epoch == 1, ~warm).then(pl.lit(FIRST))
    rate = "epoch_throughput_samples_per_s"
    epochs = numbered_epochs(runs).select("run_id", "epoch", "warm_up", rate).filter(epoch <= 2)
    epochs = epochs.select(AS_TEXT, rate, which=which, value=rate).drop_nulls()
    joined = rows.join(epochs, on="run_id", maintain_order="left_right")
    own = pl.when(pl.col("which") == SECOND).then("disturbed_second").otherwise("disturbed_first")
    joined = joined.with_columns(disturbed=pl.col("disturbed") | own).drop("run_id", *marked)
    joined = joined.filter((pl.col("which") == SECOND).any())
    return joined.sort(natural("group"), pl.col("which") != SECOND, maintain_order=True)


def _first_and_second(runs: Runs) -> pl.DataFrame:
    rate, which = pl.col("value"), pl.col("which")
    return (
        _epoch_rates(runs)
        .group_by("group", "configuration", maintain_order=True)
        .agg(
            pl.col("disturbed").any(),
            first=rate.filter(which == FIRST).median(),
            second=rate.filter(which == SECOND).median(),
        )
    )


epoch_rates = OverDevices(  # figures 5a and 5d of publication 003
    order=3,
    title="Samples per second of the first and the second epoch",
    rows=_epoch_rates,
    by="which",
    unit="Samples per second",
    widths={SECOND: 2.6, FIRST: 0.9},
    finding=Sentence(
        rows=_first_and_second,
        by="second",
        descending=True,
        each=lambda row: (
            f"{text.number(row['second'])} with {row['configuration']} (first epoch: {text.number(row['first'])})"
        ),
        whole="in the second epoch, samples per second are {}",
        nothing="No kind of work that counts has a second epoch on several numbers of devices.",
    ),
)


def _second_epochs(runs: Runs) -> pl.DataFrame:
    """A row per displayed run of works that differ in the size of the training set only, and were measured on several
    numbers of devices.
    """
    works = groups_across(runs, _SAMPLES.roots)
    rows = (
        displayed(runs)
        .with_columns(disturbed=pl.col("disturbed") | has_disturbed("second_epoch_time_s"))
        .select(
            pl.col("run_id").replace_strict(works, return_dtype=pl.String).alias("panel"),
            *NAMES,
            pl.col("framework").fill_null("torch"),  # results of before there were others have none
            "train_samples",
            "second_epoch_time_s",
            value="second_epoch_time_s",
        )
    )
    several = [pl.col(name).n_unique().over("panel") > 1 for name in ("train_samples", "devices")]
    rows = rows.drop_nulls("value").filter(*several)
    return rows.sort(natural("panel"), "train_samples", maintain_order=True)


def _smallest_and_largest_set(runs: Runs) -> pl.DataFrame:
    """The second epoch's time with either, per configuration that was measured with both."""
    size, time = pl.col("train_samples"), pl.col("value")
    ends = (
        _second_epochs(runs)
        .group_by("panel", "configuration", maintain_order=True)
        .agg(
            pl.col("group").first(),
            pl.col("disturbed").any(),
            small=size.min(),
            large=size.max(),
            of_small=time.filter(size == size.min()).median(),
            of_large=time.filter(size == size.max()).median(),
        )
    )
    return ends.filter(pl.col("small") < pl.col("large"))


# What devices save shows beside what they save of a smaller set.
epoch_time_data = OverDevices(  # figure 5c of publication 003
    order=12,
    title="Second epoch by devices and size of the training set",
    rows=_second_epochs,
    by="train_samples",
    unit="Second epoch (s); samples beside the lines",
    finding=Sentence(
        rows=_smallest_and_largest_set,
        by="of_large",
        each=lambda row: (
            f"{text.number(row['of_small'])} to {text.seconds(row['of_large'])} with {row['configuration']} "
            f"({row['small']:,} to {row['large']:,} samples)"
        ),
        whole="a second epoch takes {}",
        group="panel",
        nothing="No kind of work that counts has a second epoch of several sizes of the training set.",
    ),
)
