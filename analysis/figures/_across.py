"""Figures across works: a rate against a quantity in which otherwise equal runs differ."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import altair as alt
import polars as pl

from analysis import text
from analysis.comparison.baseline import LIMITS
from analysis.comparison.configurations import displayed
from analysis.comparison.issues import said_once
from analysis.comparison.pairing import Pairing, paired
from analysis.comparison.ratio import of_several, of_speed
from analysis.comparison.run import compared_runs
from analysis.comparison.sides import RATE
from analysis.comparison.work import groups_across, natural
from analysis.figures._chart import lines, per_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs


class Across(NamedTuple):
    """A quantity: its column, the keys of the configuration that differ with it, and its name; and the rate."""

    column: str
    roots: tuple[str, ...]
    name: str
    metric: str = RATE
    """Of `per_run`."""
    counted: str = "samples per second"


def rates(runs: Runs, across: Across, *also: str) -> pl.DataFrame:
    """The rate in steady state of every displayed run that another differs from in the quantity only.

    Columns: run_id, panel, group, configuration, variant, strategy, devices, repeat, disturbed, x, the rate's own, and
    those of `also`.
    """
    labels = groups_across(runs, across.roots)
    names = ("group", "configuration", "variant", "strategy", "devices", "repeat", "disturbed")
    rows = displayed(runs).select(
        "run_id",
        pl.col("run_id").replace_strict(labels, return_dtype=pl.String).alias("panel"),
        *names,
        across.metric,
        *also,
        x=pl.col(across.column),
    )
    several = pl.col("x").n_unique().over("panel", "configuration") > 1
    return (
        rows.drop_nulls((across.metric, "x"))
        .filter(several)
        .sort(natural("panel"), "devices", "configuration", "x", "repeat")
    )


def figure(runs: Runs, across: Across, *, title: str) -> alt.FacetChart | None:
    """A line per configuration, a panel per group; None where nothing differs in the quantity only.

    Each panel has its own axes: beside a small model's rates, a large one's would lie flat on the ground.
    """
    data = rates(runs, across)
    if data.is_empty():
        return None
    y = alt.Y("median:Q", title=f"{across.counted.capitalize()}, steady state", scale=alt.Scale(domainMin=0))
    return lines(data, columns=[across.metric], title=title, x=doubling(data, across), y=y, own_axes=True)


def doubling(data: pl.DataFrame, across: Across) -> alt.X:
    """The axis of the quantity: as far from each level to its double everywhere."""
    axis = alt.Axis(values=sorted(set(data["x"])), format=",d", grid=False)
    return alt.X("x:Q", title=across.name, scale=alt.Scale(type="log", base=2, padding=12, nice=False), axis=axis)


def finding(runs: Runs, across: Across) -> str:
    """How the rate changes from the smallest to the largest level, per configuration; repeats are paired."""
    nothing = f"No two runs that count differ in {across.name.lower()} only."
    undisturbed = rates(runs, across).filter(~pl.col("disturbed"))
    compared = undisturbed.filter(pl.col("x").n_unique().over("panel", "configuration") > 1)
    pairings = {
        (panel, configuration): _smallest_and_largest(runs, members)
        for (panel, configuration), members in compared.group_by("panel", "configuration", maintain_order=True)
    }
    error = of_several(pairing.ratio(across.metric) for pairing in pairings.values())
    return per_group(compared, partial(_changes, across, pairings, error=error), by="panel") or nothing


def _changes(across: Across, pairings: Mapping[tuple[Any, Any], Pairing], rows: pl.DataFrame, *, error: float) -> str:
    # Not all need have been measured over the same levels: the largest batch may not have fitted all.
    shown: dict[tuple[int, int], list[str]] = defaultdict(list)
    refused, caveats = [], []
    for (panel, configuration), members in rows.group_by("panel", "configuration", maintain_order=True):
        pairing = pairings[panel, configuration]
        refused += [f"{configuration} is not compared: {issue}" for issue in pairing.blockers()]
        if ratio := pairing.ratio(across.metric):
            caveats += [(str(configuration), caveat) for caveat in pairing.caveats() if caveat.kind in LIMITS]
            ends = members.select(low=pl.col("x").min(), high=pl.col("x").max()).row(0)
            shown[ends].append(f"{_gain(ratio.at(error))} with {configuration}")
    steps = [
        f"from {across.name.lower()} {low:,} to {high:,}, {across.counted} are {text.listed(gains, most=4)}"
        for (low, high), gains in shown.items()
    ]
    return "; ".join([*steps, *refused, *(line.removesuffix(".") for line in said_once(caveats))])


def _gain(ratio: Ratio) -> str:
    why = f" ({of_speed(ratio)})" if ratio.is_apart else ""
    told = why if ratio.low is None or ratio.high is None else f" ({text.ends(ratio.low, ratio.high)})"
    return f"{ratio.median:.2f} times as many{told}"


def _smallest_and_largest(runs: Runs, rows: pl.DataFrame) -> Pairing:
    """The runs of one configuration at its smallest level, paired with those at its largest."""
    x, known = pl.col("x"), compared_runs(runs)
    small, large = ([known[run_id] for run_id in rows.filter(x == end)["run_id"]] for end in (x.min(), x.max()))
    return paired(small, large)
