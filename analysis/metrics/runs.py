"""What is derived of each run, and how: one column each."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis.metrics.epochs import AS_TEXT, SAMPLED, measured, numbered, run_and

if TYPE_CHECKING:
    from analysis.load import Runs


class Metric(NamedTuple):
    """A derived column: its name (with the unit) and how it is made."""

    name: str
    doc: str


PER_RUN = (
    Metric("epochs_finished", "epochs that every rank finished"),
    Metric("first_epoch_time_s", "training window of epoch 1, warm-up included; slowest rank"),
    Metric("second_epoch_time_s", "training window of epoch 2; slowest rank; null: not trained, or resumed with it"),
    Metric(
        "steady_epoch_time_s",
        "median over the epochs of the slowest rank's training window, without each attempt's first one",
    ),
    Metric("throughput_samples_per_s", "samples trained on per epoch over all data shards ÷ steady_epoch_time_s"),
    Metric(
        "total_training_time_s",
        "sum over all epochs of the slowest rank's training window, warm-ups included; null: not finished",
    ),
    Metric(
        "startup_without_parity_s",
        "launch to the end of the first step, less the parity check, which only we run",
    ),
    Metric(
        "total_time_s",
        "startup_without_parity_s + total_training_time_s − startup_first_step_s (step 1 belongs to epoch 1); null: "
        "not finished, or in several attempts, each of which started up anew",
    ),
    Metric("throughput_with_startup_samples_per_s", "samples trained on in all epochs ÷ total_time_s"),
    Metric(
        "peak_memory_max_bytes",
        "each rank's peak over all epochs, the largest of them; which memory: memory_kind",
    ),
    Metric("peak_memory_sum_bytes", "each rank's peak over all epochs, their sum; null where one rank's is"),
    Metric("memory_kind", "device: allocated by tensors on the GPU; host: resident set of the process (CPU runs)"),
    Metric(
        "bytes_sent_per_step_sum",
        "sent to other ranks while training: sum over all finished epochs and all ranks ÷ optimizer steps",
    ),
    Metric("gradient_bytes_sent_per_step_sum", "gradients among bytes_sent_per_step_sum"),
    Metric("activation_bytes_sent_per_step_sum", "activations and their gradients among bytes_sent_per_step_sum"),
    Metric("parameter_bytes_sent_per_step_sum", "parameters and buffers among bytes_sent_per_step_sum"),
    Metric(
        "bytes_sent_per_step_busiest",
        "the same of one rank: the one that sends most over all finished epochs, all kinds together",
    ),
    Metric("gradient_bytes_sent_per_step_busiest", "gradients among bytes_sent_per_step_busiest"),
    Metric("activation_bytes_sent_per_step_busiest", "activations and their gradients among that"),
    Metric("parameter_bytes_sent_per_step_busiest", "parameters and buffers among that"),
    Metric(
        "gpu_energy_per_epoch_j",
        "energy of all the run's GPUs in an epoch's training window: median over the epochs that have one, without "
        "each attempt's first one; null: no GPU, or no telemetry of all of them",
    ),
    Metric("gpu_energy_per_sample_j", "the same ÷ the samples trained on: median over those epochs"),
    Metric("gpu_power_mean_w", "mean power of all its GPUs together: median over those epochs"),
    Metric("gpu_power_max_w", "highest power that was sampled of one GPU in any of those epochs"),
    Metric(
        "gpu_throttle_reasons",
        "all reasons for lower clocks that were sampled in those epochs (bits: nvmlClocksEventReason…)",
    ),
    Metric(
        "cpu_energy_per_epoch_j",
        "energy of the nodes' whole processors, others' work included (RAPL): median over those epochs; null: not "
        "readable",
    ),
    Metric(
        "energy_flags",
        "what to know of these epochs' energies: short, sparse, from_power, reset, incomplete, as telemetry_flags says",
    ),
    Metric(
        "gpu_hours",
        "devices × total_time_s ÷ 3600: start-up and training without parity check and evaluation; null: no GPU",
    ),
    Metric("staleness_mean", "mean over all pushes to parameter servers, all workers and epochs; null: no pushes"),
    Metric("staleness_max", "largest of any push; null: no pushes"),
    Metric("final_test_accuracy", "after the last epoch, 0 to 1; null: not finished"),
    Metric("best_test_accuracy", "highest after any finished epoch, 0 to 1"),
    Metric("parity_difference", "largest of the parity check's loss, gradient, parameter and evaluation differences"),
)
"""The columns of `per_run` besides `run_id`."""

SECONDS_PER_HOUR = 3600
KINDS_SENT = ("gradient", "activation", "parameter")
"""What the bytes are that ranks send: see `parallelbench.probes.traffic.Kind`."""


@lru_cache(maxsize=8)
def per_run(runs: Runs) -> pl.DataFrame:
    """One row per run, in the order of `runs.run`: `run_id` and the columns that `PER_RUN` explains."""
    later = ~pl.col("warm_up")
    epochs = measured(runs).group_by("run_id").agg(
        pl.len().cast(pl.Int32).alias("epochs_finished"),
        *(
            pl.col("epoch_time_s").filter(pl.col("epoch") == epoch, pl.col("warm_up") == warm).first().alias(name)
            for epoch, warm, name in ((1, True, "first_epoch_time_s"), (2, False, "second_epoch_time_s"))
        ),
        pl.col("epoch_time_s").filter(later).median().alias("steady_epoch_time_s"),
        pl.col("train_samples").filter(later).median().alias("_samples"),
        pl.col("train_samples").sum().alias("_all_samples"),
        pl.col("epoch_time_s").sum().alias("total_training_time_s"),
        pl.col("test_accuracy").last().alias("final_test_accuracy"),
        pl.col("test_accuracy").max().alias("best_test_accuracy"),
    )  # fmt: skip
    joined = numbered(runs, "run", *(name for name in runs.run.columns if name != "run_id"))
    for found in (epochs, _energy(runs), _memory(runs), _communication(runs), _staleness(runs), _parity(runs)):
        joined = joined.join(found, on="run_id", how="left", maintain_order="left")
    return _derive(joined).select(AS_TEXT, *(metric.name for metric in PER_RUN))


def _derive(joined: pl.DataFrame) -> pl.DataFrame:
    """The columns that follow from one row."""
    complete = pl.col("epochs_finished") == pl.col("epochs")
    whole = ("total_training_time_s", "final_test_accuracy")
    return (
        joined.with_columns(pl.col("epochs_finished").fill_null(0))
        .with_columns(
            *(pl.when(complete).then(pl.col(name)).alias(name) for name in whole),
        )
        .with_columns(
            total_training_time_s=pl.when(pl.col("resumed_after").is_null()).then(pl.col("total_training_time_s")),
            throughput_samples_per_s=pl.col("_samples") / pl.col("steady_epoch_time_s"),
            # A null means that there was no parity check, so nothing is to be taken off.
            startup_without_parity_s=pl.col("startup_s") - pl.col("startup_parity_s").fill_null(0),
        )
        .with_columns(
            total_time_s=pl.when(pl.col("resumed_after").is_null()).then(
                pl.col("startup_without_parity_s") + pl.col("total_training_time_s") - pl.col("startup_first_step_s")
            )
        )
        .with_columns(
            throughput_with_startup_samples_per_s=pl.col("_all_samples") / pl.col("total_time_s"),
            gpu_hours=pl.when(pl.col("device_type") == "cuda").then(
                pl.col("devices") * pl.col("total_time_s") / SECONDS_PER_HOUR
            ),
        )
    )


def _energy(runs: Runs) -> pl.DataFrame:
    """Energy and power per run, of the epochs after each attempt's first one."""
    steady = measured(runs).filter(~pl.col("warm_up"))
    flagged = steady.select("run_id", "telemetry_flags").drop_nulls().unique()
    flags = pl.col("telemetry_flags").str.split(" ").explode().unique().sort()
    energies = steady.filter(pl.any_horizontal(pl.col(SAMPLED).is_not_null())).group_by("run_id").agg(
        pl.col("gpu_energy_j").median().alias("gpu_energy_per_epoch_j"),
        (pl.col("gpu_energy_j") / pl.col("train_samples")).median().alias("gpu_energy_per_sample_j"),
        pl.col("gpu_power_mean_w").median(),
        pl.col("gpu_power_max_w").max(),
        pl.col("gpu_throttle_reasons").bitwise_or(),
        pl.col("cpu_energy_j").median().alias("cpu_energy_per_epoch_j"),
    )  # fmt: skip
    found = flagged.group_by("run_id").agg(flags.str.join(" ").alias("energy_flags"))
    return energies.join(found, on="run_id", how="full", coalesce=True)


@lru_cache(maxsize=8)
def _per_rank(runs: Runs) -> pl.DataFrame:
    """One row per run and rank: its peaks over all epochs, and what it sent in them; null where one epoch's is."""
    peaks = ("peak_allocated_bytes", "host_peak_rss_bytes")
    kinds = [f"{kind}_bytes_sent" for kind in KINDS_SENT]

    def known(column: str, whole: pl.Expr) -> pl.Expr:
        return pl.when(pl.col(column).null_count() == 0).then(whole).alias(column)

    return (
        numbered(runs, "ranks", "rank", *peaks, *kinds)
        .lazy()
        .group_by(run_and("rank"))
        .agg(
            pl.col("run_id", "rank").first(),
            *(known(peak, pl.col(peak).max()) for peak in peaks),
            *(known(kind, pl.col(kind).sum()) for kind in kinds),
        )
        .collect(engine="streaming")
        .sort("_both")
        .with_columns(bytes_sent=pl.sum_horizontal(kinds, ignore_nulls=False))
    )


def _memory(runs: Runs) -> pl.DataFrame:
    """Peak memory per run: device memory of CUDA runs, host memory of CPU runs."""
    kind = pl.col("device_type").replace_strict({"cuda": "device", "cpu": "host"}, default=None)
    peak = pl.when(pl.col("memory_kind") == "device").then("peak_allocated_bytes").otherwise("host_peak_rss_bytes")
    known = pl.col("peak").null_count() == 0
    kinds = numbered(runs, "run", "device_type").select("run_id", kind.alias("memory_kind"))
    return (
        _per_rank(runs)
        .join(kinds, on="run_id")
        .with_columns(peak=peak)
        .group_by("run_id", "memory_kind")
        .agg(
            pl.when(known).then(pl.col("peak").max()).alias("peak_memory_max_bytes"),
            pl.when(known).then(pl.col("peak").sum()).alias("peak_memory_sum_bytes"),
        )
    )


def _communication(runs: Runs) -> pl.DataFrame:
    """Bytes sent per optimizer step and run: by all ranks, and by the busiest; kinds add up in both."""
    steps = measured(runs).group_by("run_id").agg(pl.col("steps").sum())
    sent = pl.col("bytes_sent", *(f"{kind}_bytes_sent" for kind in KINDS_SENT))
    return (
        _per_rank(runs)
        .filter(pl.col("bytes_sent").is_not_null().all().over("run_id"))
        .group_by("run_id")
        .agg(
            sent.sum().name.suffix("_per_step_sum"),
            # Of several that send equally much, the first: its kinds, not each kind's largest, make the total.
            sent.get(pl.col("bytes_sent").arg_max()).name.suffix("_per_step_busiest"),
        )
        .join(steps, on="run_id")
        .select("run_id", pl.col("^.*_per_step_.*$") / pl.col("steps"))
    )


def _staleness(runs: Runs) -> pl.DataFrame:
    staleness = pl.col("staleness")
    pushes = numbered(runs, "pushes", "staleness").group_by("run_id")
    return pushes.agg(staleness.mean().alias("staleness_mean"), staleness.max().alias("staleness_max"))


def _parity(runs: Runs) -> pl.DataFrame:
    differences = ("loss_difference", "gradient_difference", "parameter_difference", "evaluation_difference")
    parity = numbered(runs, "parity", *differences).group_by("run_id")
    return parity.agg(pl.max_horizontal(differences).max().alias("parity_difference"))


def staleness_histogram(runs: Runs) -> pl.DataFrame:
    """One row per run and staleness that occurred: `run_id`, `staleness`, `pushes` (how many had it), `share` of them.

    Over all workers and finished epochs; runs without pushes have no row.
    """
    counts = runs.pushes.group_by("run_id", "staleness").agg(pl.len().alias("pushes"))
    share = pl.col("pushes") / pl.col("pushes").sum().over("run_id")
    return counts.with_columns(share=share).sort("run_id", "staleness")
