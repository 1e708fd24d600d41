"""Accuracy after 10, 30, 50 and 100 epochs, as publications tabulate it, with what repeats differ by."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import latex, text
from analysis.comparison.groups import natural
from analysis.configurations import learned

if TYPE_CHECKING:
    from analysis.reader import Runs

EPOCHS = (10, 30, 50, 100)
"""Those of publication 000; the last epoch is always among them."""


def accuracies(runs: Runs) -> pl.DataFrame:
    """One row per configuration and epoch: median, lowest and highest accuracy over the runs that trained to their end.

    Columns: group, configuration, epoch, runs, and the three of test_accuracy and of train_accuracy, shares.
    """
    trained = learned(runs).select("run_id", "group", "configuration", "devices")
    epochs = runs.select("epochs", "run_id", "epoch", "test_accuracy", "train_accuracy")
    chosen = pl.col("epoch").is_in(EPOCHS) | (pl.col("epoch") == pl.col("epoch").max().over("run_id"))
    sides = [
        getattr(pl.col(name), how)().alias(f"{name}_{how}")
        for name in ("test_accuracy", "train_accuracy")
        for how in ("median", "min", "max")
    ]
    rows = trained.join(epochs.filter(chosen), on="run_id").group_by("group", "configuration", "devices", "epoch")
    return (
        rows.agg(pl.len().cast(pl.Int32).alias("runs"), *sides)
        .sort(natural("group"), "devices", "configuration", "epoch")
        .drop("devices")
    )


def as_latex(rows: pl.DataFrame) -> str:
    """A table per group of like work, a row per configuration, a column per epoch."""
    captioned = (
        (
            f"{group}: test accuracy in per cent by epoch, median over the runs, lowest and highest in brackets",
            [_tabular(members)],
        )
        for (group,), members in rows.group_by("group", maintain_order=True)
    )
    return latex.floats(captioned, name="accuracy")


def _tabular(members: pl.DataFrame) -> latex.Rows:
    epochs = sorted(members["epoch"].unique())
    head = ["Configuration", "Runs", *(f"Epoch {epoch}" for epoch in epochs)]
    of_configurations: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in members.iter_rows(named=True):
        of_configurations[row["configuration"]].append(row)
    body = []
    for configuration, rows in of_configurations.items():
        cells = {row["epoch"]: _spread(row) for row in rows}
        runs = str(max(row["runs"] for row in rows))
        shown = [configuration, runs, *(cells.get(epoch, text.MISSING) for epoch in epochs)]
        body.append([latex.escape(cell) for cell in shown])
    return latex.Rows("l" + "r" * (1 + len(epochs)), head, body)


def _spread(row: dict[str, Any]) -> str:
    if row["test_accuracy_median"] is None:
        return text.MISSING
    median, low, high = (f"{100 * row[f'test_accuracy_{how}']:.2f}" for how in ("median", "min", "max"))
    return f"{median} ({low}–{high})" if row["runs"] > 1 else median
