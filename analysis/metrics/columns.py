"""All derived columns by the table that they are in: those that take a formula, and aggregates as polars expressions.

Plain aggregates are declared beside their raw column (`parallelbench.results.tables`); only here it is said what
`Over` computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.tokens import in_nats, model_flop_per_token, peak_flop_per_s, perplexity
from parallelbench.results.declaration import Column, Over, Place, Show, Window, count, flag, share, text
from parallelbench.results.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class Metric(Column):
    """A column that expressions compute. One that takes rows of other tables is none: its module joins it."""

    epochs: pl.Expr | None = field(default=None, compare=False)
    """One value out of a run's epochs, which `row` may take by the column's own name."""
    row: pl.Expr | None = field(default=None, compare=False)
    """The value, of a row that has all columns which are declared before."""


def of_epochs(columns: Iterable[Column]) -> list[pl.Expr]:
    """Those that have an expression of a run's epochs, for a `group_by`."""
    return [c.epochs.alias(c.name) for c in columns if isinstance(c, Metric) and c.epochs is not None]


def of_row(columns: Iterable[Column]) -> list[pl.Expr]:
    """Those that have an expression of their row."""
    return [c.row.alias(c.name) for c in columns if isinstance(c, Metric) and c.row is not None]


def aggregate(values: pl.Expr | str, over: Over | None) -> pl.Expr:
    """One value out of several."""
    assert over is not None
    return _EXPRESSIONS[over](pl.col(values) if isinstance(values, str) else values)


def _whole(values: pl.Expr, result: pl.Expr) -> pl.Expr:
    return pl.when(values.null_count() == 0, values.len() > 0).then(result)


def _bits(values: pl.Expr) -> pl.Expr:
    return pl.when(values.count() > 0).then(values.drop_nulls().bitwise_or())


def _flags(values: pl.Expr) -> pl.Expr:
    # Unique texts first: there are few of them, and many rows.
    flags = values.drop_nulls().unique().str.split(" ").explode().unique().sort()
    return pl.when(values.count() > 0).then(flags.str.join(" "))


_EXPRESSIONS: dict[Over, Callable[[pl.Expr], pl.Expr]] = {
    Over.SUM: lambda values: _whole(values, values.sum()),
    Over.MEAN: lambda values: _whole(values, values.mean()),
    Over.MEDIAN: pl.Expr.median,
    Over.MAX: pl.Expr.max,
    Over.MIN: pl.Expr.min,
    Over.LAST: lambda values: values.drop_nulls().last(),
    Over.ANY: pl.Expr.max,
    Over.BITS: _bits,
    Over.FLAGS: _flags,
    Over.FIRST: lambda values: values.drop_nulls().first(),
    Over.SAME: pl.Expr.first,
}


def of_site(key: str) -> pl.Expr:
    """A number of the run's site; null where it has none."""
    return pl.col("config_json").str.json_path_match(f"$.site.{key}").cast(pl.Float64, strict=False)


def _energy_j() -> pl.Expr:
    """Of a training: GPUs and, where known, processors; on CPUs processors."""
    gpus, processors = pl.col("training_gpu_energy_j"), pl.col("training_cpu_energy_j")
    on_gpus = pl.col("device_type") == "cuda"
    return pl.when(on_gpus).then(gpus + processors.fill_null(0.0)).otherwise(processors)


WARM_UP = pl.col("epoch") == pl.col("epoch").min().over("run_id", "attempt")
"""Of rows of an epoch each: whether it is the first of its attempt."""
FEWEST_STEPS = {50: 1, 95: 20, 99: 100}
"""Percentile → fewest sampled steps of which it is given: of fewer, less than one lies beyond it."""
_STEADY = ~pl.col("warm_up")
_SLOWEST_S = pl.col("slowest_epoch_time_s")
_COMPLETE = pl.col("epochs_finished") == pl.col("epochs")
_AT_ONCE = pl.col("resumed_after").is_null()


# A column takes one line, or as few as its words do: the formatter would give each argument one.
# fmt: off
_OTHERWISE = "the data are not tokens"
_NO_NATS = f"{_OTHERWISE}, or `loss` is not cross entropy with whole labels"
OF_TOKENS = (
    Metric("tokens_per_s", "tokens trained on per second: tokens_per_sample × throughput_samples_per_s",
        null=f"{_OTHERWISE}, or no epoch but each attempt's first one", repeats=Over.MEDIAN, heading="Token throughput",
        where_known=True, window="steady",
        row=pl.col("tokens_per_sample") * pl.col("throughput_samples_per_s")),
    Metric("model_flop_per_token", "floating-point operations of training on a token, without what is computed twice: "
        "6·N + 12·L·H·Q·T, as in appendix B of PaLM (arXiv 2204.02311), with the parameters of matrices as N; from the "
        "counted layers", null=f"{_OTHERWISE}, or some parameters are frozen, or the model was not counted",
        repeats=Over.MEDIAN, heading="Operations per token", tables=("configurations",), where_known=True,
        row=model_flop_per_token()),
    Metric("peak_flop_per_s", "what mfu rests on: a device's fastest matrix product as probed at the run's start or "
        "end, CPUs in fp32, GPUs in fp16", null="the data are not tokens, not probed (`measure.probe`), or the run's "
        "arithmetic is another (GPUs: bf16 has fp16's peak)", repeats=Over.MEDIAN, heading="Measured peak of a device",
        tables=("configurations",), where_known=True,
        row=peak_flop_per_s()),
    Metric("mfu", "model FLOP utilisation: model_flop_per_token × tokens_per_s ÷ (devices × peak_flop_per_s)",
        null="one of these is null", repeats=Over.MEDIAN, heading="MFU of the measured peak", where_known=True,
        type="float64", unit="share", window="steady",
        row=pl.col("model_flop_per_token") * pl.col("tokens_per_s") / (pl.col("devices") * pl.col("peak_flop_per_s"))),
    Metric("final_loss_per_token", "test_loss after the last epoch, in nats per token",
        null=f"the run did not finish, {_NO_NATS}", repeats=Over.MEDIAN, heading="Final test loss, nats per token",
        where_known=True,
        epochs=pl.col("test_loss").last(), row=pl.when(_COMPLETE, in_nats()).then("final_loss_per_token")),
    Metric("final_perplexity", "exponential of final_loss_per_token", null=f"the run did not finish, {_NO_NATS}",
        repeats=Over.MEDIAN, heading="Final perplexity", where_known=True,
        row=perplexity("final_loss_per_token")),
)
"""Of a run."""


PER_EPOCH = (
    Metric("training_time_s", "sum of slowest_epoch_time_s up to and with this epoch", window="whole",
        null="the run was resumed, so it has warmed up more than once",
        row=pl.when(pl.col("attempt").n_unique().over("run_id") == 1).then(_SLOWEST_S.cum_sum().over("run_id"))),
    Metric("epoch_throughput_samples_per_s", "samples trained on over all data shards ÷ slowest_epoch_time_s",
        window="steady",
        row=pl.col("train_samples") / _SLOWEST_S),
    Metric("warm_up", "whether it is the first epoch of an attempt",
        type="bool", row=WARM_UP),
    Column("perplexity", "exponential of test_loss, which is in nats per token", null=_NO_NATS),
)
"""What is computed of each epoch, besides plain aggregates."""

_SENT = "sent to other ranks while training, library collectives by the textbook algorithm with the fewest bytes"
_BUSIEST = "of the one rank that sends most over all finished epochs"
_UNFINISHED = "the run did not finish"
_SEVERAL = "the run did not finish, or in several attempts, each of which started up anew"
_NOT_COUNTED = "not counted on every rank"


sent = partial(Column, unit="bytes", null=_NOT_COUNTED, repeats=Over.MEDIAN)
_WINDOWS: dict[Window, tuple[str, str]] = {
    "first": ("the first epoch", "no epoch finished"),
    "second": ("the second epoch", "not trained, or an attempt began with it"),
    "steady": ("the epochs without each attempt's first one, taken together", "no such epoch"),
    "whole": ("all epochs, taken together", "no epoch finished"),
}
DISTURBANCE = tuple(
    column
    for window, (epochs, null) in _WINDOWS.items()
    for column in (
        Column(f"{window}_lost_share", f"time that others kept a rank off a core ÷ its measured time, in {epochs}; of "
            "the rank that lost most; above 1 if it lost several cores", null=f"{null}, or no rank measured it"),
        flag(f"{window}_disturbed", f"whether others took more of {epochs}, than docs/measurement.md allows: of a "
            "rank's cores, by computing on one of the GPUs, or since ranks stood still",
            null=f"{null}, or not measured in all of it and, as far as it was, within the limit", repeats=Over.ANY),
    )
)
"""Of a run's windows. What was measured in a disturbed one is shown, and compared with nothing."""
_TAIL = (
    "time of a sampled step on its slowest rank, in the epochs without each attempt's first one, and without each "
    "epoch's first step"
)
_OWN_TIME = (
    "time that a rank itself needs, as all wait for the slowest one: on CPUs its processor time, its loader's included "
    "(waiting that spins is in it); of a user's program the time until its first backward pass; else, on GPUs, that of "
    "attributed steps without communication and bubble"
)
_NO_OWN_TIME = "on GPUs without `measure.attribution_steps`, or communication was not told apart, or not measured"

PER_RUN = (
    Metric("epochs_finished", "epochs that every rank finished", heading="Epochs finished", tables=("runs",),
        type="int32", epochs=pl.len(), row=pl.col("epochs_finished").fill_null(0)),
    Metric("first_epoch_time_s", "training window of epoch 1, warm-up included, on its slowest rank",
        null="no epoch finished", window="first", repeats=Over.MEDIAN, heading="First epoch",
        epochs=_SLOWEST_S.filter(pl.col("epoch") == 1, pl.col("warm_up")).first()),
    Metric("second_epoch_time_s", "training window of epoch 2 on its slowest rank",
        null="not trained, or an attempt began with it", window="second", repeats=Over.MEDIAN, heading="Second epoch",
        tables=("runs",),
        epochs=_SLOWEST_S.filter(pl.col("epoch") == 2, _STEADY).first()),
    Metric("steady_step_time_s", "slowest_epoch_time_s ÷ the epoch's optimizer steps: median over the epochs without "
        "each attempt's first one", null="no epoch but each attempt's first one, or no step in it", repeats=Over.MEDIAN,
        heading="Step", tables=("runs",), show=Show.MILLISECONDS, window="steady",
        epochs=(_SLOWEST_S / pl.col("steps")).filter(_STEADY, pl.col("steps") > 0).median()),
    Metric("steady_epochs", "epochs that every rank finished, without each attempt's first one", null="none",
        type="int32", epochs=pl.when(_STEADY.any()).then(_STEADY.sum())),
    *DISTURBANCE,
    *(Column(f"step_time_p{percent}_s", f"{_TAIL}: percentile {percent}", null=f"fewer than {fewest} such steps",
        window="steady", repeats=Over.MEDIAN, heading=f"Step, p{percent}", show=Show.MILLISECONDS, where_known=True)
      for percent, fewest in FEWEST_STEPS.items()),
    Column("rank_imbalance", f"slowest ÷ median rank (of an even number the faster of the two in the middle) by the "
        f"{_OWN_TIME}; median over these epochs or steps, without each attempt's first epoch",
        null=f"one rank, or {_NO_OWN_TIME}", window="steady", repeats=Over.MEDIAN, heading="Slowest ÷ median rank",
        where_known=True),
    Column("node_imbalance", "slowest ÷ median node, likewise, each node by its median rank",
        null=f"one node, or {_NO_OWN_TIME}", window="steady", repeats=Over.MEDIAN, heading="Slowest ÷ median node",
        where_known=True),
    count("slow_rank", "the rank that was the slowest most often, likewise", null=f"one rank, or {_NO_OWN_TIME}",
        heading="Slowest rank", tables=("runs",), where_known=True),
    share("slow_rank_share", "share of these epochs or steps in which it was", null=f"one rank, or {_NO_OWN_TIME}",
        heading="Slowest rank, how often", tables=("runs",), where_known=True),
    Metric("allocator_retries", "how often torch's allocator found no room on a GPU, and asked again after giving "
        "its cache back, over all ranks and the epochs without each attempt's first one: above 0, a device was at its "
        "memory's limit, and slower", null="no GPU, TensorFlow, a program, or no such epoch", repeats=Over.MAX,
        heading="Allocator retries", where_known=True,
        type="int32", epochs=aggregate(pl.col("allocator_retries_sum").filter(_STEADY), Over.SUM)),
    Metric("startup_without_parity_s", "launch to the end of the first step, without the parity check, which only this "
        "suite runs", null="not reached", repeats=Over.MEDIAN, heading="Start-up", tables=("configurations",),
        row=pl.col("startup_s") - pl.col("startup_parity_s").fill_null(0)),
    Metric("total_training_time_s", "sum over all epochs of the slowest rank's training window, warm-up included",
        null=_SEVERAL, window="whole", repeats=Over.MEDIAN, heading="Training", tables=("runs",),
        epochs=aggregate(_SLOWEST_S, Over.SUM), row=pl.when(_COMPLETE, _AT_ONCE).then("total_training_time_s")),
    Metric("total_time_s", "startup_without_parity_s + total_training_time_s − startup_first_step_s (step 1 belongs to "
        "epoch 1)", null=_SEVERAL, window="whole", repeats=Over.MEDIAN,
        row=pl.col("startup_without_parity_s") + pl.col("total_training_time_s") - pl.col("startup_first_step_s")),
    Metric("end_to_end_time_s", "preprocess_time_s, without executions after the first, + total_time_s: from the "
        "stored training set to the end of the training", null=f"nothing was preprocessed or trained, {_SEVERAL}",
        window="whole", repeats=Over.MEDIAN, heading="Preprocessing and training",
        row=pl.col("preprocess_time_s") - pl.col("_again_s").fill_null(0) + pl.col("total_time_s")),
    Metric("throughput_samples_per_s", "samples trained on per epoch over all data shards ÷ steady_epoch_time_s",
        null="no epoch but each attempt's first one", window="steady", repeats=Over.MEDIAN, heading="Throughput",
        epochs=pl.col("train_samples").filter(_STEADY).median(),
        row=pl.col("throughput_samples_per_s") / pl.col("steady_epoch_time_s")),
    Metric("least_flop_per_s", "floating-point operations per second and device that this throughput takes at least: "
        "least_flop_per_sample × throughput_samples_per_s ÷ devices",
        null="no throughput, or the model was not counted", window="steady",
        row=pl.col("least_flop_per_sample") * pl.col("throughput_samples_per_s") / pl.col("devices")),
    *OF_TOKENS,
    Metric("throughput_with_startup_samples_per_s", "samples trained on in all epochs ÷ total_time_s", null=_SEVERAL,
        window="whole",
        epochs=pl.col("train_samples").sum(),
        row=pl.col("throughput_with_startup_samples_per_s") / pl.col("total_time_s")),
    text("memory_kind", "device: allocated by tensors on GPUs; host: resident set of the processes, on CPUs",
        null="the device is unknown", repeats=Over.FIRST),
    Column("peak_memory_max_bytes", "each rank's peak over all epochs, the largest of them; memory_kind says of which "
        "memory. Of a host's it includes what only the rank's loader workers hold at the window's end",
        null="not measured on every rank, or workers had ended by then", repeats=Over.MEDIAN,
        heading="Memory, largest process"),
    Column("peak_memory_device_bytes", "each device's peak over all epochs, the largest of them; where each process "
        "has one device, the same as peak_memory_max_bytes", null="not measured on every rank, or one process drives "
        "several devices that share its memory (CPUs)", repeats=Over.MEDIAN, heading="Memory, largest device"),
    Column("peak_memory_sum_bytes", "each rank's peak over all epochs, as in peak_memory_max_bytes, their sum",
        null="not measured on every rank, or workers had ended by then",
        repeats=Over.MEDIAN, heading="Memory, all processes", brief="mem.\nMiB"),
    share("memory_headroom", "1 − the peak ÷ memory_limit_bytes: on GPUs the fullest one's peak of what torch's "
        "allocator held, without CUDA's own memory; on CPUs the peaks of the fullest node's ranks and "
        "loaders, added up: pages that they share count for each, so it may be below 0",
        null="the limit is unknown, not measured on every rank, or TensorFlow on GPUs", repeats=Over.MIN,
        heading="Memory headroom", where_known=True),
    Column("bytes_sent_per_step_sum", f"{_SENT}: sum over all finished epochs and all ranks ÷ optimizer steps",
        unit="bytes", null=_NOT_COUNTED, repeats=Over.MEDIAN, heading="Sent per step by textbook, all processes",
        show=Show.SENT, brief="sent\nMiB"),
    sent("gradient_bytes_sent_per_step_sum", "gradients among bytes_sent_per_step_sum"),
    sent("activation_bytes_sent_per_step_sum", "activations and their gradients among bytes_sent_per_step_sum"),
    sent("parameter_bytes_sent_per_step_sum", "parameters and buffers among bytes_sent_per_step_sum"),
    Column("bytes_sent_per_step_busiest", f"{_SENT} per step, {_BUSIEST}", unit="bytes", null=_NOT_COUNTED,
        repeats=Over.MEDIAN, heading="Sent per step by textbook, busiest process", tables=("runs",), show=Show.SENT),
    sent("gradient_bytes_sent_per_step_busiest", "gradients among bytes_sent_per_step_busiest"),
    sent("activation_bytes_sent_per_step_busiest", "activations and their gradients among bytes_sent_per_step_busiest"),
    sent("parameter_bytes_sent_per_step_busiest", "parameters and buffers among bytes_sent_per_step_busiest"),
    Metric("gpu_energy_per_sample_j", "GPU energy of an epoch ÷ the samples trained on: median over the epochs without "
        "each attempt's first one", null="no GPU, or no telemetry of all of them (measure.telemetry_hz)",
        window="steady", repeats=Over.MEDIAN, heading="GPU energy per sample", tables=("energy",),
        epochs=(pl.col("gpu_energy_j") / pl.col("train_samples")).filter(_STEADY).median()),
    Metric("gpu_hours", "devices × total_time_s ÷ 3600: start-up and training, without parity check and evaluation",
        unit="h", null=f"no GPU, or {_SEVERAL}", window="whole", repeats=Over.MEDIAN, heading="GPU-hours of a run",
        tables=("energy",),
        row=pl.when(pl.col("device_type") == "cuda").then(pl.col("devices") * pl.col("total_time_s") / 3600)),
    Metric("device_hours", "devices × total_training_time_s ÷ 3600: training alone, on devices of any kind", unit="h",
        null=_SEVERAL, window="whole", repeats=Over.MEDIAN, heading="Device-hours of training", tables=("energy",),
        row=pl.col("devices") * pl.col("total_training_time_s") / 3600),
    Metric("cost", "device_hours × site.price_per_device_hour, in that one's currency", type="float64",
        null=f"the run's site names no price, {_SEVERAL}", window="whole", repeats=Over.MEDIAN,
        heading="Cost of training", tables=("energy",), where_known=True,
        row=pl.col("device_hours") * of_site("price_per_device_hour")),
    Metric("co2_g", "energy of the training windows × site.grams_co2_per_kwh: of all GPUs, and of the processors "
        "where it was measured (RAPL, other programs' work included); on CPUs of these alone",
        null=f"the run's site does not name it, no energy of an epoch, {_SEVERAL}", window="whole",
        repeats=Over.MEDIAN, heading="CO₂ of training", tables=("energy",), where_known=True,
        row=pl.when(_COMPLETE, _AT_ONCE).then(_energy_j() / 3.6e6 * of_site("grams_co2_per_kwh"))),
    Metric("final_test_accuracy", "test accuracy after the last epoch",
        null=f"{_UNFINISHED}, or a user's program, whose accuracy is not known", repeats=Over.MEDIAN,
        heading="Final test accuracy", brief="test\nacc.", type="float64", unit="share",
        epochs=pl.col("test_accuracy").last(), row=pl.when(_COMPLETE).then("final_test_accuracy")),
    Column("parity_difference", "largest of the parity check's loss, gradient, parameter and evaluation differences",
        null="not checked", repeats=Over.MAX, excluded_too=True, heading="Parity difference", tables=("runs",),
        show=Show.SCIENTIFIC),
    Metric("closed", "whether the closing check, which follows the last epoch, ended",
        null="not asked for, or the run has no result", type="bool",
        row=pl.when("_unclosed").then(pl.lit(False)).when(pl.col("closing_check_s").is_not_null()).then(pl.lit(True))),
    Metric("parity_small_only", "whether parity was checked on a smaller model alone (`parity_model`): no step of the "
        "whole one was compared after the training", null="parity was not checked", type="bool",
        row=pl.when(pl.col("parity_passed").is_not_null())
        .then(pl.col("parity_model").is_not_null() & ~pl.col("_stepped").fill_null(value=False))),
    text("checks_made", "what was checked during and after training, and failed or passed; and what was not compared",
        null="no such check was made", heading="Checks of what was trained", tables=("runs",)),
)
"""What is computed of each run, besides plain aggregates."""


_NO_TIME = "no target, a repeat of the configuration never reaches it, or the run was resumed"
PER_FACT = (
    text("group", "runs of the same work: only within it are runs compared", repeats=Over.SAME),
    text("configuration", "strategy × devices", repeats=Over.SAME, heading="Configuration",
        tables=("configurations", "energy"), show=Show.CONFIGURATION, brief="configuration"),
    text("variant", "strategy, and the options in which it differs from others of its name", repeats=Over.SAME),
    count("configuration_place", "the index of its configuration in the order of all tables", repeats=Over.SAME),
    text("exclusion", "why the run doesn't count in comparisons of time and memory", null="it counts",
        heading="Excluded from comparisons", tables=("runs",), show=Show.EXCLUSION, beside=("exclusion_detail",)),
    text("exclusion_detail", "the run's own reason for its exclusion", null="it has none"),
    flag("displayed", "whether the numbers of its configuration are computed from it: it counts, or others disturbed "
        "it and none of its configuration counts"),
    share("accuracy_target", "the accuracy of `report --target`; without it, the highest step of a fixed ladder of "
        "accuracies that more than half of each configuration's runs reach, found after training", null="one "
        "configuration reaches no step of the ladder", repeats=Over.SAME, heading="Target", tables=("energy",)),
    Column("time_to_accuracy_s", "training time to accuracy_target",
        null="no target, a repeat of the configuration never reaches it, or the run was resumed", window="whole",
        repeats=Over.MEDIAN),
    Column("energy_to_accuracy_j", "the GPUs' energy while training to accuracy_target",
        null="no target, a repeat of the configuration never reaches it, an epoch without energy, or the run was "
        "resumed", window="whole", repeats=Over.MEDIAN, heading="GPU energy to the target accuracy",
        tables=("energy",)),
    Column("device_hours_to_accuracy", "devices × time_to_accuracy_s ÷ 3600", unit="h", null=_NO_TIME, window="whole",
        repeats=Over.MEDIAN),
    Column("cost_to_accuracy", "device_hours_to_accuracy × site.price_per_device_hour, in that one's currency",
        null=f"the run's site names no price, {_NO_TIME}", window="whole", repeats=Over.MEDIAN),
    Column("co2_to_accuracy_g", "energy of the training windows up to accuracy_target × site.grams_co2_per_kwh, as in "
        "co2_g", null=f"the run's site does not name it, an epoch without energy, {_NO_TIME}", window="whole",
        repeats=Over.MEDIAN),
)
"""What `facts` adds to the table `run` and to `per_run`."""

_INTERVAL = "end of the 95 % interval of"
_TOO_FEW = "too few pairs, or the baseline itself"
_NO_PAIR = "no pair of repeats"
_NO_SPEED = "`verdict` says why, or none of its runs counts"
_OTHER_WAY = "the baseline has several devices and another strategy or options, so the ratio is not of devices alone"
PER_CONFIGURATION = (
    text("outcomes", "how the runs of this configuration ended"),
    count("runs", "runs of this configuration"),
    text("exclusions", "how many runs don't count, by the reason", null="all count"),
    count("repeats", "runs that count: the numbers of this row are computed from them, or from disturbed ones where "
        "none counts", heading="Runs counted", show=Show.COUNTED, beside=("runs", "exclusions"), brief="runs"),
    flag("fits", "whether it fits in memory: true where a run counts and none was out of memory, false where any was",
        null="not known: no run counts, and none was out of memory", heading="Fits in memory", show=Show.FITS,
        beside=("oom_runs", "repeats")),
    count("oom_runs", "runs that were out of memory"),
    flag("disturbed", "whether the numbers of this row are those of runs that others disturbed: they are shown, and "
        "compared with nothing"),
    text("baseline", "the configuration that this one is compared with: the one that was chosen (`report --baseline`, "
        "`sweep.baseline`), or else one device where it counts, or else the one with the fewest devices that counts",
        null="none counts"),
    count("baseline_devices", "its devices", null="none counts"),
    text("baseline_failed", "its repeats that do not count, by the reason: these have no pair",
        null="all count, or it is the baseline"),
    Column("speed_up", "over the baseline, steady state: median over paired repeats of the baseline's time ÷ "
        "this one's (strong scaling) or of the ratio of throughputs (weak scaling); not the ratio of the medians",
        null=_NO_SPEED, heading="Speed-up and interval", show=Show.INTERVAL, beside=("speed_up_low", "speed_up_high"),
        brief="speed-up"),
    Column("speed_up_low", f"lower {_INTERVAL} speed_up", null=_TOO_FEW),
    Column("speed_up_high", f"upper {_INTERVAL} speed_up", null=_TOO_FEW),
    count("speed_up_pairs", "repeats that were paired"),
    text("verdict", "faster or slower than the baseline; equal within 5 % where the deciding interval, which allows "
        "for all verdicts given together, holds 1 and lies within that margin; no difference shown where it holds 1 "
        "and reaches further; too few repeats below 4; not interleaved where the sides were measured apart; no repeat "
        "in common; no steady epoch where a side has a time after the first epoch in none of these repeats; disturbed "
        "where others took cores or GPUs of all runs of a side; not comparable where the environments differ in what "
        "must match", null="nothing to compare it with, or none of its runs counts",
        heading="Against the baseline", show=Show.VERDICT, beside=("speed_up_pairs", "framework")),
    count("repeats_to_decide", "of each configuration, in all, that would decide where no difference is shown, if the "
        "ratios vary as now", null="decided, too few repeats, or more than 100 further ones",
        heading="Repeats that would decide", where_known=True),
    share("efficiency", "speed_up ÷ (devices ÷ baseline_devices), 1 = ideal: of the step from the baseline's devices "
        "to these, so a baseline has 1 on any number of devices", null=f"{_OTHER_WAY}, or {_NO_SPEED}",
        heading="Efficiency over the baseline's devices", brief="effi-\nciency"),
    share("efficiency_low", f"lower {_INTERVAL} efficiency", null=f"no efficiency, {_TOO_FEW}"),
    share("efficiency_high", f"upper {_INTERVAL} efficiency", null=f"no efficiency, {_TOO_FEW}"),
    share("efficiency_with_startup", "the same with start-up: from total_time_s, under weak scaling from "
        "throughput_with_startup_samples_per_s", heading="Efficiency with start-up",
        null=f"{_NO_PAIR}, {_OTHER_WAY}, or parity was checked before (measure.parity=false leaves it out)"),
    Column("energy_ratio", "energy per sample ÷ that of the baseline: median over paired repeats; below 1 takes less",
        null=f"{_NO_PAIR}, or epochs too short for the counters (energy_flags: short)",
        heading="Per sample, against the baseline, and interval", tables=("energy",), show=Show.INTERVAL,
        beside=("energy_ratio_low", "energy_ratio_high")),
    Column("energy_ratio_low", f"lower {_INTERVAL} energy_ratio", null=_TOO_FEW),
    Column("energy_ratio_high", f"upper {_INTERVAL} energy_ratio", null=_TOO_FEW),
    text("parity", "runs that passed the parity check of those that were checked, how many were not, and of how many "
        "the closing check after training did not end", heading="Parity passed"),
)
"""What is computed of each configuration, besides what aggregates its runs (`Column.repeats`)."""

_NOT_TAKEN = "no run has it, or others disturbed an epoch of one"
_PRICED = f"the site names none, {_NOT_TAKEN}"
PAIRS = (
    text("group", "the work of both"),
    count("devices", "devices of each, over all nodes", heading="Devices", tables=("pairs",)),
    text("configuration", "the first of the two"),
    text("other", "the second of the two"),
    text("verdict", "how the other compares: faster or slower than the configuration, and so on as in `summary`; it "
        "allows for all verdicts of this table"),
    Column("speed_ratio", "how many times as fast the other trains, steady state: median of paired repeats, by time, "
        "or per sample where epochs hold unequally many", null=f"not comparable, or {_NO_PAIR}"),
    Column("speed_ratio_low", f"lower {_INTERVAL} speed_ratio", null="too few pairs, or measured apart"),
    Column("speed_ratio_high", f"upper {_INTERVAL} speed_ratio", null="too few pairs, or measured apart"),
    count("pairs", "repeats that were paired", heading="Paired repeats", tables=("pairs",)),
    Column("energy_ratio", "energy per sample of the other ÷ that of the configuration: median over paired repeats",
        null="no GPU, not measured, or not comparable", heading="Energy per sample, first ÷ second", tables=("pairs",),
        where_known=True, show=Show.INTERVAL, beside=("energy_ratio_low", "energy_ratio_high")),
    Column("energy_ratio_low", f"lower {_INTERVAL} energy_ratio", null="too few pairs, or measured apart"),
    Column("energy_ratio_high", f"upper {_INTERVAL} energy_ratio", null="too few pairs, or measured apart"),
    share("until_accuracy", "the test accuracy up to which the following are: that of `report --target`",
        null="none was chosen: they are of the whole training"),
    Column("device_hours", "of the configuration, median over its runs: devices × training time ÷ 3600", unit="h",
        null=_NOT_TAKEN, heading="Device-hours of the first", tables=("pairs",), where_known=True),
    Column("other_device_hours", "of the other, likewise", unit="h", null=_NOT_TAKEN,
        heading="Device-hours of the second", tables=("pairs",), where_known=True),
    Column("cost", "device_hours × site.price_per_device_hour", null=_PRICED, heading="Cost of the first",
        tables=("pairs",), where_known=True),
    Column("other_cost", "of the other, likewise", null=_PRICED, heading="Cost of the second", tables=("pairs",),
        where_known=True),
    Column("co2_g", "energy × site.grams_co2_per_kwh, median over its runs", null=_PRICED, heading="CO₂ of the first",
        tables=("pairs",), where_known=True),
    Column("other_co2_g", "of the other, likewise", null=_PRICED, heading="CO₂ of the second", tables=("pairs",),
        where_known=True),
)
"""Of every two configurations of one work on equally many devices."""
# fmt: on

_ROWS_OF_RUNS = ("pushes", "steps", "parity", "phases", "preprocess")
"""Tables whose rows are aggregated at once into a run's value."""


def epoch_aggregates() -> list[tuple[Column, Column]]:
    """Columns of `ranks`, each with a column of `per_epoch` that aggregates it over the ranks of an epoch."""
    return [pair for column in TABLES["ranks"] for pair in column.derived()]


def run_aggregates() -> list[tuple[Column, Column]]:
    """Columns of each epoch, each with a column of `per_run` that aggregates it over the epochs of a run."""
    of_ranks = (pair for column in TABLES["ranks"] for pair in column.derived(2))
    return [*of_ranks, *(pair for column in TABLES["epochs"] for pair in column.derived())]


def row_aggregates() -> dict[str, list[tuple[Column, Column]]]:
    """Table → its columns, each with a column of `per_run` that aggregates it over all the run's rows."""
    pairs = {table: [pair for column in TABLES[table] for pair in column.derived()] for table in _ROWS_OF_RUNS}
    return {table: of_table for table, of_table in pairs.items() if of_table}


def per_epoch_columns() -> tuple[Column, ...]:
    """What `per_epoch` adds to the table `epochs`."""
    return (*(column for _, column in epoch_aggregates()), *PER_EPOCH)


def per_run_columns() -> tuple[Column, ...]:
    """The columns of `per_run` besides `run_id`."""
    plain = [*run_aggregates(), *(pair for pairs in row_aggregates().values() for pair in pairs)]
    return (*PER_RUN, *(column for _, column in plain))


def facts_columns() -> tuple[Column, ...]:
    """The columns of `facts` but for `state` and `folder`."""
    return (*TABLES["run"], *PER_FACT, *per_run_columns())


def repeated_columns() -> tuple[Column, ...]:
    """The columns of `facts` that aggregate over the runs of a configuration."""
    return tuple(column for column in facts_columns() if column.repeats)


def summary_columns() -> tuple[Column, ...]:
    """The columns of `summary`; a median's meaning says that it is one."""
    repeated = [_over_repeats(column) for column in repeated_columns()]
    return _ordered((*repeated, *PER_CONFIGURATION), _SUMMARY_FIRST)


def _over_repeats(column: Column) -> Column:
    over = column.repeats
    if not over or over in (Over.SAME, Over.FIRST):
        return column
    return replace(column, meaning=f"{column.meaning}; {over} over repeats", type=over.type_of(column.type))


_SUMMARY_FIRST = (
    *("group", "configuration", "variant", "strategy", "devices", "nodes", "scaling"),
    *("outcomes", "runs", "repeats", "steady_epoch_time_s", "speed_up", "speed_up_low", "speed_up_high"),
    *("speed_up_pairs", "verdict", "repeats_to_decide"),
    *("efficiency", "efficiency_low", "efficiency_high", "efficiency_with_startup"),
)
"""The first columns of `summary`."""
FIRST: dict[Place, tuple[str, ...]] = {
    "configurations": (*_SUMMARY_FIRST, "first_epoch_time_s", "startup_without_parity_s", "throughput_samples_per_s"),
    "energy": (
        *("configuration", "gpu_energy_per_epoch_j", "gpu_energy_per_sample_j", "energy_ratio"),
        *("steady_gpu_power_mean_w", "steady_gpu_power_max_w", "energy_to_accuracy_j", "accuracy_target"),
    ),
    "runs": (
        *("slug", "outcome", "reason", "exclusion", "repeat", "attempt", "epochs_finished"),
        *("first_epoch_time_s", "second_epoch_time_s", "steady_epoch_time_s", "steady_step_time_s"),
        "total_training_time_s",
    ),
}
"""The first columns of the page's tables; the others follow as they are declared."""


def _ordered(columns: Iterable[Column], first: tuple[str, ...]) -> tuple[Column, ...]:
    return tuple(sorted(columns, key=lambda c: first.index(c.name) if c.name in first else len(first)))


def tables_columns() -> dict[str, tuple[Column, ...]]:
    """The columns of the report's files, by table."""
    epochs = (*TABLES["epochs"], *per_epoch_columns())
    return {"configurations": summary_columns(), "pairs": PAIRS, "runs": facts_columns(), "epochs": epochs}


def page_columns(table: Place) -> tuple[Column, ...]:
    """The columns of a table of the report's page."""
    columns = {"runs": facts_columns, "pairs": lambda: PAIRS}.get(table, summary_columns)()
    return tuple(c for c in _ordered(columns, FIRST.get(table, ())) if c.heading and table in c.tables)


def explained_columns() -> tuple[Column, ...]:
    """Each column once that the page explains, as of a run where it is in both tables."""
    columns = (*page_columns("pairs"), *summary_columns(), *per_run_columns(), *page_columns("runs"))
    return tuple({column.name: column for column in columns}.values())


def brief_columns(*, of_programs: bool = False) -> tuple[Column, ...]:
    """The columns of the terminal's summary; of users' programs those that are known of them."""
    if not of_programs:
        return tuple(column for column in summary_columns() if column.brief)
    known = {column.name: column for column in summary_columns()}
    heads = {"steady_step_time_s": "ms per\nstep", "throughput_samples_per_s": "samples\nper s"}
    heads |= {"steady_data_wait_share": "waits\nfor data"}
    names = (
        "configuration",
        "repeats",
        *[*heads][:2],
        "speed_up",
        "efficiency",
        *[*heads][2:],
        "peak_memory_sum_bytes",
    )
    return tuple(replace(known[name], brief=heads.get(name, known[name].brief)) for name in names)


def aggregates(pairs: Iterable[tuple[Column, Column]], *, steady: pl.Expr | None = None) -> list[pl.Expr]:
    """Each pair's second column out of the first one, for a `group_by`; `steady` keeps the rows of steady columns."""

    def values(source: Column, column: Column) -> pl.Expr:
        every = pl.col(source.name)
        return every.filter(steady) if column.steady and steady is not None else every

    return [aggregate(values(source, column), column.over).alias(column.name) for source, column in pairs]
