"""Who does not reach the test accuracy that was chosen for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.configurations import facts

if TYPE_CHECKING:
    from analysis.reader import Runs

MOST = 8
"""Configurations that a sentence names."""


def unreached(runs: Runs) -> list[str]:
    """The configurations of which not every run reaches the chosen accuracy, with the best that they reach; one line
    where nobody does. Empty where none was chosen.
    """
    rows = facts(runs).filter("displayed")
    if runs.target is None or rows.is_empty():
        return []
    several = rows["group"].n_unique() > 1
    best = rows.group_by("group", "configuration", maintain_order=True).agg(
        best=pl.col("best_test_accuracy").max(),
        reached=(pl.col("best_test_accuracy") >= runs.target).fill_null(value=False).sum(),
        of=pl.len(),
    )
    best = best.with_columns(name=pl.format("{} ({})", "configuration", "group") if several else "configuration")
    target = text.accuracy(runs.target)
    if best["reached"].sum() == 0:
        return [f"No run reaches {target} test accuracy, which was chosen; {_best_of_all(best)}."]
    missed = best.filter(pl.col("reached") < pl.col("of")).rows(named=True)
    shown = [f"{row['name']} ({row['reached']} of {row['of']} runs, best {_exactly(row['best'])})" for row in missed]
    never = "so they have no time to it"
    return [f"Not every run reaches {target} test accuracy, {never}: {text.listed(shown, most=MOST)}."] if shown else []


def _best_of_all(best: pl.DataFrame) -> str:
    known = best.drop_nulls("best").sort("best", descending=True, maintain_order=True)
    if known.is_empty():
        return "none was tested"
    return f"the best is {_exactly(known['best'][0])}, of {known['name'][0]}"


def _exactly(share: float | None) -> str:
    """To four digits of the share: what was reached must not be rounded up to a target that was not."""
    return text.MISSING if share is None else f"{int(share * 10_000 + 1e-9) / 100:.2f}\u202f%"
