"""The answer at a glance: the verdict beside one device of every configuration, by kind of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis import text
from analysis.comparison.groups import natural
from analysis.comparison.speed import SpeedVerdict
from analysis.configurations import summary

if TYPE_CHECKING:
    from analysis.reader import Runs

MOST_COLUMNS = 12
"""Configurations that fit beside each other; with more, those of the most rows are shown."""


class Glance(NamedTuple):
    """A verdict beside one device; all empty where there is no such configuration."""

    verdict: str = ""
    speed_up: str = ""
    interval: str = ""


class Matrix(NamedTuple):
    """A row per group of like work, a column per configuration."""

    columns: list[str]
    rows: list[tuple[str, list[Glance]]]
    omitted: int
    """Configurations that have no column."""


def matrix(runs: Runs) -> Matrix | None:
    """The verdicts of all groups; None where one group alone has any, as sentences say it better."""
    rows = summary(runs).filter(pl.col("verdict").is_not_null(), pl.col("verdict") != SpeedVerdict.BASELINE.value)
    if rows["group"].n_unique() < 2:
        return None
    counts = rows.group_by("configuration", maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    kept = counts.head(MOST_COLUMNS)["configuration"]
    columns = rows.filter(pl.col("configuration").is_in(kept.implode())).sort("devices", natural("configuration"))
    names = columns["configuration"].unique(maintain_order=True).to_list()
    shown = []
    for (group,), members in rows.group_by("group", maintain_order=True):
        cells = {row["configuration"]: _cell(row) for row in members.iter_rows(named=True)}
        shown.append((str(group), [cells.get(name, Glance()) for name in names]))
    return Matrix(names, shown, counts.height - len(names))


def _cell(row: dict[str, Any]) -> Glance:
    low, high = row["speed_up_low"], row["speed_up_high"]
    speed_up = "" if row["speed_up"] is None else f"{row['speed_up']:.2f} ×"
    return Glance(row["verdict"], speed_up, "" if low is None else text.interval_of_95(low, high))
