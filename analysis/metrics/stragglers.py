"""The tails of step times, and which rank or node is slower than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.columns import FEWEST_STEPS, WARM_UP
from analysis.metrics.epochs import gathered, numbered, run_and

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


def step_times(runs: Runs) -> pl.DataFrame:
    """`run_id` (numbered) and `step_time_p50_s`, `…_p95_s` and `…_p99_s`, with linear interpolation.

    Of the sampled steps of steady epochs, each on its slowest rank. An epoch's first step is left out: it starts the
    loader, and is always sampled. Null where a run has fewer than `FEWEST_STEPS`.
    """
    rows = numbered(runs, "steps", "attempt", "epoch", "step", "step_time_s").lazy()
    steps = rows.with_columns(warm_up=WARM_UP).filter(~pl.col("warm_up"), pl.col("step") > 1)
    slowest = steps.group_by("run_id", "epoch", "step").agg(pl.col("step_time_s").max())
    columns = {
        f"step_time_p{percent}_s": pl.when(pl.len() >= fewest).then(
            pl.col("step_time_s").quantile(percent / 100, "linear")
        )
        for percent, fewest in FEWEST_STEPS.items()
    }
    return slowest.group_by("run_id").agg(**columns).collect(engine="streaming")


def imbalance(runs: Runs) -> pl.DataFrame:
    """`run_id` (numbered) and `rank_imbalance`, `node_imbalance`, `slow_rank` and `slow_rank_share`.

    By the time that ranks need themselves: their epochs are equally long, as each waits for the slowest one. The median
    rank is one of them, of an even number the faster of the two in the middle: a mean of both would hold the slow rank
    itself where there are two.
    """
    own = pl.concat([_of_epochs(runs), _of_phases(runs)]).with_columns(run_and("unit"))
    known = (
        own.lazy()
        .group_by("_both")
        .agg(least=pl.col("own_s").min(), unknown=pl.col("own_s").null_count(), ranks=pl.len())
        .filter(pl.col("least") > 0, pl.col("unknown") == 0, pl.col("ranks") > 1)
        .collect(engine="streaming")
    )
    own = own.join(known, on="_both", how="semi", maintain_order="left")
    middle_s = pl.col("own_s").quantile(0.5, "lower")
    ratio = pl.col("own_s").max() / middle_s
    slowest = pl.col("slowest").mode().min()
    of_ranks = (
        own.group_by("_both")
        .agg(pl.col("run_id").first(), ratio=ratio, slowest=pl.col("rank").get(pl.col("own_s").arg_max()))
        .group_by("run_id")
        .agg(
            rank_imbalance=pl.col("ratio").median(),
            slow_rank=slowest,
            slow_rank_share=(pl.col("slowest") == slowest).mean(),
        )
    )
    on_several = own.group_by("run_id").agg(nodes=pl.col("node").n_unique()).filter(pl.col("nodes") > 1)
    of_nodes = (
        own.join(on_several, on="run_id", how="semi")
        .group_by("run_id", "_both", "node")
        .agg(middle_s)
        .group_by("run_id", "_both")
        .agg(ratio=ratio, nodes=pl.len())
        .filter(pl.col("nodes") > 1)
        .group_by("run_id")
        .agg(node_imbalance=pl.col("ratio").median())
    )
    return of_ranks.join(of_nodes, on="run_id", how="left")


def _of_epochs(runs: Runs) -> pl.DataFrame:
    """What each rank needs for each steady epoch, s: a user's program until its first backward pass, since ranks wait
    for each other from then on; on CPUs else the processor time of a rank and its loader. On GPUs it is not known.
    """
    sources = ("forward_s", "cpu_time_s", "loader_cpu_time_s")
    rows = numbered(runs, "ranks", "attempt", "epoch", "rank", "node", *sources)
    rows = rows.with_columns(gathered(runs, "device_type", rows).alias("device_type"))
    used_s = pl.col("cpu_time_s") + pl.col("loader_cpu_time_s").fill_null(0.0)
    own_s = pl.coalesce("forward_s", pl.when(pl.col("device_type") == "cpu").then(used_s))
    return rows.filter(~WARM_UP).select(
        "run_id", pl.col("epoch").cast(pl.Int32).alias("unit"), "rank", "node", own_s=own_s
    )


def _of_phases(runs: Runs) -> pl.DataFrame:
    """On GPUs: each attributed step's time on each rank without communication and bubble, s.

    Nothing of runs whose communication was not told apart: waiting for slower ranks is in their forward and backward.
    """
    columns = ("rank", "step", "step_time_s", "communication_s", "bubble_s")
    rows = numbered(runs, "phases", *columns)
    rows = rows.filter(
        gathered(runs, "device_type", rows) == "cuda", pl.col("communication_s").is_not_null().any().over("run_id")
    )
    waited_s = pl.sum_horizontal(pl.col("communication_s", "bubble_s").fill_null(0.0))
    nodes = numbered(runs, "ranks", "rank", "node").unique(["run_id", "rank"])
    found = rows.join(nodes, on=("run_id", "rank"), how="left")
    before_epochs = (-1 - pl.col("step")).cast(pl.Int32).alias("unit")
    return found.select("run_id", before_epochs, "rank", "node", own_s=pl.col("step_time_s") - waited_s)
