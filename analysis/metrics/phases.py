"""What the time of a step was spent on, and what formulas say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.run_metrics import per_run

if TYPE_CHECKING:
    from analysis.reader import Runs

PHASES = ("data_wait", "host_to_device", "forward", "backward", "communication", "bubble", "optimizer", "other")
"""What a step's time is spent on: columns of `phases`, in the order of a step."""


def phase_times(runs: Runs) -> pl.DataFrame:
    """One row per run that was attributed: `run_id`, `step_time_s` and each phase's time, s per step.

    Means over all ranks and attributed steps; they sum to `step_time_s`. A rank that has no such phase spends no time
    on it; null where no rank has it. A run without rows of some rank has no row: the other ranks would pass for all.
    """
    columns = [f"{phase}_s" for phase in PHASES]
    known = [pl.when(pl.col(name).count() > 0).then(pl.col(name).sum() / pl.len()).alias(name) for name in columns]
    whole = pl.col("rank").n_unique().over("run_id") == pl.col("processes")
    rows = runs.phases.join(runs.run.select("run_id", "processes"), on="run_id", maintain_order="left").filter(whole)
    return rows.group_by("run_id", maintain_order=True).agg(pl.col("step_time_s").mean(), *known)


def measured_bubbles(runs: Runs) -> pl.DataFrame:
    """`run_id` and `measured_bubble` of runs whose ranks idle by a schedule: bubble ÷ (forward + backward + bubble).

    Over all ranks and attributed steps; optimizer and loader do not count, as in a schedule's formula.
    """
    at_work = pl.sum_horizontal("forward_s", "backward_s")
    return (
        phase_times(runs)
        .drop_nulls("bubble_s")
        .select("run_id", measured_bubble=pl.col("bubble_s") / (at_work + pl.col("bubble_s")))
    )


def computation_per_communication(runs: Runs) -> pl.DataFrame:
    """`run_id` and `computation_per_communication` of attributed runs: forward and backward ÷ communication.

    Over all ranks and attributed steps. Communication is what a rank waits for: what backward hides is in backward.
    """
    ratio = pl.sum_horizontal("forward_s", "backward_s") / pl.col("communication_s")
    return (
        phase_times(runs)
        .drop_nulls(["forward_s", "backward_s", "communication_s"])
        .filter(pl.col("communication_s") > 0)
        .select("run_id", computation_per_communication=ratio)
    )


def ring_times(runs: Runs) -> pl.DataFrame:
    """`run_id`, `exposed_s` and `ring_s` of runs that all-reduce their gradients: per step, measured and by formula.

    A ring of n ranks takes 2(n−1)·latency + bytes that a rank sends ÷ bandwidth (Patarasuk and Yuan 2009), both probed
    on the same ranks after the last epoch. What is exposed may be less, as backward hides some, or more, where ranks
    wait for slower ones, or gradients travel in several messages.
    """
    formula = 2 * (pl.col("processes") - 1) * pl.col("probed_latency_s") + (
        pl.col("bytes_sent_per_step_busiest") / pl.col("probed_bandwidth_bytes_per_s")
    )
    return (
        runs.run.filter(pl.col("strategy").is_in(["ddp", "ring_ddp"]))
        .join(per_run(runs), on="run_id")
        .join(phase_times(runs).drop_nulls("communication_s"), on="run_id")
        .select("run_id", exposed_s="communication_s", ring_s=formula)
        .drop_nulls()
    )
