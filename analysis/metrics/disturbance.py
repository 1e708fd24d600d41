"""Whether others disturbed an epoch: they took a rank's cores, computed on its GPU, or made it stand still; and with
how many such epochs a run is disturbed (`analysis.comparison.exclusions` leaves it out then).

The limits are chosen, not derived: a planted busy program exceeds them, a test shows. See docs/measurement.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCES = ("others_time_s", "run_delay_s", "loader_cpu_time_s")
"""Columns of `ranks`."""
GPU_PROCESSES = "gpu_processes_max"
SUSPENDED = "suspended_s"
"""Columns of `epochs`."""
SHARE = 0.05
"""Share of a core that others may take of an epoch."""
SHARE_OF_FURTHER_CORES = 0.01
"""The same of each further core of a rank."""
UNSURE_S = 0.03
"""What others may take besides: the kernel counts in steps of 10 ms, at both ends of an epoch."""
UNSURE_OF_EACH_S = 0.015
"""Times √(n·c) the same of n epochs on c cores together, where that is more: 3.7 standard deviations of these errors.
"""
POOL_S = 1.0
"""Shorter steady epochs are also judged together, by pools of consecutive ones that take about so long."""
OF_POOLS = ("others_signed_time_s", "run_delay_s", "loader_cpu_time_s")
"""Columns of `ranks` that say what others took of several epochs."""


_POOL = ("run_id", "attempt", "pool")


def cores() -> pl.Expr:
    """Cores of a rank, whose times are added up: those of all its devices; one where ranks have none of their own."""
    of_devices = pl.col("devices") // pl.col("processes") * pl.col("cores_per_device")
    return pl.max_horizontal(of_devices.fill_null(1), pl.lit(1)).alias("cores")


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


def allowed_share() -> pl.Expr:
    """Share of an epoch's time that others may take of a rank's `cores`, all together."""
    return SHARE + SHARE_OF_FURTHER_CORES * (pl.col("cores") - 1)


def taken(epochs: pl.Expr) -> pl.Expr:
    """Whether others took more than they may of so many epochs, whose times are added up."""
    share_s = allowed_share() * pl.col("slowest_epoch_time_s")
    unsure_s = pl.max_horizontal(pl.lit(UNSURE_S), UNSURE_OF_EACH_S * (epochs * pl.col("cores")).sqrt())
    return pl.col("lost_time_s") > share_s + unsure_s


def suspended() -> pl.Expr:
    """Whether ranks stood still for longer than others may keep one off a core."""
    return pl.col(SUSPENDED) > SHARE * pl.col("slowest_epoch_time_s") + UNSURE_S


def disturbed() -> pl.Expr:
    """Whether an epoch was disturbed, by itself; null where nobody measured what others took."""
    by_processes = taken(epochs=pl.lit(1.0))
    on_gpus, stopped = pl.col(GPU_PROCESSES) > 1, suspended().fill_null(False)
    found = by_processes.fill_null(False) | on_gpus.fill_null(False) | stopped
    return pl.when(by_processes.is_not_null() | on_gpus.is_not_null() | stopped).then(found).alias("disturbed")


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
        pl.col("slowest_epoch_time_s").sum(), pl.col("cores").first(), pl.len().alias("epochs")
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


def rests_on_disturbed(disturbed: int | None, steady: int | None) -> bool:
    """Whether a median over steady epochs may rest on disturbed ones.

    While fewer than half of the epochs are disturbed, their median lies between the undisturbed ones, however slow the
    others were.
    """
    return bool(disturbed and steady and 2 * disturbed >= steady)
