"""The result tables: a list of columns each. Ranks write what they measured, nothing derived.

Times are seconds, sizes bytes; epochs and steps count from 1; null means not measured, never 0. `Column.into` declares
what follows from a column; `analysis.metrics` computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelbench.store.check_tables import CHECKS, PARITY
from parallelbench.store.clip_columns import CLIPPING
from parallelbench.store.columns import EPOCH, KEYS, Column, Over, Show
from parallelbench.store.expert_columns import EXPERT_BALANCE
from parallelbench.store.metric_columns import METRIC
from parallelbench.store.preprocess_table import PREPROCESS
from parallelbench.store.processor_columns import PROCESSOR_SHARE
from parallelbench.store.run_table import RUN
from parallelbench.store.telemetry_table import GPU_AND_HOST, TELEMETRY

if TYPE_CHECKING:
    import pyarrow as pa

TABLES_VERSION = 10
"""Version of the result tables, in manifests and Parquet files; not in run ids, so a new column reruns nothing."""

RANK = Column("rank", "int32", "0 … processes − 1")

EPOCHS = (
    *KEYS,
    EPOCH,
    Column("train_loss", "float64", "mean of `loss` over the epoch's training samples, while training"),
    Column(
        "train_accuracy", "float64", "share of correct predictions on the training samples, while training", "share"
    ),
    Column("test_loss", "float64", "mean of `loss` over the test set after the epoch"),
    Column(
        "test_accuracy",
        "float64",
        "share of correct predictions on the test set after the epoch",
        "share",
        into=(
            Column(
                "best_test_accuracy",
                "float64",
                "highest test accuracy after any finished epoch",
                "share",
                null="no epoch finished",
                over=Over.MAX,
                repeats=Over.MEDIAN,
            ),
        ),
    ),
    *METRIC,
    Column("train_samples", "int64", "samples trained on in this epoch, over all ranks"),
    Column("test_samples", "int64", "samples evaluated, over all ranks"),
    Column("steps", "int32", "optimizer steps in this epoch"),
    *EXPERT_BALANCE,
    Column("finished_at", "float64", "Unix time at the end of the epoch", "s"),
    *GPU_AND_HOST,
)

RANKS = (
    *KEYS,
    EPOCH,
    RANK,
    Column("local_rank", "int32", "rank within its node"),
    Column("node", "string", "Slurm's name of the node, or the host name"),
    Column("device_uuid", "string", "UUIDs of this rank's GPUs, or its CPU cores"),
    Column(
        "epoch_time_s",
        "float64",
        "training window of the epoch on this rank",
        "s",
        into=(
            Column(
                "slowest_epoch_time_s",
                "float64",
                "training window of the epoch on its slowest rank",
                "s",
                over=Over.MAX,
                into=(
                    Column(
                        "steady_epoch_time_s",
                        "float64",
                        "training window of the slowest rank: median over the epochs without each attempt's first one",
                        "s",
                        null="no such epoch",
                        over=Over.MEDIAN,
                        steady=True,
                        repeats=Over.MEDIAN,
                        heading="Time per epoch",
                        brief="s per\nepoch",
                    ),
                ),
            ),
        ),
    ),
    Column(
        "training_started_at", "float64", "Unix time at the start of the training window, by this node's clock", "s"
    ),
    Column("training_ended_at", "float64", "Unix time at its end", "s"),
    Column("cpu_time_s", "float64", "processor time of this process in it: all threads, user and system", "s"),
    *PROCESSOR_SHARE,
    Column(
        "evaluation_time_s",
        "float64",
        "evaluation window after the epoch on this rank",
        "s",
        into=(
            Column(
                "slowest_evaluation_time_s",
                "float64",
                "evaluation window after the epoch on its slowest rank",
                "s",
                over=Over.MAX,
            ),
        ),
    ),
    Column("train_samples", "int64", "training samples whose loss this rank owned, and took a gradient of"),
    Column("train_loss_sum", "float64", "summed loss of those samples"),
    Column("train_correct", "int64", "correct predictions among them"),
    Column("test_samples", "int64", "test samples whose loss this rank owned"),
    Column("test_loss_sum", "float64", "summed loss of those samples"),
    Column("test_correct", "int64", "correct predictions among them"),
    *CLIPPING,
    Column("gradient_bytes_sent", "int64", "gradients sent to other ranks in the training window", "bytes"),
    Column("activation_bytes_sent", "int64", "activations and their gradients sent to other ranks", "bytes"),
    Column("parameter_bytes_sent", "int64", "parameters and buffers sent to other ranks", "bytes"),
    Column(
        "peak_allocated_bytes",
        "int64",
        "peak of device memory held by tensors in the training window, summed over this rank's GPUs",
        "bytes",
        null="no GPU",
    ),
    Column(
        "peak_allocated_bytes_by_device",
        "string",
        "of each of this rank's GPUs, in the order of device_uuid, the peak of its memory held by tensors in the "
        "training window; bytes, with commas between them",
        null="no GPU: devices of a CPU that one process drives share its memory",
    ),
    Column(
        "peak_reserved_bytes",
        "int64",
        "peak of device memory held by torch's allocator, what earlier evaluations left in its cache included",
        "bytes",
        null="no GPU",
    ),
    Column(
        "device_used_bytes",
        "int64",
        "device memory in use at the window's end, by all processes (NVML), what torch keeps in its cache included",
        "bytes",
        null="no GPU, or NVML does not say",
    ),
    Column(
        "host_peak_rss_bytes",
        "int64",
        "peak of this process's resident host memory in the window",
        "bytes",
        null="the kernel does not say",
    ),
    Column(
        "loader_cpu_time_s",
        "float64",
        "processor time of the loader's worker processes in the training window",
        "s",
        null="it has none",
    ),
    Column(
        "loader_memory_bytes",
        "int64",
        "host memory that only these workers hold, at the window's end, summed over them",
        "bytes",
        null="there are none then",
    ),
)

LOSSES = (
    *KEYS,
    EPOCH,
    Column("step", "int32", "step within the epoch, counts from 1; of several, the first"),
    Column("steps", "int32", "steps that this row is of: 1 for the first 64 of a run, then up to 64 together"),
    Column("train_loss", "float64", "mean of `loss` over their samples, over all ranks"),
)

STEPS = (
    *KEYS,
    EPOCH,
    Column("step", "int32", "step within the epoch, counts from 1"),
    RANK,
    Column("step_time_s", "float64", "fetching the batch to the end of the optimizer step, on the device", "s"),
)

PUSHES = (
    *KEYS,
    EPOCH,
    Column("rank", "int32", "worker that pushed"),
    Column("step", "int32", "the worker's step within the epoch, counts from 1"),
    Column(
        "staleness",
        "int32",
        "updates by others between the worker's fetch and the use of its push; for several gradients, of the first",
        into=(
            Column(
                "staleness_mean",
                "float64",
                "mean staleness of all pushes to parameter servers, over all workers and epochs",
                null="no pushes",
                over=Over.MEAN,
                repeats=Over.MEDIAN,
                heading="Staleness, mean (max)",
                show=Show.MEAN_AND_MAX,
                beside=("staleness_max",),
            ),
            Column(
                "staleness_max",
                "int32",
                "largest staleness of any push",
                null="no pushes",
                over=Over.MAX,
                repeats=Over.MAX,
            ),
        ),
    ),
)

_NOT_HERE = "none on this rank"
PHASES = (
    *KEYS,
    RANK,
    Column("step", "int32", "step of the attribution pass after the last epoch (`measure.attribution_steps`); from 1"),
    Column("step_time_s", "float64", "fetching the batch to the update's end: the sum of all columns below", "s"),
    Column("data_wait_s", "float64", "waiting for the batch", "s"),
    Column(
        "host_to_device_s",
        "float64",
        "moving the batch to the GPU, as far as nothing hides it",
        "s",
        null="it is there already (loader=resident), this rank needs no batch, or there is no GPU",
    ),
    Column("forward_s", "float64", "forward passes and losses", "s", null=_NOT_HERE),
    Column("backward_s", "float64", "backward passes", "s", null=_NOT_HERE),
    Column(
        "communication_s",
        "float64",
        "exposed communication: waiting for other ranks, slower ones included, and for transfers, while nothing is "
        "computed",
        "s",
        null="none, or not separable from the phase it happens in",
    ),
    Column(
        "bubble_s",
        "float64",
        "idle in a pipeline or a naive layer split, waiting for another stage or its output",
        "s",
        null="no stages, or not separable",
    ),
    Column("optimizer_s", "float64", "updating parameters", "s", null=_NOT_HERE),
    Column(
        "other_s", "float64", "the rest: summing losses, clearing and packing gradients, the schedule's own work", "s"
    ),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "run": RUN,
    "epochs": EPOCHS,
    "ranks": RANKS,
    "losses": LOSSES,
    "steps": STEPS,
    "parity": PARITY,
    "checks": CHECKS,
    "pushes": PUSHES,
    "telemetry": TELEMETRY,
    "phases": PHASES,
    "preprocess": PREPROCESS,
}


def check_row(table: str, row: dict[str, Any]) -> None:
    """Assert that `row` has exactly the columns of `table`, and null only where the schema allows it."""
    columns = TABLES[table]
    names = {column.name for column in columns}
    assert row.keys() == names, f"{table}: {sorted(row.keys() ^ names)} don't match the schema"
    nulls = [column.name for column in columns if not column.nullable and row[column.name] is None]
    assert not nulls, f"{table}: {nulls} may not be null"


def schema(table: str) -> pa.Schema:
    """The Arrow schema of a table; its metadata hold each column's meaning, unit, and what null means."""
    import pyarrow as pa

    def info(column: Column) -> dict[str, str]:
        facts = {"doc": column.doc, "unit": column.unit, "null": column.null}
        return {name: value for name, value in facts.items() if value is not None}

    fields = [pa.field(c.name, pa.type_for_alias(c.type), nullable=c.nullable, metadata=info(c)) for c in TABLES[table]]
    return pa.schema(fields, metadata={"table": table, "schema_version": str(TABLES_VERSION)})
