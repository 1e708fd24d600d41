"""The result tables: one list of columns each, with unit and meaning. Ranks write what they measured, nothing derived.

Durations are seconds, sizes bytes; epochs and steps count from 1; null means not measured, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallelbench.spec.identity import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, whether it may be null, and what it means."""

    name: str
    type: str
    doc: str
    nullable: bool = False


KEYS = (
    Column("run_id", "string", "sha256 of what defines the experiment"),
    Column("attempt", "int32", "which start of the run measured this (in run: published it); counts from 1"),
)

RUN = (
    *KEYS,
    Column("sweep", "string", "name of the sweep"),
    Column("slug", "string", "name of the run folder"),
    Column("outcome", "string", "ok, or parity_failed: trained to the end, but not like one device"),
    Column("reason", "string", "the outcome in one line"),
    Column("model", "string", "configuration: model"),
    Column("data", "string", "configuration: data"),
    Column("strategy", "string", "configuration: strategy"),
    Column("optimizer", "string", "configuration: optimizer"),
    Column("loader", "string", "configuration: loader"),
    Column("devices", "int32", "devices over all nodes"),
    Column("nodes", "int32", "nodes"),
    Column("processes", "int32", "training processes"),
    Column("cores_per_device", "int32", "pinned cores of a CPU device", nullable=True),
    Column("device_type", "string", "cpu or cuda"),
    Column("device_name", "string", "name of the processor or GPU"),
    Column("epochs", "int32", "epochs asked for"),
    Column("batch_size", "int32", "as configured: global under strong scaling, per device under weak"),
    Column("global_batch_size", "int32", "samples per optimizer step over all devices"),
    Column("scaling", "string", "strong or weak"),
    Column("precision", "string", "arithmetic of forward and backward"),
    Column("channels_last", "bool", "configuration: channels_last"),
    Column("compile", "bool", "configuration: compile"),
    Column("seed", "int64", "seed that was used: configuration seed + repeat"),
    Column("repeat", "int32", "which repetition"),
    Column("parameters", "int64", "trainable parameters of the model"),
    Column("train_samples", "int64", "samples in the training set"),
    Column("test_samples", "int64", "samples in the test set, each evaluated once"),
    Column("steps_per_epoch", "int32", "optimizer steps per epoch"),
    Column("dropped_samples", "int64", "training samples per epoch that filled no global batch and were dropped"),
    Column("learning_rate", "float64", "as used, after the scaling rule"),
    Column("oversubscribed", "bool", "more devices than cores: timing means nothing"),
    Column("launcher", "string", "what started its processes; inline: trained in the calling process, as that was"),
    Column("packed", "bool", "forked from a warm process, like others before it: its start-up tells nothing"),
    Column("deterministic", "bool", "deterministic algorithms only"),
    Column("detect_anomaly", "bool", "autograd searched for the source of NaNs"),
    Column("theoretical_bubble", "float64", "share of time a device must idle by schedule; null: none", nullable=True),
    Column(
        "theoretical_state_bytes",
        "int64",
        "parameters, gradients and optimizer state on each device, by formula, without activations and buffers; null: "
        "devices hold different things, or no formula",
        nullable=True,
    ),
    Column(
        "parity_passed",
        "bool",
        "training equals one device within the tolerance; null: not checked",
        nullable=True,
    ),
    Column(
        "resumed_after",
        "string",
        "epochs after which training was interrupted, and gone on with by a later attempt, as in '4, 9'; null: never",
        nullable=True,
    ),
    Column(
        "resumed_elsewhere",
        "string",
        "in what a later attempt's device, software or settings differed from the first one's; null: in nothing",
        nullable=True,
    ),
    Column(
        "warnings",
        "string",
        "what a reader should know before comparing this run; null: nothing",
        nullable=True,
    ),
    Column(
        "startup_s",
        "float64",
        "launch of the processes to the end of the first step on rank 0: the sum of the parts below, which leaves out "
        "the capture of the environment",
    ),
    Column(
        "startup_launch_s",
        "float64",
        "launch to the first line of the worker: interpreter, torchrun's rendezvous",
    ),
    Column("startup_imports_s", "float64", "importing torch and the suite"),
    Column(
        "startup_process_group_s",
        "float64",
        "waking the devices, their libraries included, and, with several processes, joining their group",
    ),
    Column("startup_data_s", "float64", "opening the data set and moving it to the device"),
    Column("startup_parity_s", "float64", "the parity check; null: not checked", nullable=True),
    Column("startup_model_s", "float64", "building the model and wrapping it in the strategy"),
    Column("startup_compile_s", "float64", "torch.compile; null: not compiled", nullable=True),
    Column("startup_first_step_s", "float64", "the first training step, waited for"),
    Column(
        "probed_latency_s",
        "float64",
        "of one message in a ring over all ranks, s: a 1 KiB all-reduce ÷ 2(n − 1), after the last epoch; null: one "
        "process, or no pass (`measure.attribution_steps`)",
        nullable=True,
    ),
    Column(
        "probed_bandwidth_bytes_per_s",
        "float64",
        "bytes that each rank sends in a 16 MiB all-reduce over all ranks, as a ring, beyond those of the 1 KiB one, ÷ "
        "the time that it takes longer; null: likewise",
        nullable=True,
    ),
    Column("config_json", "string", "the whole configuration, canonical JSON"),
    Column("environment_json", "string", "versions, devices, topology, allowed environment variables"),
)

EPOCHS = (
    *KEYS,
    Column("epoch", "int32", "counts from 1"),
    Column("train_loss", "float64", "mean cross entropy over the epoch's training samples, while training"),
    Column("train_accuracy", "float64", "share of correct predictions on them, 0 to 1, while training"),
    Column("test_loss", "float64", "mean cross entropy over the test set after the epoch"),
    Column("test_accuracy", "float64", "share of correct predictions on the test set, 0 to 1"),
    Column("train_samples", "int64", "samples trained on in this epoch, over all ranks"),
    Column("test_samples", "int64", "samples evaluated, over all ranks"),
    Column("steps", "int32", "optimizer steps in this epoch"),
    Column("finished_at", "float64", "Unix time at the end of the epoch, s"),
    Column(
        "gpu_energy_j",
        "float64",
        "energy of all the run's GPUs from the first rank's start of training to the last rank's end, J, each GPU once",
        nullable=True,
    ),
    Column("gpu_power_mean_w", "float64", "mean power of all these GPUs together in that window, W", nullable=True),
    Column("gpu_power_max_w", "float64", "highest power that was sampled of one GPU in it, W", nullable=True),
    Column("gpu_utilization_mean", "float64", "mean share of time in which a kernel ran, 0 to 1", nullable=True),
    Column(
        "gpu_memory_used_max_bytes",
        "int64",
        "most memory that was sampled in use on one GPU, all processes",
        nullable=True,
    ),
    Column(
        "gpu_throttle_reasons",
        "int64",
        "all reasons for lower clocks that were sampled (bits: nvmlClocksEventReason…)",
        nullable=True,
    ),
    Column("gpu_clock_mean_hz", "float64", "mean clock of their SMs", nullable=True),
    Column("gpu_temperature_max_c", "float64", "highest temperature that was sampled of one GPU, °C", nullable=True),
    Column("cpu_energy_j", "float64", "energy of all the nodes' processors in that window (RAPL), J", nullable=True),
    Column("cpu_clock_mean_hz", "float64", "mean clock of all the nodes' cores, a reading per second", nullable=True),
    Column(
        "host_memory_used_max_bytes", "int64", "most memory that was sampled in use on one node, by all", nullable=True
    ),
    Column(
        "network_sent_bytes",
        "int64",
        "sent by all processes of the nodes in that window, without the loopback interface and RDMA; sum over nodes",
        nullable=True,
    ),
    Column("network_received_bytes", "int64", "likewise", nullable=True),
    Column(
        "telemetry_flags",
        "string",
        "short: a window under 2 s, whose energies are not to be trusted; sparse: samples more than 1 s apart; "
        "from_power: energy integrated from power, for lack of a counter; and why an energy is null: reset: the "
        "counter began anew; incomplete: no sample before or after the window; null: nothing to say. What else was "
        "not sampled from before the window until after it is null without a flag",
        nullable=True,
    ),
)

RANKS = (
    *KEYS,
    Column("epoch", "int32", "counts from 1"),
    Column("rank", "int32", "0 … processes − 1"),
    Column("local_rank", "int32", "rank within its node"),
    Column("node", "string", "Slurm's name of the node, or the host name"),
    Column("device_uuid", "string", "UUIDs of this rank's GPUs, or its CPU cores"),
    Column("epoch_time_s", "float64", "training window of the epoch on this rank"),
    Column("training_started_at", "float64", "Unix time at its start, by this node's clock, s"),
    Column("training_ended_at", "float64", "Unix time at its end, s"),
    Column("cpu_time_s", "float64", "processor time of this process in it, all threads, user and system, s"),
    Column("evaluation_time_s", "float64", "evaluation window after the epoch on this rank"),
    Column("train_samples", "int64", "training samples whose loss this rank owned"),
    Column("train_loss_sum", "float64", "summed loss of those samples"),
    Column("train_correct", "int64", "correct predictions among them"),
    Column("test_samples", "int64", "test samples whose loss this rank owned"),
    Column("test_loss_sum", "float64", "summed loss of those samples"),
    Column("test_correct", "int64", "correct predictions among them"),
    Column("gradient_bytes_sent", "int64", "gradients sent to other ranks in the training window"),
    Column("activation_bytes_sent", "int64", "activations and their gradients sent to other ranks"),
    Column("parameter_bytes_sent", "int64", "parameters and buffers sent to other ranks"),
    Column(
        "peak_allocated_bytes",
        "int64",
        "most device memory held by tensors in the training window",
        nullable=True,
    ),
    Column("peak_reserved_bytes", "int64", "most device memory held by torch's allocator", nullable=True),
    Column(
        "device_used_bytes",
        "int64",
        "device memory in use at the window's end, all processes (NVML)",
        nullable=True,
    ),
    Column(
        "host_peak_rss_bytes",
        "int64",
        "most resident host memory of this process in the window",
        nullable=True,
    ),
    Column(
        "loader_cpu_time_s",
        "float64",
        "processor time of the loader's worker processes in the training window, s; null: it has none",
        nullable=True,
    ),
    Column(
        "loader_memory_bytes",
        "int64",
        "host memory that no process but one of these workers has, at the window's end, summed over them; null: there "
        "are none then",
        nullable=True,
    ),
)

STEPS = (
    *KEYS,
    Column("epoch", "int32", "counts from 1"),
    Column("step", "int32", "step within the epoch, counts from 1"),
    Column("rank", "int32", "0 … processes − 1"),
    Column("step_time_s", "float64", "from fetching the batch to the end of the optimizer step, on the device"),
)

PARITY = (
    *KEYS,
    Column("step", "int32", "counts from 1"),
    Column("loss", "float64", "loss of the strategy; null, here and in the differences: not a number", nullable=True),
    Column("loss_reference", "float64", "loss of one device"),
    Column("loss_difference", "float64", "|difference| ÷ max(1, |reference|)", nullable=True),
    Column(
        "gradient_difference",
        "float64",
        "largest |difference| of a gradient ÷ largest |gradient| of the model",
        nullable=True,
    ),
    Column(
        "parameter_difference",
        "float64",
        "largest |difference| of a parameter ÷ max(1, largest |parameter|)",
        nullable=True,
    ),
    Column(
        "evaluation_difference",
        "float64",
        "of 37 test samples: |difference| of the loss ÷ max(1, |reference|), or of the share of correct predictions "
        "÷ 10, whichever is larger",
        nullable=True,
    ),
    Column("tolerance", "float64", "what each of the four differences may be"),
    Column("passed", "bool", "all four are within the tolerance"),
)

PUSHES = (
    *KEYS,
    Column("epoch", "int32", "counts from 1"),
    Column("rank", "int32", "worker that pushed"),
    Column("step", "int32", "the worker's step within the epoch, counts from 1"),
    Column("staleness", "int32", "updates by others that its first gradient knew nothing of when the push was used"),
)

TELEMETRY = (
    *KEYS,
    Column("node", "string", "host name"),
    Column("device_uuid", "string", "the GPU that was sampled; null: the host itself", nullable=True),
    Column("time", "float64", "Unix time of the sample, s"),
    Column(
        "energy_j",
        "float64",
        "energy counter, J: of a GPU since the driver was loaded, of a host's processors (RAPL) since any moment",
        nullable=True,
    ),
    Column("power_w", "float64", "of a GPU, W; instantaneous where the driver has that", nullable=True),
    Column("utilization", "float64", "share of the last moments in which a kernel ran, 0 to 1", nullable=True),
    Column("memory_used_bytes", "int64", "by all processes", nullable=True),
    Column("clock_hz", "float64", "of a GPU's SMs; of a host's cores the mean, once in 10 samples", nullable=True),
    Column("temperature_c", "float64", "of a GPU, °C", nullable=True),
    Column("throttle_reasons", "int64", "why its clock is lower than it could be (bits)", nullable=True),
    Column(
        "network_sent_bytes",
        "int64",
        "of a host since it started, without the loopback interface and what bypasses the kernel (RDMA)",
        nullable=True,
    ),
    Column("network_received_bytes", "int64", "likewise", nullable=True),
)

PHASES = (
    *KEYS,
    Column("rank", "int32", "0 … processes − 1"),
    Column("step", "int32", "step of the pass after the last epoch that `measure.attribution_steps` asks for; from 1"),
    Column("step_time_s", "float64", "from asking for the batch to the update's end: the sum of all columns below"),
    Column("data_wait_s", "float64", "waiting for the batch"),
    Column(
        "host_to_device_s",
        "float64",
        "moving it to the GPU, where nothing hides that; null: it lies there already (loader=resident), the rank needs "
        "none, or there is no GPU",
        nullable=True,
    ),
    Column("forward_s", "float64", "forward passes and losses; null: none on this rank", nullable=True),
    Column("backward_s", "float64", "backward passes; null: none on this rank", nullable=True),
    Column(
        "communication_s",
        "float64",
        "waiting for other ranks where no computing hides it: for slower ones, and for what travels; null: none, or "
        "not to be told from what it happens in",
        nullable=True,
    ),
    Column(
        "bubble_s",
        "float64",
        "idle in a pipeline or a naive layer split, waiting for another stage or for what comes from it; null: no "
        "stages, or not to be told",
        nullable=True,
    ),
    Column("optimizer_s", "float64", "updating parameters; null: none on this rank", nullable=True),
    Column("other_s", "float64", "the rest: sums of losses, clearing and packing of gradients, a schedule's own work"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "run": RUN,
    "epochs": EPOCHS,
    "ranks": RANKS,
    "steps": STEPS,
    "parity": PARITY,
    "pushes": PUSHES,
    "telemetry": TELEMETRY,
    "phases": PHASES,
}


def check_row(table: str, row: dict[str, Any]) -> None:
    """Assert that `row` has exactly the columns of `table`, and null only where the schema allows it."""
    columns = TABLES[table]
    names = {column.name for column in columns}
    assert row.keys() == names, f"{table}: {sorted(row.keys() ^ names)} don't match the schema"
    nulls = [column.name for column in columns if not column.nullable and row[column.name] is None]
    assert not nulls, f"{table}: {nulls} may not be null"


def schema(table: str) -> pa.Schema:
    """The Arrow schema of a table, with every column's meaning in its metadata."""
    import pyarrow as pa

    fields = [
        pa.field(c.name, pa.type_for_alias(c.type), nullable=c.nullable, metadata={"doc": c.doc}) for c in TABLES[table]
    ]
    return pa.schema(fields, metadata={"table": table, "schema_version": str(SCHEMA_VERSION)})
