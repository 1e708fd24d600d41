"""What preprocessing costs, by engine and recipe: a new process from its launch to the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import prepared
from analysis.comparison.work import groups_across, natural
from analysis.figures._chart import stacked_bars

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 19
TITLE = "What preprocessing costs"
_PARTS = {
    "start_s": ("start and imports", "#999999"),
    "read_s": ("reading", "#f0e442"),
    "take_in_s": ("taking in", "#56b4e9"),
    "compute_s": ("the recipe", "#0072b2"),
    "give_out_s": ("giving out", "#009e73"),
}
_WAYS = ("preprocess",)


def figure(runs: Runs) -> alt.FacetChart | None:
    """Seconds to the first result, stacked by part: a bar per engine, a panel per recipe; None where nothing was."""
    measured = _per_engine(runs)
    if measured.is_empty():
        return None
    label = pl.struct("total", "warm").map_elements(_label, return_dtype=pl.String)
    parts = {name: part for part, (name, _) in _PARTS.items()}
    rows = measured.select("group", "panel", "configuration", "total", label=label, **parts)
    return stacked_bars(rows, dict(_PARTS.values()), part="part", title=TITLE, axis="Time to the result (s)", unit="s")


def _label(row: dict[str, float | None]) -> str:
    warm = "" if row["warm"] is None else f", warm {text.number(row['warm'] * 1e3)} ms"
    return f"{text.number(row['total'])} s{warm}"


def _per_engine(runs: Runs) -> pl.DataFrame:
    """Medians over repeats, a row per engine, recipe and kind of work."""
    rows = prepared(runs)
    works = groups_across(runs, _WAYS)
    columns = {"group": "run_id", "configuration": "preprocess_engine", "recipe": "preprocess_recipe"}
    first = runs.select("preprocess", "run_id", "execution", *_PARTS).filter(pl.col("execution") == 1)
    times = ("preprocess_cold_time_s", "preprocess_warm_time_s")
    named = rows.select("run_id", *times, "preprocess_threads", **columns).with_columns(
        group=pl.col("group").replace_strict(works, default=None, return_dtype=pl.String)
    )
    several = named["preprocess_threads"].n_unique() > 1
    engine = pl.format("{} × {}", "configuration", "preprocess_threads") if several else pl.col("configuration")
    return (
        named.join(first, on="run_id")
        .with_columns(configuration=engine, panel=pl.format("{} — {}", "group", "recipe"))
        .group_by("group", "panel", "recipe", "configuration")
        .agg(pl.col(*_PARTS).median(), total=pl.col(times[0]).median(), warm=pl.col(times[1]).median())
        .sort(natural("group"), "recipe", "total")
    )


def finding(runs: Runs) -> str:
    """The times of each recipe's engines, cold and warm. It names no fastest: nothing here says what is chance."""
    measured = _per_engine(runs)
    if measured.is_empty():
        return "No run that counts was preprocessed: preprocess.engine and preprocess.recipe choose how."
    lines, named = [], "panel" if measured["group"].n_unique() > 1 else "recipe"
    for (recipe,), rows in measured.group_by(named, maintain_order=True):
        words = f"{recipe}: the first result comes after {_times(rows, 'total')}"
        warm = rows.drop_nulls("warm")
        lines.append(words if warm.is_empty() else f"{words}; once warm it takes {_times(warm, 'warm')}")
    return f"{text.listed(lines, sep='; ')}; these are medians over repeats, and no verdict."


def _times(rows: pl.DataFrame, column: str) -> str:
    """ "0.52 s with numpy and 0.71 s with polars", the smallest first."""
    times = rows.sort(column).select(column, "configuration").rows()
    return text.listed([f"{text.number(time)} s with {engine}" for time, engine in times], most=len(times))
