"""What is derived from the raw rows of a run, and how. Nothing else in the suite aggregates over ranks or
epochs.

A metric that was not measured, or that needs more epochs than there are, is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Iterable

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
"""What the bytes are that ranks send: see `parallelbench.probes.communication.Kind`."""
ACCURACY_LADDER = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
"""Candidates for the target of `time_to_accuracy_s`: the highest that all compared runs reach is taken."""


@lru_cache(maxsize=8)
def per_epoch(runs: Runs) -> pl.DataFrame:
    """The rows of `runs.epochs` with what needs all ranks of an epoch, in the order of the runs and their epochs.

    `epoch_time_s` and `evaluation_time_s`: the slowest rank's. `training_time_s`: sum of `epoch_time_s` up to and with
    this epoch; null in a resumed run. `throughput_samples_per_s`: samples over all data shards ÷ `epoch_time_s`.
    `warm_up`: whether it is the first epoch of an attempt: of the run, or of where it was resumed.
    """
    derived = ("epoch_time_s", "evaluation_time_s", "training_time_s", "throughput_samples_per_s", "warm_up")
    columns = (*runs.epochs.columns, *derived)
    return _epochs(runs, *(name for name in columns if name not in derived)).select(columns).with_columns(_AS_TEXT)


# Ids have 64 characters. As numbers, a million rows are grouped and joined in a fraction of the time.
_AS_TEXT = pl.col("run_id").cast(pl.String)


@lru_cache(maxsize=8)
def _ids(runs: Runs) -> pl.Enum:
    return pl.Enum(runs.run["run_id"])


def _numbered(runs: Runs, table: str, *columns: str) -> pl.DataFrame:
    """These columns of a table, and `run_id` as an enumeration; only rows of the runs in `runs.run`."""
    rows = runs.select(table, "run_id", *columns)
    return rows.with_columns(pl.col("run_id").cast(_ids(runs), strict=False)).drop_nulls("run_id")


def _with(column: str) -> pl.Expr:
    """`run_id` and a further number in one."""
    return (pl.col("run_id").to_physical().cast(pl.Int64) * 2**32 + pl.col(column)).alias("_both")


@lru_cache(maxsize=8)
def _epochs(runs: Runs, *columns: str) -> pl.DataFrame:
    """`per_epoch` of some columns, and `owned_samples`: those that its ranks say they trained on."""
    slowest = (
        _numbered(runs, "ranks", "epoch", "epoch_time_s", "evaluation_time_s", "train_samples")
        .lazy()
        .group_by(_with("epoch"))
        .agg(
            pl.col("epoch_time_s", "evaluation_time_s").max(),
            pl.col("train_samples").sum().alias("owned_samples"),
        )
        .collect(engine="streaming")  # twice as fast here
    )
    needed = dict.fromkeys(("epoch", "attempt", "train_samples", *columns))
    needed.pop("run_id", None)
    return (
        _numbered(runs, "epochs", *needed)
        .with_columns(_with("epoch"))
        .join(slowest, on="_both", how="left")
        .sort("_both")
        .drop("_both")
        .with_columns(
            # A resumed run has warmed up more than once: its sum is no other run's.
            training_time_s=pl.when(pl.col("attempt").n_unique().over("run_id") == 1).then(
                pl.col("epoch_time_s").cum_sum().over("run_id")
            ),
            throughput_samples_per_s=pl.col("train_samples") / pl.col("epoch_time_s"),
            warm_up=pl.col("epoch") == pl.col("epoch").min().over("run_id", "attempt"),
        )
    )


def _measured(runs: Runs) -> pl.DataFrame:
    """Of each epoch what the metrics of its run are made of."""
    return _epochs(runs, *_MEASURED)


_ENERGIES = ("gpu_energy_j", "gpu_power_mean_w", "gpu_power_max_w", "cpu_energy_j")
_MEASURED = ("steps", "test_accuracy", "telemetry_flags", *_ENERGIES)


def miscounted(runs: Runs) -> set[str]:
    """The runs whose ranks' samples don't add up to an epoch's."""
    wrong = _measured(runs).filter(pl.col("owned_samples") != pl.col("train_samples"))
    return set(wrong["run_id"].unique().cast(pl.String))


@lru_cache(maxsize=8)
def per_run(runs: Runs) -> pl.DataFrame:
    """One row per run, in the order of `runs.run`: `run_id` and the columns that `PER_RUN` explains."""
    later = ~pl.col("warm_up")
    epochs = _measured(runs).group_by("run_id").agg(
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
    joined = _numbered(runs, "run", *(name for name in runs.run.columns if name != "run_id"))
    for found in (epochs, _energy(runs), _memory(runs), _communication(runs), _staleness(runs), _parity(runs)):
        joined = joined.join(found, on="run_id", how="left", maintain_order="left")
    return _derive(joined).select(_AS_TEXT, *(metric.name for metric in PER_RUN))


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
    steady = _measured(runs).filter(~pl.col("warm_up"))
    flagged = steady.select("run_id", "telemetry_flags").drop_nulls().unique()
    flags = pl.col("telemetry_flags").str.split(" ").explode().unique().sort()
    energies = steady.filter(pl.any_horizontal(pl.col(_ENERGIES).is_not_null())).group_by("run_id").agg(
        pl.col("gpu_energy_j").median().alias("gpu_energy_per_epoch_j"),
        (pl.col("gpu_energy_j") / pl.col("train_samples")).median().alias("gpu_energy_per_sample_j"),
        pl.col("gpu_power_mean_w").median(),
        pl.col("gpu_power_max_w").max(),
        pl.col("cpu_energy_j").median().alias("cpu_energy_per_epoch_j"),
    )  # fmt: skip
    found = flagged.group_by("run_id").agg(flags.str.join(" ").alias("energy_flags"))
    return energies.join(found, on="run_id", how="full", coalesce=True)


@lru_cache(maxsize=8)
def _per_rank(runs: Runs) -> pl.DataFrame:
    """One row per run and rank: its peaks over all epochs (null where one is), and what it sent in them."""
    peaks = ("peak_allocated_bytes", "host_peak_rss_bytes")
    kinds = [f"{kind}_bytes_sent" for kind in KINDS_SENT]
    return (
        _numbered(runs, "ranks", "rank", *peaks, *kinds)
        .lazy()
        .group_by(_with("rank"))
        .agg(
            pl.col("run_id", "rank").first(),
            *(pl.when(pl.col(peak).null_count() == 0).then(pl.col(peak).max()).alias(peak) for peak in peaks),
            pl.col(kinds).sum(),
        )
        .collect(engine="streaming")
        .sort("_both")
        .with_columns(bytes_sent=pl.sum_horizontal(kinds))
    )


def _memory(runs: Runs) -> pl.DataFrame:
    """Peak memory per run: device memory of CUDA runs, host memory of CPU runs."""
    kind = pl.col("device_type").replace_strict({"cuda": "device", "cpu": "host"}, default=None)
    peak = pl.when(pl.col("memory_kind") == "device").then("peak_allocated_bytes").otherwise("host_peak_rss_bytes")
    known = pl.col("peak").null_count() == 0
    kinds = _numbered(runs, "run", "device_type").select("run_id", kind.alias("memory_kind"))
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
    steps = _measured(runs).group_by("run_id").agg(pl.col("steps").sum())
    sent = pl.col("bytes_sent", *(f"{kind}_bytes_sent" for kind in KINDS_SENT))
    return (
        _per_rank(runs)
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
    pushes = _numbered(runs, "pushes", "staleness").group_by("run_id")
    return pushes.agg(staleness.mean().alias("staleness_mean"), staleness.max().alias("staleness_max"))


def staleness_histogram(runs: Runs) -> pl.DataFrame:
    """One row per run and staleness that occurred: `run_id`, `staleness`, `pushes` (how many had it), `share` of them.

    Over all workers and finished epochs; runs without pushes have no row.
    """
    counts = runs.pushes.group_by("run_id", "staleness").agg(pl.len().alias("pushes"))
    share = pl.col("pushes") / pl.col("pushes").sum().over("run_id")
    return counts.with_columns(share=share).sort("run_id", "staleness")


def _parity(runs: Runs) -> pl.DataFrame:
    differences = ("loss_difference", "gradient_difference", "parameter_difference", "evaluation_difference")
    parity = _numbered(runs, "parity", *differences).group_by("run_id")
    return parity.agg(pl.max_horizontal(differences).max().alias("parity_difference"))


PHASES = ("data_wait", "host_to_device", "forward", "backward", "communication", "bubble", "optimizer", "other")
"""What a step's time is spent on: columns of `phases`, in the order of a step."""


def phase_times(runs: Runs) -> pl.DataFrame:
    """One row per run that was attributed: `run_id`, `step_time_s` and each phase's time, s per step.

    Means over all ranks and attributed steps; they sum to `step_time_s`. A rank that has no such phase spends no time
    on it; null where no rank has it.
    """
    columns = [f"{phase}_s" for phase in PHASES]
    known = [pl.when(pl.col(name).count() > 0).then(pl.col(name).sum() / pl.len()).alias(name) for name in columns]
    return runs.phases.group_by("run_id", maintain_order=True).agg(pl.col("step_time_s").mean(), *known)


def measured_bubbles(runs: Runs) -> pl.DataFrame:
    """`run_id` and `measured_bubble` of runs whose ranks idle by a schedule: bubble ÷ (forward + backward + bubble).

    Over all ranks and attributed steps; what a schedule's formula leaves out (optimizer, loader) is left out here, too.
    """
    at_work = pl.sum_horizontal("forward_s", "backward_s")
    return (
        phase_times(runs)
        .drop_nulls("bubble_s")
        .select("run_id", measured_bubble=pl.col("bubble_s") / (at_work + pl.col("bubble_s")))
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


def accuracy_target(best_test_accuracies: Iterable[float | None]) -> float | None:
    """The highest step of `ACCURACY_LADDER` that all of them reach; None where one reaches none or has
    none.
    """
    best = list(best_test_accuracies)
    known = [accuracy for accuracy in best if accuracy is not None]
    if not known or len(known) < len(best):
        return None
    return max((step for step in ACCURACY_LADDER if step <= min(known)), default=None)


Target = float | Mapping[str, float | None]
"""A test accuracy to reach, 0 to 1: of all runs, or by run id (None, or no entry: it has none to reach)."""


def _beside(runs: Runs, target: Target) -> pl.DataFrame:
    """The epochs, with their run's target in the column `_target`."""
    epochs = _measured(runs)
    if isinstance(target, (int, float)):
        return epochs.with_columns(_target=target)
    of_run = pl.Series([target.get(run_id) for run_id in runs.run["run_id"]], dtype=pl.Float64)
    return epochs.with_columns(_target=of_run.gather(epochs["run_id"].to_physical()))


def time_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `time_to_accuracy_s`: training time up to and with the first epoch whose test accuracy is
    `target`.

    Training windows of the slowest ranks, without start-up and evaluation; runs that never get there, and
    resumed ones, are left out.
    """
    epochs = _beside(runs, target)
    reached = epochs.filter(pl.col("test_accuracy") >= pl.col("_target"), pl.col("training_time_s").is_not_null())
    return reached.group_by("run_id").agg(time_to_accuracy_s=pl.col("training_time_s").min()).with_columns(_AS_TEXT)


def steps_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `steps_to_accuracy`: optimizer steps up to and with the first epoch whose test accuracy is `target`.

    As fine as the epochs are (`measure.steps_per_epoch` shortens them); runs that never get there are left out.
    """
    epochs = _beside(runs, target).with_columns(total=pl.col("steps").cum_sum().over("run_id"))
    reached = epochs.filter(pl.col("test_accuracy") >= pl.col("_target"))
    return reached.group_by("run_id").agg(steps_to_accuracy=pl.col("total").min()).with_columns(_AS_TEXT)


def energy_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `energy_to_accuracy_j`: energy of all GPUs in the training windows up to and with the first epoch
    whose test accuracy is `target`.

    Null where one of these epochs has none (`telemetry_flags` says why); runs that never get there are left out.
    """
    epochs = _beside(runs, target)
    there = (pl.col("test_accuracy") >= pl.col("_target")).fill_null(False)
    # Epochs are in order: those before the first that is there, and that one.
    needed = epochs.filter(there.any().over("run_id"), there.cum_sum().over("run_id") - there.cast(pl.UInt32) == 0)
    known = pl.col("gpu_energy_j").is_not_null().all()
    sums = needed.group_by("run_id").agg(energy_to_accuracy_j=pl.when(known).then(pl.col("gpu_energy_j").sum()))
    return sums.with_columns(_AS_TEXT)


def efficiency(speed_up: float | None, *, devices: int) -> float | None:
    """Scaling efficiency, 1 = ideal: the speed-up over one device ÷ the devices, t_1 ÷ (n·t_n) under strong
    scaling.

    Under weak scaling the speed-up is the ratio of throughputs, so this is throughput_n ÷ (n·throughput_1).
    """
    return None if speed_up is None else speed_up / devices
