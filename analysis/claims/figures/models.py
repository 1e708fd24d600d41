"""Training time and memory by model: figures 6 and 9 of publication 000 (docs/experiments.md)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from analysis import text
from analysis.claims.figures import is_reproduction
from analysis.comparison.baseline import BESIDE_SPEED_UPS, limits, refusals
from analysis.comparison.campaign import campaign
from analysis.comparison.notes import write
from analysis.comparison.summary import displayed
from analysis.comparison.work import component_labels, groups_across, natural
from analysis.figures.chart import (
    HOLLOW,
    LEGEND,
    MEMORY,
    NAMES,
    PANEL_WIDTH,
    Own,
    panels,
    records,
    rests_on_disturbed,
    series,
    tabulated,
    with_medians,
    with_words,
)
from analysis.figures.finding import per_group
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs


@once
def _measured(runs: Runs) -> pl.DataFrame:
    """The runs that count whose work others do with another model: `work`, without the model, `model`, with the options
    that tell it from others of its name, and the columns of `facts`, the smallest model first.
    """
    works, names = groups_across(runs, ("model",)), component_labels(runs, "model")
    rows = displayed(runs).with_columns(
        work=pl.col("run_id").replace_strict(works, return_dtype=pl.String),
        model=pl.col("run_id").replace_strict(names, return_dtype=pl.String),
    )
    several = pl.col("model").n_unique().over("work") > 1
    return rows.filter(several).sort(natural("work"), "parameters", "model", maintain_order=True)


def _times_and_memory(runs: Runs) -> pl.DataFrame:
    """None where all runs of like work have the same model."""
    rows = _measured(runs)
    names = ("work", "model", *NAMES)
    time_s, memory_mib = pl.col("total_training_time_s"), pl.col("peak_memory_sum_bytes") / text.MIB
    memory = pl.format("{}, sum of all processes (MiB)", pl.col("memory_kind").replace_strict(MEMORY, default=None))
    data = pl.concat(
        [
            rows.with_columns(disturbed=rests_on_disturbed(runs, "total_training_time_s")).select(
                *names, time_s, value=time_s, title=pl.lit("Training time, all epochs (s)")
            ),
            rows.select(*names, peak_memory_sum_mib=memory_mib, value=memory_mib, title=memory),
        ],
        how="diagonal",
    ).drop_nulls("value")
    panel = pl.format("{} — {}", "work", "title") if data["work"].n_unique() > 1 else pl.col("title")
    return data.with_columns(panel=panel).sort(natural("work"), maintain_order=True)


_SHAPES = ("circle", "triangle-up", "square", "diamond", "cross", "triangle-down")
"""By number of devices, the fewest first: configurations of one variant have one colour."""


def _shapes(data: pl.DataFrame, legend: alt.Legend) -> alt.Shape:
    of = dict(data.select("configuration", "devices").unique(maintain_order=True).rows())
    levels = sorted(set(of.values()))
    shapes = [_SHAPES[levels.index(devices) % len(_SHAPES)] for devices in of.values()]
    return alt.Shape("configuration:N", scale=alt.Scale(domain=list(of), range=shapes), legend=legend)


def _draw(data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
    """A row per model, a colour per configuration: medians over repeats, every repeat as a small point."""
    data = with_medians(data, ("panel", "configuration", "model"))
    data = with_words(data, ("model", "model"), ("value", "value"))
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height={"step": 44})
    models = list(data["model"].unique(maintain_order=True))
    y = alt.Y("model:N", sort=models, title=None, axis=alt.Axis(grid=True, domain=False, ticks=False, labelPadding=8))
    scale = alt.Scale(type="log", nice=False, padding=14)
    legend = LEGEND.copy()
    legend.symbolType, legend.symbolSize = alt.Undefined, 110
    shape, colour = _shapes(data, legend), series(data, runs)["color"].legend(legend)  # one legend for both
    median = base.transform_filter("datum.first").mark_point(filled=True, size=110, opacity=0.9)
    median = median.encode(
        x=alt.X("median:Q", title="Logarithmic scale", scale=scale, axis=alt.Axis(tickCount=5, format=",.4~g")),
        y=y,
        color=colour,
        shape=shape,
        description=alt.Description("words_of_median:N"),
    )
    repeat = base.mark_point(filled=True, size=16, strokeOpacity=0.5, strokeWidth=0.8)
    repeat = repeat.encode(
        fillOpacity=HOLLOW,
        x=alt.X("value:Q", scale=scale),
        y=y,
        color=colour,
        description=alt.Description("words:N"),
    )
    return panels(alt.layer(repeat, median), data, own_axes=True)


def _finding(runs: Runs) -> str:
    """How fast each configuration trains, and what memory it takes, beside one device: its two extreme models."""
    measured = (
        _measured(runs)
        .select("work", "group", "configuration", "configuration_place", "model")
        .unique(maintain_order=True)
    )
    speeds = per_group(measured, partial(_speeds, runs), by="work")
    notes = [*refusals(runs), *(limits(runs, BESIDE_SPEED_UPS) if speeds else ())]
    lines = [*filter(None, [speeds]), *write(notes, brief=True)]
    return "\n".join(lines) or "No two runs that count differ in the model only, beside one device."


def _speeds(runs: Runs, rows: pl.DataFrame) -> str:
    """Each framework has its own configuration on one device."""
    shown = []
    for (configuration,), members in rows.group_by("configuration", maintain_order=True):
        speed = _against_one_device(runs, members)
        memory = _against_one_device(runs, members, "peak_memory_sum_bytes")
        if speed:
            taking = f" and takes {_ends(memory)} times the memory" if memory else ""
            shown.append(f"{configuration} is {_ends(speed)} times as fast{taking}")
    return f"once warm, beside one device of its framework, {text.listed(shown, sep='; ')}" if shown else ""


def _against_one_device(runs: Runs, rows: pl.DataFrame, metric: str | None = None) -> list[tuple[Ratio, str]]:
    """The paired ratio of the metric to one device's (None: the speed-up), and the model; in ascending order."""
    found = campaign(runs)
    pairs = (
        (found.configurations[place], model) for place, model in rows.select("configuration_place", "model").rows()
    )
    beside = ((each, found.one_device_of(each), model) for each, model in pairs)
    of_models = [(found.pair(one, each), model) for each, one, model in beside if one is not None and one is not each]
    ratios = [(pairing.speed_up() if metric is None else pairing.ratio(metric), model) for pairing, model in of_models]
    known = [(ratio, model) for ratio, model in ratios if ratio]
    return sorted(known, key=lambda pair: (pair[0].median, pair[1]))


def _ends(ratios: list[tuple[Ratio, str]]) -> str:
    """The smallest and the largest ratio, with their intervals and models; of several that are written alike, one."""
    ends = [(text.interval(ratio.median, ratio.low, ratio.high), model) for ratio, model in (ratios[0], ratios[-1])]
    if len(ratios) > 1 and len(dict(ends)) == 1:
        return ends[0][0]
    return " to ".join(dict.fromkeys(f"{figure} [{model}]" for figure, model in ends))


models = Own(
    order=11,
    title="Training time and memory by model",
    rows=_times_and_memory,
    drawn_for=is_reproduction,
    draw=_draw,
    tabulate=lambda data: tabulated(data, "median", by={"model": "model"}),
    finding=_finding,
)
