"""Which epochs were disturbed: others took a rank's cores, or computed on its GPU.

The limits are chosen, not derived: a planted busy program exceeds them, a test shows. See docs/measurement.md.
"""

from __future__ import annotations

import polars as pl

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


def lost_time_s() -> pl.Expr:
    """Time that others kept a rank off a core, of the rank of an epoch that lost most.

    Where ranks have no cores of their own, it is what the training thread waited for a core. Loader workers may make it
    wait, so nothing is said of a rank that has some.
    """
    waited_s = pl.when(pl.col("loader_cpu_time_s").is_null()).then("run_delay_s")
    return pl.coalesce("others_time_s", waited_s).max().alias("lost_time_s")


def lost_share() -> pl.Expr:
    """`lost_time_s` ÷ the epoch's time."""
    return (pl.col("lost_time_s") / pl.col("slowest_epoch_time_s")).alias("lost_share")


def disturbed() -> pl.Expr:
    """Whether an epoch was disturbed; null where neither was measured."""
    further = pl.col("cores_per_device").fill_null(1) - 1
    limit_s = (SHARE + SHARE_OF_FURTHER_CORES * further) * pl.col("slowest_epoch_time_s") + UNSURE_S
    by_processes = pl.col("lost_time_s") > limit_s
    on_gpus = pl.col(GPU_PROCESSES) > 1
    found = by_processes.fill_null(False) | on_gpus.fill_null(False)
    return pl.when(by_processes.is_not_null() | on_gpus.is_not_null()).then(found).alias("disturbed")
