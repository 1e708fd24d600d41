"""The numbers of each epoch and run that take a formula. Plain aggregates are declared beside their raw column
(`parallelbench.results.tables`).
"""

from __future__ import annotations

from analysis.metrics.token_columns import OF_TOKENS, PERPLEXITY
from parallelbench.results.tables import Column, Over, Show

PER_EPOCH = (
    Column(
        "training_time_s",
        "float64",
        "sum of slowest_epoch_time_s up to and with this epoch",
        "s",
        null="the run was resumed, so it has warmed up more than once",
    ),
    Column(
        "epoch_throughput_samples_per_s",
        "float64",
        "samples trained on over all data shards ÷ slowest_epoch_time_s",
        "samples/s",
    ),
    Column("warm_up", "bool", "whether it is the first epoch of an attempt"),
    Column(
        "lost_share",
        "float64",
        "time that others kept a rank off a core ÷ slowest_epoch_time_s, of the rank that lost most; above 1 if it "
        "lost several cores; where short epochs were disturbed together, of these together",
        null="no rank measured it",
    ),
    Column(
        "disturbed",
        "bool",
        "whether others took more of it, or of short epochs together, than the limit of docs/measurement.md, or "
        "computed on one of its GPUs",
        null="not measured",
    ),
    PERPLEXITY,
)
"""What is computed of each epoch, besides plain aggregates."""

_SENT = "sent to other ranks while training, library collectives by the textbook algorithm with the fewest bytes"
_BUSIEST = "of the one rank that sends most over all finished epochs"
_UNFINISHED = "the run did not finish"
_SEVERAL = "the run did not finish, or in several attempts, each of which started up anew"
_NOT_COUNTED = "not counted on every rank"


def _kind(name: str, what: str) -> Column:
    return Column(
        name, "float64", f"{what} among {name.partition('_')[2]}", "bytes", null=_NOT_COUNTED, repeats=Over.MEDIAN
    )


PER_RUN = (
    Column("epochs_finished", "int32", "epochs that every rank finished", heading="Epochs finished", tables=("runs",)),
    Column(
        "first_epoch_time_s",
        "float64",
        "training window of epoch 1, warm-up included, on its slowest rank",
        "s",
        null="no epoch finished",
        repeats=Over.MEDIAN,
        heading="First epoch",
    ),
    Column(
        "second_epoch_time_s",
        "float64",
        "training window of epoch 2 on its slowest rank",
        "s",
        null="not trained, or an attempt began with it",
        repeats=Over.MEDIAN,
        heading="Second epoch",
        tables=("runs",),
    ),
    Column(
        "steady_step_time_s",
        "float64",
        "slowest_epoch_time_s ÷ the epoch's optimizer steps: median over the epochs without each attempt's first one",
        "s",
        null="no epoch but each attempt's first one, or no step in it",
        repeats=Over.MEDIAN,
        heading="Step",
        tables=("runs",),
        show=Show.MILLISECONDS,
    ),
    Column("steady_epochs", "int32", "epochs that every rank finished, without each attempt's first one", null="none"),
    Column(
        "disturbed_epochs",
        "int32",
        "those of them that were disturbed, as far as it was measured",
        null="not measured in any of them",
        heading="Disturbed epochs",
        tables=("runs",),
    ),
    Column(
        "largest_lost_share",
        "float64",
        "largest lost_share of any epoch without each attempt's first one",
        null="not measured",
    ),
    Column(
        "startup_without_parity_s",
        "float64",
        "launch to the end of the first step, without the parity check, which only this suite runs",
        "s",
        null="not reached",
        repeats=Over.MEDIAN,
        heading="Start-up",
        tables=("configurations",),
    ),
    Column(
        "total_training_time_s",
        "float64",
        "sum over all epochs of the slowest rank's training window, warm-up included",
        "s",
        null=_SEVERAL,
        repeats=Over.MEDIAN,
        heading="Training",
        tables=("runs",),
    ),
    Column(
        "total_time_s",
        "float64",
        "startup_without_parity_s + total_training_time_s − startup_first_step_s (step 1 belongs to epoch 1)",
        "s",
        null=_SEVERAL,
        repeats=Over.MEDIAN,
    ),
    Column(
        "end_to_end_time_s",
        "float64",
        "preprocess_time_s, without executions after the first, + total_time_s: from the stored training set to the "
        "end of the training",
        "s",
        null=f"nothing was preprocessed or trained, {_SEVERAL}",
        repeats=Over.MEDIAN,
        heading="Preprocessing and training",
    ),
    Column(
        "throughput_samples_per_s",
        "float64",
        "samples trained on per epoch over all data shards ÷ steady_epoch_time_s",
        "samples/s",
        null="no epoch but each attempt's first one",
        repeats=Over.MEDIAN,
        heading="Throughput",
    ),
    Column(
        "least_flop_per_s",
        "float64",
        "floating-point operations per second and device that this throughput takes at least: least_flop_per_sample × "
        "throughput_samples_per_s ÷ devices",
        "flop/s",
        null="no throughput, or the model was not counted",
    ),
    *OF_TOKENS,
    Column(
        "throughput_with_startup_samples_per_s",
        "float64",
        "samples trained on in all epochs ÷ total_time_s",
        "samples/s",
        null=_SEVERAL,
    ),
    Column(
        "memory_kind",
        "string",
        "device: allocated by tensors on GPUs; host: resident set of the processes, on CPUs",
        null="the device is unknown",
        repeats=Over.FIRST,
    ),
    Column(
        "peak_memory_max_bytes",
        "int64",
        "each rank's peak over all epochs, the largest of them; memory_kind says of which memory",
        "bytes",
        null="not measured on every rank",
        repeats=Over.MEDIAN,
        heading="Memory, largest process",
    ),
    Column(
        "peak_memory_device_bytes",
        "int64",
        "each device's peak over all epochs, the largest of them; where each process has one device, the same as "
        "peak_memory_max_bytes",
        "bytes",
        null="not measured on every rank, or one process drives several devices that share its memory (CPUs), or did "
        "so under a release that measured their sum alone (tables before version 9)",
        repeats=Over.MEDIAN,
        heading="Memory, largest device",
    ),
    Column(
        "peak_memory_sum_bytes",
        "int64",
        "each rank's peak over all epochs, their sum",
        "bytes",
        null="not measured on every rank",
        repeats=Over.MEDIAN,
        heading="Memory, all processes",
        brief="mem.\nMiB",
    ),
    Column(
        "bytes_sent_per_step_sum",
        "float64",
        f"{_SENT}: sum over all finished epochs and all ranks ÷ optimizer steps",
        "bytes",
        null=_NOT_COUNTED,
        repeats=Over.MEDIAN,
        heading="Sent per step by textbook, all processes",
        show=Show.SENT,
        brief="sent\nMiB",
    ),
    _kind("gradient_bytes_sent_per_step_sum", "gradients"),
    _kind("activation_bytes_sent_per_step_sum", "activations and their gradients"),
    _kind("parameter_bytes_sent_per_step_sum", "parameters and buffers"),
    Column(
        "bytes_sent_per_step_busiest",
        "float64",
        f"{_SENT} per step, {_BUSIEST}",
        "bytes",
        null=_NOT_COUNTED,
        repeats=Over.MEDIAN,
        heading="Sent per step by textbook, busiest process",
        tables=("runs",),
        show=Show.SENT,
    ),
    _kind("gradient_bytes_sent_per_step_busiest", "gradients"),
    _kind("activation_bytes_sent_per_step_busiest", "activations and their gradients"),
    _kind("parameter_bytes_sent_per_step_busiest", "parameters and buffers"),
    Column(
        "gpu_energy_per_sample_j",
        "float64",
        "GPU energy of an epoch ÷ the samples trained on: median over the epochs without each attempt's first one",
        "J",
        null="no GPU, or no telemetry of all of them",
        repeats=Over.MEDIAN,
        heading="GPU energy per sample",
        tables=("energy",),
    ),
    Column(
        "gpu_hours",
        "float64",
        "devices × total_time_s ÷ 3600: start-up and training, without parity check and evaluation",
        "h",
        null=f"no GPU, or {_SEVERAL}",
        repeats=Over.MEDIAN,
        heading="GPU-hours of a run",
        tables=("energy",),
    ),
    Column(
        "final_test_accuracy",
        "float64",
        "test accuracy after the last epoch",
        "share",
        null=_UNFINISHED,
        repeats=Over.MEDIAN,
        heading="Final test accuracy",
        brief="test\nacc.",
    ),
    Column(
        "parity_difference",
        "float64",
        "largest of the parity check's loss, gradient, parameter and evaluation differences",
        null="not checked",
        repeats=Over.MAX,
        excluded_too=True,
        heading="Parity difference",
        tables=("runs",),
        show=Show.SCIENTIFIC,
    ),
    Column(
        "closed",
        "bool",
        "whether the closing check, which follows the last epoch, ended",
        null="not asked for, or the run has no result",
    ),
    Column(
        "checks_made",
        "string",
        "what was checked during and after training, and failed or passed; and what was not compared",
        null="no such check was made",
        heading="Checks of what was trained",
        tables=("runs",),
    ),
)
"""What is computed of each run, besides plain aggregates."""
