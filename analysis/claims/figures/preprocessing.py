"""What preprocessing costs with each engine: section 5 of publication 000."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.claims.figures import is_reproduction
from analysis.comparison.summary import prepared
from analysis.comparison.work import groups_across, natural
from analysis.figures.chart import written
from analysis.figures.stacked import Stacked

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

_PREPARING = {
    "start_s": ("start and imports", "#999999"),
    "read_s": ("reading", "#f0e442"),
    "take_in_s": ("taking in", "#56b4e9"),
    "compute_s": ("the recipe", "#0072b2"),
    "give_out_s": ("giving out", "#009e73"),
}


def _engines(runs: Runs) -> pl.DataFrame:
    """Times of preprocessing in a new process, medians over repeats: a row per engine, recipe and kind of work."""
    works = groups_across(runs, ("preprocess",))
    columns = {"group": "run_id", "configuration": "preprocess_engine", "recipe": "preprocess_recipe"}
    first = runs.select("preprocess", "run_id", "execution", *_PREPARING).filter(pl.col("execution") == 1)
    times = ("preprocess_cold_time_s", "preprocess_warm_time_s")
    named = prepared(runs).select("run_id", *times, "preprocess_threads", **columns)
    named = named.with_columns(group=pl.col("group").replace_strict(works, default=None, return_dtype=pl.String))
    several = named["preprocess_threads"].n_unique() > 1
    engine = pl.format("{} × {}", "configuration", "preprocess_threads") if several else pl.col("configuration")
    return (
        named.join(first, on="run_id")
        .with_columns(configuration=engine, panel=pl.format("{} — {}", "group", "recipe"))
        .group_by("group", "panel", "recipe", "configuration")
        .agg(pl.col(*_PREPARING).median(), total=pl.col(times[0]).median(), warm=pl.col(times[1]).median())
        .sort(natural("group"), "recipe", "total")
    )


def _to_first_result(runs: Runs) -> pl.DataFrame:
    parts = {name: part for part, (name, _) in _PREPARING.items()}
    return _engines(runs).select(
        "group",
        "panel",
        "configuration",
        "total",
        label=written(_cold_and_warm, "total", "warm"),
        disturbed=pl.lit(False),  # no verdict rests on these times
        **parts,
    )


def _cold_and_warm(row: dict[str, float | None]) -> str:
    warm = "" if row["warm"] is None else f", warm {text.number(row['warm'] * 1e3)} ms"
    return f"{text.number(row['total'])} s{warm}"


def _of_recipes(runs: Runs) -> str:
    """The times of each recipe's engines, cold and warm. It names no fastest: nothing here says what is chance."""
    measured = _engines(runs)
    if measured.is_empty():
        return "No run that counts was preprocessed: preprocess.engine and preprocess.recipe choose how."
    lines, named = [], "panel" if measured["group"].n_unique() > 1 else "recipe"
    for (recipe,), rows in measured.group_by(named, maintain_order=True):
        words = f"{recipe}: the first result comes after {_of_engines(rows, 'total')}"
        warm = rows.drop_nulls("warm")
        lines.append(words if warm.is_empty() else f"{words}; once warm it takes {_of_engines(warm, 'warm')}")
    return f"{text.listed(lines, sep='; ')}; these are medians over repeats, and no verdict."


def _of_engines(rows: pl.DataFrame, column: str) -> str:
    """ "0.52 s with numpy and 0.71 s with polars", the smallest first."""
    times = rows.sort(column).select(column, "configuration").rows()
    return text.listed([f"{text.number(time)} s with {engine}" for time, engine in times], most=len(times))


preprocessing = Stacked(
    order=19,
    title="What preprocessing costs",
    rows=_to_first_result,
    drawn_for=is_reproduction,
    part="part",
    colours=dict(_PREPARING.values()),
    axis="Time to the result (s)",
    finding=_of_recipes,
)
