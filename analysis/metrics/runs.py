"""The derived columns of each run; the phases of its steps; and what it took to reach an accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low
from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.columns import (
    aggregates,
    of_epochs,
    of_row,
    of_site,
    per_run_columns,
    row_aggregates,
    run_aggregates,
)
from analysis.metrics.disturbance import disturbances
from analysis.metrics.epochs import AS_TEXT, measured, numbered, run_and
from analysis.metrics.stragglers import imbalance, step_times
from analysis.runs.published import TYPES, finite
from analysis.runs.reader import once
from parallelbench.errors import ConfigError
from parallelbench.results.tables import CLOSING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.runs.reader import Runs
    from parallelbench.results.declaration import Column


KINDS_SENT = ("gradient", "activation", "parameter")
"""What the bytes are that ranks send: see `parallelbench.measure.traffic.Kind`."""


@once
def per_run(runs: Runs) -> pl.DataFrame:
    """One row per run, in the order of `runs.run`: `run_id` and the columns that `per_run_columns` declares."""
    plain = aggregates(run_aggregates(), steady=~pl.col("warm_up"))
    epochs = measured(runs).group_by("run_id", maintain_order=True).agg(*plain, *of_epochs(per_run_columns()))
    joined = numbered(runs, "run", *(name for name in runs.run.columns if name != "run_id"))
    of_rows = [_over_rows(runs, table, pairs) for table, pairs in row_aggregates().items()]
    for part in (
        epochs,
        _prepared_again(runs),
        _memory(runs),
        _communication(runs),
        _parity(runs),
        _checks(runs),
        disturbances(runs),
        step_times(runs),
        imbalance(runs),
        *of_rows,
    ):
        joined = joined.join(part, on="run_id", how="left", maintain_order="left")
    typed = (pl.col(column.name).cast(TYPES[column.type]) for column in per_run_columns())
    joined = finite(joined)
    for value in of_row(per_run_columns()):  # one by one: they build on each other
        joined = joined.with_columns(value)
    return finite(joined.select(AS_TEXT, *typed))


def _over_rows(runs: Runs, table: str, pairs: list[tuple[Column, Column]]) -> pl.DataFrame:
    """The plain aggregates over all of a run's rows."""
    sources = dict.fromkeys(source.name for source, _ in pairs)
    return numbered(runs, table, *sources).group_by("run_id").agg(aggregates(pairs))


def _prepared_again(runs: Runs) -> pl.DataFrame:
    """What a run's executions after the first took: training needs one."""
    again = numbered(runs, "preprocess", "execution", "execution_time_s", "write_s").filter(pl.col("execution") > 1)
    took_s = pl.col("execution_time_s") + pl.col("write_s").fill_null(0)
    return again.group_by("run_id").agg(took_s.sum().alias("_again_s"))


@once
def _per_rank(runs: Runs) -> pl.DataFrame:
    """One row per run and rank, with its node: its peaks over all epochs, and what it sent in them; null where one
    epoch's is.

    Of host memory, a rank's includes what only its loader's workers hold.
    """
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes", "host_peak_rss_bytes")
    of_workers = pl.when(pl.col("loader_cpu_time_s").is_null()).then(0).otherwise("loader_memory_bytes")
    kinds = [f"{kind}_bytes_sent" for kind in KINDS_SENT]

    def known(column: str, whole: pl.Expr) -> pl.Expr:
        return pl.when(pl.col(column).null_count() == 0).then(whole).alias(column)

    return (
        numbered(runs, "ranks", "rank", "node", *peaks, *kinds, "loader_cpu_time_s", "loader_memory_bytes")
        .lazy()
        .with_columns(pl.col("host_peak_rss_bytes") + of_workers)
        .group_by(run_and("rank"))
        .agg(
            pl.col("run_id", "rank", "node").first(),
            *(known(peak, pl.col(peak).max()) for peak in peaks),
            *(known(kind, pl.col(kind).sum()) for kind in kinds),
        )
        .collect(engine="streaming")
        .sort("_both")
        .with_columns(bytes_sent=pl.sum_horizontal(kinds, ignore_nulls=False))
    )


def _memory(runs: Runs) -> pl.DataFrame:
    """Peak memory per run, device memory of CUDA runs and host memory of CPU runs, and what it leaves of the limit."""
    kind = pl.col("device_type").replace_strict({"cuda": "device", "cpu": "host"}, default=None)
    on_gpus = pl.col("memory_kind") == "device"
    kinds = numbered(runs, "run", "device_type", "devices", "processes", "memory_limit_bytes").select(
        "run_id", "memory_limit_bytes", memory_kind=kind, shared=pl.col("processes") < pl.col("devices")
    )
    ranks = _per_rank(runs).join(kinds, on="run_id")
    ranks = ranks.with_columns(peak=pl.when(on_gpus).then("peak_allocated_bytes").otherwise("host_peak_rss_bytes"))
    of_node = pl.when(pl.col("peak").null_count().over("run_id") == 0).then(pl.col("peak").sum().over("run_id", "node"))
    known = pl.col("peak").null_count() == 0
    reserved = pl.when(pl.col("peak_reserved_bytes").null_count() == 0).then(pl.col("peak_reserved_bytes").max())
    fullest = (
        pl.when(~on_gpus)
        .then("_of_node")
        .otherwise(pl.when("shared").then("peak_reserved_bytes_by_device").otherwise("_reserved"))
    )
    return (
        ranks.with_columns(_of_node=of_node)
        .group_by("run_id", "memory_kind", "shared", "memory_limit_bytes")
        .agg(
            pl.when(known).then(pl.col("peak").max()).alias("peak_memory_max_bytes"),
            pl.when(known).then(pl.col("peak").sum()).alias("peak_memory_sum_bytes"),
            pl.col("_of_node").max(),
            _reserved=reserved,
        )
        .join(_by_device(runs), on="run_id", how="left", maintain_order="left")
        .select(
            "run_id",
            "memory_kind",
            "peak_memory_max_bytes",
            "peak_memory_sum_bytes",
            peak_memory_device_bytes=pl.when("shared")
            .then("peak_allocated_bytes_by_device")
            .otherwise("peak_memory_max_bytes"),
            memory_headroom=1 - fullest / pl.col("memory_limit_bytes"),
        )
    )


def _by_device(runs: Runs) -> pl.DataFrame:
    """`run_id`, and the largest peak on any one device by its column of `ranks`, of runs whose processes drive several.

    Null where any rank and epoch lacks it. Few runs are of this kind, so few texts are read.
    """
    names = ("peak_allocated_bytes_by_device", "peak_reserved_bytes_by_device")
    shared = numbered(runs, "run", "devices", "processes").filter(pl.col("processes") < pl.col("devices"))
    empty = pl.DataFrame(schema=shared.select("run_id").schema | dict.fromkeys(names, pl.String))
    rows = numbered(runs, "ranks", *names) if shared.height else empty
    return (
        rows.join(shared, on="run_id", how="semi")
        .group_by("run_id")
        .agg(
            pl.when(pl.col(name).null_count() == 0)
            .then(pl.col(name).str.split(",").list.eval(pl.element().cast(pl.Int64)).list.max().max())
            .alias(name)
            for name in names
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


def _parity(runs: Runs) -> pl.DataFrame:
    differences = ("loss_difference", "gradient_difference", "parameter_difference", "evaluation_difference")
    parity = numbered(runs, "parity", *differences).group_by("run_id")
    return parity.agg(pl.max_horizontal(differences).max().alias("parity_difference"))


def _checks(runs: Runs) -> pl.DataFrame:
    """Names of the checks by what came of them."""
    rows = numbered(runs, "checks", "check", "passed", "detail")
    passed, failed = pl.col("passed").all().over("run_id", "check"), ~pl.col("passed").fill_null(True)
    names = rows.filter(pl.col("passed").is_not_null()).group_by("run_id", maintain_order=True).agg(
        failed=pl.col("check").filter(failed).unique(maintain_order=True),
        passed=pl.col("check").filter(passed).unique(maintain_order=True),
    )  # fmt: skip
    unknown = rows.filter(pl.col("passed").is_null()).group_by("run_id", maintain_order=True).agg(
        unknown=pl.format("{} ({})", "check", "detail").unique(maintain_order=True)
    )  # fmt: skip
    both = names.join(unknown, on="run_id", how="full", coalesce=True)
    parts: list[pl.Expr] = [
        pl.when(pl.col(name).list.len() > 0).then(pl.format(f"{name}: {{}}", pl.col(name).list.join(", ")))
        for name in ("failed", "passed")
    ]
    parts.append(pl.format("not compared: {}", pl.col("unknown").list.join(", ")))
    stepped = pl.col("check").is_in(("loss", "gradients", "update")) & pl.col("passed").is_not_null()
    ended = rows.group_by("run_id").agg(_unclosed=(pl.col("check") == CLOSING).any(), _stepped=stepped.any())
    return both.select("run_id", checks_made=pl.concat_str(parts, separator="; ", ignore_nulls=True)).join(
        ended, on="run_id", how="left"
    )


def staleness_histogram(runs: Runs) -> pl.DataFrame:
    """One row per run and staleness that occurred: `run_id`, `staleness`, `pushes` (how many had it), `share` of them.

    Over all workers and finished epochs; runs without pushes have no row.
    """
    counts = runs.pushes.group_by("run_id", "staleness").agg(pl.len().alias("pushes"))
    share = pl.col("pushes") / pl.col("pushes").sum().over("run_id")
    return counts.with_columns(share=share).sort("run_id", "staleness")


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
    strategy = pl.col("config_json").str.json_path_match("$.strategy._target_")
    return (
        runs.run.join(phase_times(runs).drop_nulls("communication_s"), on="run_id")  # of few runs
        .filter(strategy.is_in(_ALL_REDUCING))
        .join(per_run(runs), on="run_id")
        .select("run_id", exposed_s="communication_s", ring_s=formula)
        .drop_nulls()
    )


_ALL_REDUCING = [f"parallelbench.strategies.data_parallel.{name}" for name in ("Ddp", "RingDdp")]
"""Classes of strategies whose ranks sum gradients in one ring: a preset may have any name."""
ACCURACY_LADDER = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
"""Candidates for the target of `time_to_accuracy_s`."""


def accuracy_target(best_test_accuracies: Iterable[Sequence[float | None]]) -> float | None:
    """The highest step of `ACCURACY_LADDER` that more than half of each configuration's runs reach; None where there is
    none.

    `best_test_accuracies`: of each configuration, those of its runs. A run that has none reaches no step.
    """
    reached = [median_low([accuracy or 0.0 for accuracy in runs]) for runs in best_test_accuracies if runs]
    return max((step for step in ACCURACY_LADDER if reached and step <= min(reached)), default=None)


def require_accuracy(target: float | None) -> None:
    """Raise `ConfigError` for a target that is no test accuracy; None is no target."""
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target {target:g}: expected a test accuracy above 0 and up to 1, e.g. 0.95 for 95 %")


_THERE = pl.col("test_accuracy") >= pl.col("_target")
Target = float | Mapping[str, float | None]
"""A test accuracy to reach, 0 to 1: of all runs, or by run id (None, or no entry: it has none to reach)."""


def _beside(runs: Runs, target: Target) -> pl.DataFrame:
    """The epochs, with their run's target in the column `_target`."""
    epochs = measured(runs)
    if isinstance(target, (int, float)):
        return epochs.with_columns(_target=target)
    of_run = pl.Series([target.get(run_id) for run_id in runs.run["run_id"]], dtype=pl.Float64)
    return epochs.with_columns(_target=of_run.gather(epochs["run_id"].to_physical()))


def time_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `time_to_accuracy_s`: training time up to and with the first epoch whose test accuracy is
    `target`.

    Training windows of the slowest ranks, without start-up and evaluation; runs that never reach it, and
    resumed ones, have no row.
    """
    reached = _beside(runs, target).filter(_THERE, pl.col("training_time_s").is_not_null())
    return reached.group_by("run_id").agg(time_to_accuracy_s=pl.col("training_time_s").min()).with_columns(AS_TEXT)


def steps_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `steps_to_accuracy`: optimizer steps up to and with the first epoch whose test accuracy is `target`.

    As fine as the epochs are (`measure.steps_per_epoch` shortens them). Runs that never reach it have no row.
    """
    epochs = _beside(runs, target).with_columns(total=pl.col("steps").cum_sum().over("run_id"))
    reached = epochs.filter(_THERE)
    return reached.group_by("run_id").agg(steps_to_accuracy=pl.col("total").min()).with_columns(AS_TEXT)


def step_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id`, and of the first epoch whose test accuracy is `target` its `epoch`, `steps` and the mean `step_time_s`:
    what `steps_to_accuracy` and `time_to_accuracy` are made of, and how fine they are.
    """
    reached = _beside(runs, target).filter(_THERE)
    first = reached.group_by("run_id").agg(pl.col("epoch", "steps", "slowest_epoch_time_s").sort_by("epoch").first())
    return first.select(AS_TEXT, "epoch", "steps", step_time_s=pl.col("slowest_epoch_time_s") / pl.col("steps"))


def energy_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `energy_to_accuracy_j`: energy of all GPUs in the training windows up to and with the first epoch
    whose test accuracy is `target`.

    Null where one of these epochs has none (`telemetry_flags` says why), and of resumed runs: they warm up more than
    once, and what an attempt used after its last checkpoint is in no epoch. Runs that never reach it have no row.
    """
    known = pl.all_horizontal(pl.col("gpu_energy_j", "training_time_s").is_not_null()).all()
    energy = pl.when(known).then(pl.col("gpu_energy_j").sum())
    return _needed(runs, target).group_by("run_id").agg(energy_to_accuracy_j=energy).with_columns(AS_TEXT)


def _needed(runs: Runs, target: Target) -> pl.DataFrame:
    """The epochs before the first that reaches the target, and that one, of the runs that do; they are in order."""
    there = _THERE.fill_null(False)
    before = there.cum_sum().over("run_id") - there.cast(pl.UInt32) == 0
    return _beside(runs, target).filter(there.any().over("run_id"), before)


def co2_to_accuracy(runs: Runs, target: Target) -> pl.DataFrame:
    """`run_id` and `co2_to_accuracy_g`: energy of the training windows up to and with the first epoch whose test
    accuracy is `target`, as in `co2_g` of GPUs and, where known, processors, × the site's grams per kWh.

    Null likewise, and where the site does not name it.
    """
    sums = [
        pl.when(pl.col(name).is_not_null().all()).then(pl.col(name).sum()) for name in ("gpu_energy_j", "cpu_energy_j")
    ]
    at_once = pl.col("training_time_s").is_not_null().all()
    energies = _needed(runs, target).group_by("run_id").agg(gpus=sums[0], processors=sums[1], at_once=at_once)
    rows = energies.with_columns(AS_TEXT).join(runs.run.select("run_id", "device_type", "config_json"), on="run_id")
    on_gpus = pl.col("device_type") == "cuda"
    energy_j = pl.when(on_gpus).then(pl.col("gpus") + pl.col("processors").fill_null(0.0)).otherwise("processors")
    co2_g = pl.when("at_once").then(energy_j / 3.6e6 * of_site("grams_co2_per_kwh"))
    return rows.select("run_id", co2_to_accuracy_g=co2_g)


def efficiency(speed_up: float | None, *, times_devices: float | None) -> float | None:
    """Scaling efficiency, 1 = ideal: the speed-up over the baseline ÷ how many times as many devices it takes: with one
    device as baseline t_1 ÷ (n·t_n) under strong scaling.

    Under weak scaling the speed-up is the ratio of throughputs, so this is throughput_n ÷ (n·throughput_1).
    """
    return None if speed_up is None or times_devices is None else speed_up / times_devices
