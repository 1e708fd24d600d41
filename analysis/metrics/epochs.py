"""The derived columns of each epoch, from the rows of all its ranks; and whether others disturbed it.

Others did if they took a rank's cores, or computed on its GPU. The limits are chosen, not derived: a planted busy
program exceeds them, a test shows. See docs/measurement.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.columns import aggregates, epoch_aggregates, of_row, per_epoch_columns, run_aggregates
from analysis.metrics.tokens import in_nats, perplexity
from analysis.runs.published import finite
from analysis.runs.reader import once
from parallelbench.results.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.runs.reader import Runs


# Ids have 64 characters. As numbers, a million rows are grouped and joined in a fraction of the time.
AS_TEXT = pl.col("run_id").cast(pl.String)
"""Turns the ids of `numbered` into text again."""


def per_epoch(runs: Runs) -> pl.DataFrame:
    """The rows of `runs.epochs` with the columns of `per_epoch_columns`, in the order of the runs and their epochs."""
    return numbered_epochs(runs).with_columns(AS_TEXT)


@once
def numbered_epochs(runs: Runs) -> pl.DataFrame:
    """The same, with `run_id` as an enumeration."""
    derived = [column.name for column in per_epoch_columns()]
    raw = runs.epochs.columns
    rows = _epochs(runs, *raw).join(_in_nats(runs), on="run_id", how="left", maintain_order="left")
    rows = rows.with_columns(perplexity=pl.when("in_nats").then(perplexity("test_loss")))
    return finite(rows.select(*raw, *derived))


def _in_nats(runs: Runs) -> pl.DataFrame:
    rows = numbered(runs, "run", "tokens_per_sample", "config_json")
    return rows.select("run_id", in_nats=in_nats())


@once
def _ids(runs: Runs) -> pl.Enum:
    return pl.Enum(runs.run["run_id"])


def numbered(runs: Runs, table: str, *columns: str) -> pl.DataFrame:
    """These columns of a table, and `run_id` as an enumeration; only rows of the runs in `runs.run`."""
    rows = runs.select(table, "run_id", *columns)
    return rows.with_columns(pl.col("run_id").cast(_ids(runs), strict=False)).drop_nulls("run_id")


def gathered(runs: Runs, column: str, rows: pl.DataFrame) -> pl.Series:
    """A column of `runs.run`, for each of these rows of numbered runs."""
    return runs.run[column].gather(rows["run_id"].to_physical())


def run_and(column: str) -> pl.Expr:
    """`run_id` and a further number in one."""
    return (pl.col("run_id").to_physical().cast(pl.Int64) * 2**32 + pl.col(column)).alias("_both")


@once
def _epochs(runs: Runs, *columns: str) -> pl.DataFrame:
    """`per_epoch` of some columns, and `owned_samples`: those that its ranks say they trained on."""
    needed = dict.fromkeys(("epoch", "attempt", "train_samples", GPU_PROCESSES, *columns))
    needed.pop("run_id", None)
    epochs = (
        numbered(runs, "epochs", *needed)
        .with_columns(run_and("epoch"))
        .join(_over_ranks(runs), on="_both", how="left")
        .sort("_both")
        .drop("_both")
        .join(numbered(runs, "run", "cores_per_device"), on="run_id", how="left", maintain_order="left")
        .with_columns(lost_share(), disturbed(), *of_row(per_epoch_columns()))
    )
    return judged_in_pools(finite(epochs), lambda: numbered(runs, "ranks", "epoch", "rank", *OF_POOLS))


@once
def _over_ranks(runs: Runs) -> pl.DataFrame:
    """Of each epoch what its ranks measured, together."""
    plain = epoch_aggregates()
    sources = dict.fromkeys((*(source.name for source, _ in plain), "train_samples", *SOURCES))
    return (
        numbered(runs, "ranks", "epoch", *sources)
        .lazy()
        .group_by(run_and("epoch"))
        .agg(*aggregates(plain), lost_time_s(), owned_samples=pl.col("train_samples").sum())
        .collect(engine="streaming")  # twice as fast here
    )


def measured(runs: Runs) -> pl.DataFrame:
    """Of each epoch the columns that the metrics of its run are made of."""
    raw = {column.name for column in TABLES["epochs"]}
    sources = (source.name for source, _ in run_aggregates() if source.name in raw)
    return _epochs(runs, *dict.fromkeys(("steps", "test_accuracy", "test_loss", "gpu_energy_j", *sources)))


def miscounted(runs: Runs) -> set[str]:
    """The runs whose ranks' samples don't add up to an epoch's."""
    wrong = measured(runs).filter(pl.col("owned_samples") != pl.col("train_samples"))
    return set(wrong["run_id"].unique().cast(pl.String))


SOURCES = ("others_time_s", "run_delay_s", "loader_cpu_time_s")
"""Columns of `ranks`."""
GPU_PROCESSES = "gpu_processes_max"
"""Column of `epochs`."""
SHARE = 0.05
"""Share of a core that others may take of an epoch."""
SHARE_OF_FURTHER_CORES = 0.01
"""The same of each further core of a rank."""
UNSURE_S = 0.03
"""What others may take besides: the kernel counts in steps of 10 ms, at both ends of an epoch."""
UNSURE_OF_EACH_S = 0.015
"""Times √n the same of n epochs together, where that is more: 3.7 standard deviations of these errors."""
POOL_S = 1.0
"""Shorter steady epochs are also judged together, by pools of consecutive ones that take about so long."""
OF_POOLS = ("others_signed_time_s", "run_delay_s", "loader_cpu_time_s")
"""Columns of `ranks` that say what others took of several epochs."""


_POOL = ("run_id", "attempt", "pool")


def lost_time_s() -> pl.Expr:
    """Time that others kept a rank off a core, of the rank of an epoch that lost most.

    Where ranks have no cores of their own, it is what the training thread waited for a core. Loader workers may make it
    wait, so nothing is said of a rank that has some.
    """
    waited_s = pl.when(pl.col("loader_cpu_time_s").is_null()).then("run_delay_s")
    return pl.coalesce("others_time_s", waited_s).max().alias("lost_time_s")


def pooled_time_s() -> pl.Expr:
    """`lost_time_s` of one rank in several epochs; null where one epoch's is."""
    signed_s, waited_s = (pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()) for name in OF_POOLS[:2])
    without_workers = pl.col("loader_cpu_time_s").null_count() == pl.len()
    return pl.coalesce(signed_s, pl.when(without_workers).then(waited_s)).alias("lost_time_s")


def pool() -> pl.Expr:
    """Number of a steady epoch's pool, within its attempt; the rest of an attempt belongs to its last whole pool.

    Null of warm-up epochs. The rows of a run are in the order of its epochs.
    """
    attempt = ("run_id", "attempt")
    time_s = pl.when(~pl.col("warm_up")).then("slowest_epoch_time_s")
    number = ((time_s.cum_sum().over(attempt) - time_s) / POOL_S).floor()
    last = (time_s.sum().over(attempt) / POOL_S).floor() - 1
    return pl.min_horizontal(number, pl.when(time_s.is_not_null()).then(last.clip(0))).alias("pool")


def lost_share() -> pl.Expr:
    """`lost_time_s` ÷ the epoch's time."""
    return (pl.col("lost_time_s") / pl.col("slowest_epoch_time_s")).alias("lost_share")


def taken(epochs: pl.Expr) -> pl.Expr:
    """Whether others took more than they may of so many epochs, whose times are added up."""
    further = pl.col("cores_per_device").fill_null(1) - 1
    share_s = (SHARE + SHARE_OF_FURTHER_CORES * further) * pl.col("slowest_epoch_time_s")
    return pl.col("lost_time_s") > share_s + pl.max_horizontal(pl.lit(UNSURE_S), UNSURE_OF_EACH_S * epochs.sqrt())


def disturbed() -> pl.Expr:
    """Whether an epoch was disturbed, by itself; null where neither was measured."""
    by_processes = taken(epochs=pl.lit(1.0))
    on_gpus = pl.col(GPU_PROCESSES) > 1
    found = by_processes.fill_null(False) | on_gpus.fill_null(False)
    return pl.when(by_processes.is_not_null() | on_gpus.is_not_null()).then(found).alias("disturbed")


def judged_in_pools(epochs: pl.DataFrame, read_ranks: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """The epochs, of which short ones are disturbed, too, where others took too much of their pool on any rank.

    `read_ranks`: `run_id`, `epoch`, `rank` and the columns of `OF_POOLS`.
    """
    if not (epochs["slowest_epoch_time_s"] < POOL_S).any():
        return epochs
    members = epochs.with_columns(pool()).drop_nulls("pool")
    short = members.filter(pl.col("slowest_epoch_time_s") < POOL_S, pl.len().over(*_POOL) > 1)
    if short.is_empty():
        return epochs
    members = members.join(short, on=_POOL, how="semi")
    times = members.group_by(_POOL).agg(
        pl.col("slowest_epoch_time_s").sum(), pl.col("cores_per_device").first(), pl.len().alias("epochs")
    )
    disturbed = (
        read_ranks()
        .join(members.select("epoch", *_POOL), on=("run_id", "epoch"))
        .group_by(*_POOL, "rank")
        .agg(pooled_time_s())
        .join(times, on=_POOL)
        .filter(taken(pl.col("epochs")))
        .group_by(_POOL)
        .agg(lost_share().max().alias("pooled_share"))
    )
    found = short.join(disturbed, on=_POOL).select("run_id", "epoch", "pooled_share")
    joined = epochs.join(found, on=("run_id", "epoch"), how="left", maintain_order="left")
    in_pool = pl.col("pooled_share").is_not_null()
    return joined.with_columns(
        disturbed=pl.when(in_pool).then(True).otherwise("disturbed"),
        lost_share=pl.coalesce("pooled_share", "lost_share"),
    ).drop("pooled_share")
