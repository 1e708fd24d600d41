"""The derived columns of each epoch, from the rows of all its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.columns import aggregates, epoch_aggregates, of_row, per_epoch_columns
from analysis.metrics.tokens import in_nats, perplexity
from analysis.runs.published import finite
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


# Ids have 64 characters. As numbers, a million rows are grouped and joined in a fraction of the time.
AS_TEXT = pl.col("run_id").cast(pl.String)
"""Turns the ids of `numbered` into text again."""


def per_epoch(runs: Runs) -> pl.DataFrame:
    """The rows of `runs.epochs` with the columns of `per_epoch_columns`, in the order of the runs and their epochs."""
    return numbered_epochs(runs).with_columns(AS_TEXT)


def numbered_epochs(runs: Runs) -> pl.DataFrame:
    """The same, with `run_id` as an enumeration."""
    return measured(runs).select(*runs.epochs.columns, *(column.name for column in per_epoch_columns()))


@once
def _ids(runs: Runs) -> pl.Enum:
    return pl.Enum(runs.run["run_id"])


def numbered(runs: Runs, table: str, *columns: str) -> pl.DataFrame:
    """These columns of a table, and `run_id` as an enumeration; only rows of the runs in `runs.run`."""
    ids = _ids_of(runs, table)
    rows = runs.select(table, *columns).select(ids, pl.all())
    return rows.drop_nulls("run_id") if ids.null_count() else rows


@once
def _ids_of(runs: Runs, table: str) -> pl.Series:
    """The run of each row of a table, read and looked up once; null where `runs.run` lacks it."""
    return runs.select(table, "run_id")["run_id"].cast(_ids(runs), strict=False)


def gathered(runs: Runs, column: str, rows: pl.DataFrame) -> pl.Series:
    """A column of `runs.run`, for each of these rows of numbered runs."""
    return runs.run[column].gather(rows["run_id"].to_physical())


def run_and(column: str) -> pl.Expr:
    """`run_id` and a further number in one."""
    return (pl.col("run_id").to_physical().cast(pl.Int64) * 2**32 + pl.col(column)).alias("_both")


@once
def measured(runs: Runs) -> pl.DataFrame:
    """`numbered_epochs` and `owned_samples`: those that its ranks say they trained on."""
    of_runs = numbered(runs, "run", "tokens_per_sample", "config_json").select("run_id", in_nats=in_nats())
    of_tokens = pl.when("in_nats").then(perplexity("test_loss"))
    epochs = numbered(runs, "epochs", *(name for name in runs.epochs.columns if name != "run_id"))
    epochs = _in_order(epochs.with_columns(run_and("epoch")))
    # Of the epochs only the numbers are joined: a join copies all columns that it is given.
    of_ranks = epochs.select("_both").join(_in_order(_over_ranks(runs)), on="_both", how="left", maintain_order="left")
    epochs = (
        epochs.drop("_both")
        .hstack(of_ranks.drop("_both"))
        .join(of_runs, on="run_id", how="left", maintain_order="left")
        .with_columns(*of_row(per_epoch_columns()), perplexity=of_tokens)
    )
    return finite(epochs)


@once
def _over_ranks(runs: Runs) -> pl.DataFrame:
    """Of each epoch what its ranks measured, together."""
    plain = epoch_aggregates()
    sources = dict.fromkeys((*(source.name for source, _ in plain), "train_samples"))
    return (
        numbered(runs, "ranks", "epoch", *sources)
        .lazy()
        .group_by(run_and("epoch"))
        .agg(*aggregates(plain), owned_samples=_all_known("train_samples"))
        .collect(engine="streaming")  # twice as fast here
    )


def _all_known(column: str) -> pl.Expr:
    """The sum over all ranks; null where one does not know."""
    return pl.when(pl.col(column).null_count() == 0).then(pl.col(column).sum())


def _in_order(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows by `_both`, mostly as they are: runs write their epochs in order."""
    ordered = rows if rows["_both"].is_sorted() else rows.sort("_both")
    return ordered.set_sorted("_both")


def miscounted(runs: Runs) -> set[str]:
    """The runs whose ranks' samples don't add up to an epoch's."""
    wrong = measured(runs).filter(pl.col("owned_samples") != pl.col("train_samples"))
    return set(wrong["run_id"].unique().cast(pl.String))
