"""Figures of horizontal bars: a bar per configuration, in panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import altair as alt
import polars as pl

from analysis import text
from analysis.comparison.baseline import in_words
from analysis.comparison.issues import is_comparable_energy, is_quotable
from analysis.comparison.notes import write
from analysis.comparison.summary import displayed, gains, summary, unreached
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import natural
from analysis.figures.chart import (
    MEDIAN,
    MEMORY,
    NAMES,
    PANEL_WIDTH,
    RATIO_MEDIAN,
    REPEATED,
    Chart,
    are_too_many,
    bar_colour,
    label_marks,
    mark,
    measured,
    names_axis,
    pale,
    panel,
    panels,
    records,
    shown,
    tabulated,
    with_medians,
    with_words,
    written,
)
from analysis.figures.finding import Sentence
from analysis.figures.scaling import over_baseline
from analysis.metrics.runs import measured_bubbles, ring_times

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.runs.reader import Runs


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Bars of medians over repeats, every repeat as a point, and a line at `goal` where that is known.

    `rows` has the columns of `REPEATED` (value null: no bar). A bar is pale where any of its repeats is disturbed.
    """

    unit: str
    label: pl.Expr
    """The text beside a bar, from its `median`."""
    goal: str | None = None
    """A column."""
    goal_unit: str = ""
    """What the axis says of the line besides."""
    room: float = 1.22
    """The axis is so many times as long as needed, for the text."""
    scale: str = "group"
    """Column: rows with the same value of it share a scale."""
    median: pl.Expr = MEDIAN
    """Over the repeats of `value`."""
    NEEDED: ClassVar[tuple[str, ...]] = REPEATED

    def prepared(self, data: pl.DataFrame) -> pl.DataFrame:
        """Mark the bars that rest on a disturbed repeat."""
        return data.with_columns(pl.col("disturbed").any().over("panel", "configuration"))

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """Panels of one `scale` share it; those of other work have their own."""
        goal = self.goal if self.goal is not None and data[self.goal].count() else None
        unit = self.unit + (self.goal_unit if goal else "")
        data = self._with_medians(data)
        ends = pl.max_horizontal("high", goal, 0) if goal else pl.col("high")
        room = ends.max().over(self.scale) * self.room
        data = data.with_columns(label=self.label + mark(data), end=ends, room=room)
        data = with_words(data, ("value", unit))
        y = names_axis(data)
        base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 34})
        only_first, known = base.transform_filter("datum.first"), base.transform_filter("datum.value != null")
        bar = only_first.transform_filter("datum.median != null").mark_bar(height={"band": 0.68})
        bar = bar.encode(
            opacity=pale(0.85),
            x=alt.X("median:Q", title=unit, axis=alt.Axis(tickCount=5)),
            y=y,
            color=bar_colour(data, runs),
            description=alt.Description("words_of_median:N"),
        )
        points = known.mark_point(filled=True, size=34, color="black", opacity=0.75, stroke="white", strokeWidth=0.8)
        points = points.encode(x=alt.X("value:Q"), y=y, description=alt.Description("words:N"))
        marks = [bar, points, *label_marks(only_first, y, at="end")]
        if goal:
            marks.insert(1, _line(only_first, goal).encode(x=alt.X(f"{goal}:Q", title=unit), y=y))
        return panels(alt.layer(*marks), data, own_axes=True)

    def _with_medians(self, data: pl.DataFrame) -> pl.DataFrame:
        """Of very many repeats, a point at the median stands for all; its `repeat` says so."""
        data = with_medians(data, ("panel", "configuration"), self.median)
        if not are_too_many(shown(data).height):
            return data
        repeat = pl.format("median of {}", pl.len().over("panel", "configuration"))
        return data.with_columns(value=pl.col("median"), repeat=repeat).filter("first")

    def table(self, data: pl.DataFrame, runs: Runs) -> pl.DataFrame:
        """As `tabulated`, with the column `goal`."""
        goal = [pl.col(self.goal).first()] if self.goal is not None and data[self.goal].count() else []
        return tabulated(data, self.unit, *goal, median=self.median)


def _line(rows: alt.Chart, goal: str) -> alt.Chart:
    """A line at each value of the column `goal`."""
    line: alt.Chart = rows.transform_filter(f"datum.{goal} != null").mark_tick(
        color="black", thickness=3, opacity=1, height={"band": 0.95}, aria=False
    )
    return line


def _measured(*also: str | pl.Expr, **labels: str | pl.Expr) -> Callable[[Runs], pl.DataFrame]:
    """What bars need of every displayed run: a row per column that it has measured, in the panel of the column's label;
    and columns `also` of each row.
    """
    of_some = ("memory_kind", "accuracy_target", "theoretical_state_bytes", *also)

    def rows(runs: Runs) -> pl.DataFrame:
        parts = [panel(measured(runs, name, *of_some), label) for name, label in labels.items()]
        return pl.concat(parts, how="diagonal").sort(natural("group"), maintain_order=True)

    return rows


runtime = Bars(
    order=1,
    title="Time per epoch by strategy and device count",
    rows=_measured(steady_epoch_time_s="Later epochs (median)", first_epoch_time_s="First epoch"),
    unit="Time per epoch, slowest rank (s)",
    label=written(text.seconds, "median"),
    finding=Sentence(
        by="steady_epoch_time_s",
        each=lambda row: f"{row['configuration']} takes {text.seconds(row['steady_epoch_time_s'])}",
        whole="once warm, an epoch of {}",
        sep=", ",
        nothing="No run that counts has a second epoch: nothing is known about a steady state.",
    ),
)


_DEVICE, _PROCESS = "largest device", "largest process"
_UNKNOWN = "largest process, several devices each"


def _peaks(runs: Runs) -> pl.DataFrame:
    """Peak memory in MiB: of the largest device, or of the largest process where its devices are not known; of all
    processes together; and by formula, which is about one device, without libraries.
    """
    device_bytes = pl.col("peak_memory_device_bytes")
    of_device, kind = pl.col("memory_kind") == "device", pl.col("memory_kind").replace(MEMORY)
    # On CPUs a device is a process, which holds more of libraries than of a model.
    largest, process = (
        pl.when(of_device).then(pl.lit(label)).otherwise(pl.lit(_PROCESS)) for label in (_DEVICE, _UNKNOWN)
    )
    whose = {
        "peak_memory_device_bytes": largest,
        "peak_memory_max_bytes": process,
        "peak_memory_sum_bytes": pl.lit("sum of all processes"),
    }
    labels = {name: pl.format("{}, {}", kind, label) for name, label in whose.items()}
    data = _measured(device_bytes.is_not_null().alias("known"), **labels)(runs)
    if data.is_empty():
        return data
    data = data.filter(pl.col("peak_memory_max_bytes").is_null() | ~pl.col("known")).drop("known")
    formula = pl.when(of_device, device_bytes.is_not_null()).then(pl.col("theoretical_state_bytes") / text.MIB)
    return data.with_columns(pl.col(*whose, "value") / text.MIB, formula=formula)


def _taken(row: dict[str, Any]) -> str:
    whole = f"{text.mebibytes(row['peak_memory_sum_bytes'])} MiB over all its processes"
    states = row["theoretical_state_bytes"]
    if row["memory_kind"] == "device" and states is not None:
        whole += f"; parameters, gradients and optimizer state by formula {text.sent(states)} MiB"
    if row["memory_kind"] == "device" and row["peak_memory_device_bytes"] is None:
        whole += "; that is the largest process, whose several devices were not measured one by one"
    return f"{text.mebibytes(row['peak'])} MiB with {row['configuration']} ({whole})"


memory = Bars(
    order=3,
    title="Peak memory by strategy and device count",
    rows=_peaks,
    unit="Peak memory (MiB)",
    label=written(lambda peak_mib: text.mebibytes(peak_mib * text.MIB), "median"),
    goal="formula",
    goal_unit=", line: model and optimizer in theory",
    finding=Sentence(
        rows=lambda runs: (
            summary(runs)
            .drop_nulls("peak_memory_max_bytes")
            .with_columns(peak=pl.coalesce("peak_memory_device_bytes", "peak_memory_max_bytes"))
        ),
        by="peak",
        each=_taken,
        whole=lambda rows: f"the {_DEVICE if 'device' in rows['memory_kind'] else _PROCESS} takes {{}}",
        sep=", ",
        nothing="No run that counts measured its memory.",
    ),
)


def _first_to_target(runs: Runs) -> pl.DataFrame:
    """The configurations that reach the target, and whether `disturbed` epochs lie before it."""
    reached = summary(runs).drop_nulls("time_to_accuracy_s")
    marked = pl.col("disturbed") | pl.col("whole_disturbed").fill_null(value=False)
    return reached.with_columns(disturbed=marked, chosen=pl.lit(runs.target is not None))


def _reached(rows: pl.DataFrame) -> str:
    target, chosen = rows.select("accuracy_target", "chosen").row(0)
    most = "the target that was chosen" if chosen else "the highest target that most runs of every configuration reach"
    return f"{text.accuracy(target)} test accuracy in any epoch (the last may lie below it), {most}, is reached by {{}}"


time_to_accuracy = Bars(
    order=6,
    title="Time to accuracy",
    rows=_measured(time_to_accuracy_s=pl.format("To {} test accuracy", written(text.accuracy, "accuracy_target"))),
    unit="Training time to the target (s)",
    label=written(text.seconds, "median"),
    finding=Sentence(
        rows=_first_to_target,
        by="time_to_accuracy_s",
        each=lambda row: f"{row['configuration']} after {text.seconds(row['time_to_accuracy_s'])}",
        whole=_reached,
        sep=", ",
        more=lambda runs: write(unreached(runs)),
        nothing="No target accuracy is reached by all configurations.",
    ),
)


def _shortfalls(runs: Runs) -> pl.DataFrame:
    """1 − efficiency, per pair of repeats, and the measured bubble, both in per cent; and the schedule's `bubble`."""
    planned = summary(runs).drop_nulls("theoretical_bubble")
    # The median speed-up's, which is one of logarithms.
    steady = _over_undivided(runs, over_baseline(gains(runs))).filter(pl.col("kind") == "steady")
    steady = (
        steady.drop_nulls("ideal")
        .with_columns(middle=RATIO_MEDIAN.over("group", "configuration"))
        .select(
            "group", "configuration", "repeat", pl.col("value", "middle").truediv(pl.col("ideal")).mul(-100).add(100)
        )
    )
    columns = ("group", "configuration", "variant", "strategy", "theoretical_bubble")
    rows = planned.select(columns).join(steady, on=["group", "configuration"], how="left", maintain_order="left_right")
    data = panel(rows, "Steady state").with_columns(bubble=100 * pl.col("theoretical_bubble"), disturbed=pl.lit(False))
    idle = _idle(runs).with_columns(middle=MEDIAN.over("group", "configuration"))
    return pl.concat([data, idle.select(data.columns)]).sort(natural("group"), maintain_order=True)


def _over_undivided(runs: Runs, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows whose baseline has no bubble of its own: beside one that idles itself, a shortfall is no schedule's."""
    idling = summary(runs).drop_nulls("theoretical_bubble").select("group", baseline="configuration")
    return rows.join(idling, on=["group", "baseline"], how="anti", maintain_order="left")


def _idle(runs: Runs) -> pl.DataFrame:
    """The bubbles of the runs that were attributed."""
    rows = displayed(runs).drop_nulls("theoretical_bubble").join(measured_bubbles(runs), on="run_id")
    return panel(rows, "Bubble as measured after the last epoch").with_columns(
        value=100 * pl.col("measured_bubble"), bubble=100 * pl.col("theoretical_bubble")
    )


def _beside_bubble(row: dict[str, float | None]) -> str:
    shortfall, bubble = (text.percent(None if value is None else value / 100) for value in row.values())
    return f"{shortfall}, bubble {bubble}"


def _beside_ideal(row: dict[str, Any]) -> str:
    idle = f"(idle by its schedule, were all stages equal: {text.percent(row['theoretical_bubble'])})"
    if row["efficiency"] is None:
        return f"{row['configuration']} is not known {idle}"
    missing = 1 - row["efficiency"]
    what = f"lacks {text.percent(missing)}" if missing >= 0 else f"exceeds it by {text.percent(-missing)}"
    return f"{row['configuration']} {what} {idle}"


def _as_measured(runs: Runs) -> list[str]:
    """The measured bubble, or how to measure it."""
    if not summary(runs)["theoretical_bubble"].count():
        return []
    measured = _idle(runs).group_by("group", "configuration", maintain_order=True)
    rows = measured.agg(pl.col("value", "bubble").median() / 100).rows(named=True)
    if not rows:
        return [
            "Idle time itself was not measured (measure.attribution_steps does): the shortfall also includes "
            "communication, uneven stages and the cost of smaller pieces of work."
        ]
    several = len({row["group"] for row in rows}) > 1
    shown = [
        f"{row['configuration']}{', ' + row['group'] if several else ''} {text.percent(row['value'])} (by formula "
        f"{text.percent(row['bubble'])})"
        for row in rows
    ]
    return [f"Idle share measured after the last epoch, transfers and uneven stages included: {text.listed(shown)}."]


bubble = Bars(
    order=8,
    title="Shortfall from ideal speed-up and the schedule's theoretical bubble",
    rows=_shortfalls,
    unit="Shortfall or bubble (bar) and theoretical bubble (line), %",
    label=written(_beside_bubble, "median", "bubble"),
    median=pl.col("middle").first(),
    goal="bubble",
    room=1.6,
    finding=Sentence(
        rows=lambda runs: _over_undivided(runs, summary(runs).drop_nulls("theoretical_bubble")),
        each=_beside_ideal,
        whole="of the ideal speed-up, {}",
        ranks=False,
        more=_as_measured,
        nothing="No configuration that counts runs by a schedule with a known bubble (pipelines do).",
    ),
)


def _joules(energy_j: float) -> str:
    return f"{text.number(energy_j)} J"


def _cost(row: dict[str, Any]) -> str:
    energy = f"{_joules(row['gpu_energy_per_sample_j'])} with {row['configuration']}"
    if row["energy_ratio"] is None or row["verdict"] == SpeedVerdict.BASELINE:
        return energy
    return f"{energy}, {text.ratio(row, 'energy_ratio')} times that of {in_words(row['baseline'])}"


_energies = _measured(
    "energy_flags",
    gpu_energy_per_epoch_j="An epoch (median of the later ones)",
    energy_to_accuracy_j=pl.format(
        "To the target{}", pl.format(", {} test accuracy", written(text.accuracy, "accuracy_target")).fill_null("")
    ),
)


def _not_quoted(runs: Runs) -> list[str]:
    """The configurations that are not ranked, as their readings are flagged."""
    left = summary(runs).filter(~is_quotable()).drop_nulls("gpu_energy_per_sample_j")["configuration"]
    names = text.listed(left.unique(maintain_order=True).to_list())
    return [f"Not ranked, as their readings are flagged (see the warnings): {names}."] if names else []


energy = Bars(
    order=10,
    title="Energy by strategy and device count",
    rows=lambda runs: _energies(runs).filter(is_comparable_energy()).drop("energy_flags"),
    unit="Energy of all GPUs (J)",
    label=written(_joules, "median"),
    scale="panel",  # an epoch takes a sliver of what the target takes
    finding=Sentence(
        rows=lambda runs: summary(runs).filter(is_quotable()),
        by="gpu_energy_per_sample_j",
        each=_cost,
        whole="a sample costs {}",
        more=_not_quoted,
        nothing="No run that counts measured the energy of its GPUs.",
    ),
)


def _watts(power_w: float) -> str:
    return f"{text.number(power_w)} W"


power = Bars(
    order=10,
    title="Power by strategy and device count",
    rows=_measured(
        steady_gpu_power_mean_w="All GPUs, mean of training windows",
        steady_gpu_power_max_w="Highest sample of one GPU",
    ),
    unit="Power (W)",
    label=written(_watts, "median"),
    finding=Sentence(
        by="steady_gpu_power_mean_w",
        each=lambda row: f"{_watts(row['steady_gpu_power_mean_w'])} with {row['configuration']}",
        whole="the GPUs draw {}",
        nothing="No run that counts measured the power of its GPUs.",
    ),
)


def _with_ring(runs: Runs) -> pl.DataFrame:
    """The counted runs that all-reduce and were attributed, with both times in ms per step."""
    times = ring_times(runs).select("run_id", pl.col("exposed_s", "ring_s") * 1e3)
    rows = displayed(runs).join(times, on="run_id", maintain_order="left")
    ring = pl.col("ring_s").median().over("group", "configuration")
    return panel(rows.select(*NAMES, "exposed_s", value="exposed_s", ring=ring), "After the last epoch")


waiting = Bars(
    order=10,
    title="Exposed communication against the ring's formula",
    rows=_with_ring,
    unit="Waiting (bar) and a ring's time (line) per step (ms)",
    label=written(lambda row: f"{text.number(row['median'])} ms, ring {text.number(row['ring'])}", "median", "ring"),
    goal="ring",
    room=1.6,
    finding=Sentence(
        rows=lambda runs: (
            _with_ring(runs)
            .group_by("group", "configuration", maintain_order=True)
            .agg(pl.col("value", "ring").median())
        ),
        each=lambda row: (
            f"{row['configuration']} waits {text.number(row['value'])} ms (a ring: {text.number(row['ring'])} ms)"
        ),
        whole="per step, computing leaves unhidden: {}",
        sep=", ",
        ranks=False,
        footnote=(
            "Measured after the last epoch, waiting for slower ranks included; a ring's formula for all gradients, "
            "by latency and bandwidth probed on the same ranks."
        ),
        nothing="No run that counts all-reduces and was attributed: measure.attribution_steps=20 measures its waiting.",
    ),
)


def _rate(row: dict[str, Any]) -> str:
    """Tokens per second of a configuration, and what else is known of it."""
    more = [f"MFU {text.percent(row['mfu'])}"] * (row["mfu"] is not None)
    more += [f"perplexity {text.number(row['final_perplexity'])} in the end"] * (row["final_perplexity"] is not None)
    beside = f" ({', '.join(more)})" if more else ""
    return f"{row['configuration']} trains on {text.number(row['tokens_per_s'])} tokens per second{beside}"


def _rates(rows: pl.DataFrame) -> str:
    probed = "; MFU is the share of a device's fastest matrix product, as probed here"
    return "in steady state {}" + (probed if rows["peak_flop_per_s"].count() else "")


_MFU = pl.col("mfu").median().over("panel", "configuration").map_elements(text.percent, return_dtype=pl.String)
token_rates = Bars(
    order=13,
    title="Tokens per second by strategy and device count",
    rows=_measured("mfu", tokens_per_s="Tokens per second"),
    unit="Tokens per second, steady state",
    label=pl.concat_str(written(text.number, "median"), pl.format(" · MFU {}", _MFU).fill_null("")),
    room=1.6,
    finding=Sentence(
        by="tokens_per_s",
        descending=True,
        each=_rate,
        whole=_rates,
        nothing="No run that counts trains on tokens and has a steady state.",
    ),
)


_MILLISECONDS = {
    "step_time_p50_s": "Step, median (ms)",
    "step_time_p95_s": "Step, 95th percentile (ms)",
    "step_time_p99_s": "Step, 99th percentile (ms)",
}
_IMBALANCES = {"rank_imbalance": "Slowest ÷ median rank", "node_imbalance": "Slowest ÷ median node"}
_step_times = _measured(**_MILLISECONDS, **_IMBALANCES)


def _tails(runs: Runs) -> pl.DataFrame:
    """Quantiles of step times in ms, and how much longer the slowest rank and node take than the median one.

    In an epoch all ranks wait for the slowest: a straggler costs every rank its time.
    """
    rows = _step_times(runs)
    if rows.is_empty():
        return rows
    is_time = pl.any_horizontal(pl.col("panel").str.ends_with(label) for label in _MILLISECONDS.values())
    return rows.with_columns(
        value=pl.when(is_time).then(pl.col("value") * 1e3).otherwise("value"),
        scale=pl.when(is_time).then(pl.format("{} ms", "group")).otherwise(pl.format("{} ratio", "panel")),
    )


def _tail(row: dict[str, Any]) -> str:
    p50, p95, p99 = (text.number(1e3 * row[name]) if row[name] else text.MISSING for name in _MILLISECONDS)
    imbalance = row["rank_imbalance"]
    slowest = f"; the slowest rank takes {text.fixed(imbalance, 2)} times the median rank's time" if imbalance else ""
    return f"{row['configuration']} {p50} ms, 95th percentile {p95} ms, 99th {p99} ms{slowest}"


stragglers = Bars(
    order=10,
    title="Stragglers and tails of step times",
    rows=_tails,
    unit="In the unit of the panel",
    label=written(text.number, "median"),
    scale="scale",
    finding=Sentence(
        by="step_time_p99_s",
        each=_tail,
        whole="the median step takes {}",
        ranks=False,
        nothing="No run that counts timed its steps one by one.",
    ),
)
