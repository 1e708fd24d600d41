"""Which runs used more cores than their devices have.

Ranks are pinned before they load any library, so all threads of theirs, and the loader's workers, share the rank's
cores. Only what changes its affinity uses more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis.metrics.disturbance import POOL_S, SHARE, UNSURE_OF_EACH_S, UNSURE_S
from analysis.metrics.epochs import AS_TEXT, numbered
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


class CoresUsed(NamedTuple):
    """Of a rank, in the epochs in which it used most."""

    used: float
    """Processor time ÷ time."""
    own: float
    """Cores of its devices."""


@once
def beyond_own_cores(runs: Runs) -> dict[str, CoresUsed]:
    """Run id → cores that a rank used, where these are more than its devices have by more than may be miscounted.

    Consecutive epochs are judged together until they take a second. Runs on GPUs, and ranks without a reading, have no
    entry.
    """
    of_devices = pl.col("cores_per_device") * pl.col("devices") / pl.col("processes")
    own = numbered(runs, "run", "cores_per_device", "devices", "processes").select("run_id", own=of_devices)
    used_s = pl.col("cpu_time_s") + pl.col("loader_cpu_time_s").fill_null(0.0)
    columns = ("attempt", "epoch", "rank", "epoch_time_s", "cpu_time_s", "loader_cpu_time_s")
    rows = numbered(runs, "ranks", *columns).join(own.drop_nulls(), on="run_id").with_columns(used_s=used_s)
    rows = rows.drop_nulls("used_s").filter(pl.col("epoch_time_s") > 0)
    share_s = (1 + SHARE) * pl.col("own") * pl.col("epoch_time_s")
    # Where no epoch exceeds its share, no pool does.
    of_rank = ("run_id", "attempt", "rank")
    rows = rows.join(rows.filter(pl.col("used_s") > share_s), on=of_rank, how="semi").sort(*of_rank, "epoch")
    before_s = pl.col("epoch_time_s").cum_sum().over(of_rank) - pl.col("epoch_time_s")
    pools = rows.group_by(*of_rank, pool=(before_s / POOL_S).floor()).agg(
        pl.col("used_s", "epoch_time_s").sum(), pl.col("own").first(), epochs=pl.len()
    )
    unsure_s = pl.max_horizontal(pl.lit(UNSURE_S), UNSURE_OF_EACH_S * pl.col("epochs").sqrt())
    found = pools.filter(pl.col("used_s") > share_s + unsure_s).with_columns(
        AS_TEXT, used=pl.col("used_s") / pl.col("epoch_time_s")
    )
    worst = found.sort((pl.col("used") / pl.col("own")), descending=True).unique("run_id", keep="first")
    return {run_id: CoresUsed(used, own) for run_id, used, own in worst.select("run_id", "used", "own").rows()}
