"""The result tables: a list of columns each. Ranks write what they measured, nothing derived."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


Type = Literal["string", "int32", "int64", "float64", "bool"]
"""As Arrow names it."""
Unit = Literal["s", "h", "bytes", "samples/s", "tokens/s", "bytes/s", "flop/s", "J", "W", "Hz", "°C", "share"]
"""The name says it, too (`_s`, `_bytes`, …). A share is from 0 to 1."""
Place = Literal["configurations", "energy", "runs"]
"""A table of the report's page."""


class Over(StrEnum):
    """How several values become one.

    A sum or mean is null where one value is; all others are of the values that are known.
    """

    SUM = "sum"
    MEAN = "mean"
    MEDIAN = "median"
    MAX = "largest"
    MIN = "smallest"
    LAST = "last"
    BITS = "all bits"
    FLAGS = "all flags"
    """The words that occur in any of them."""
    FIRST = "first known"
    SAME = "the same in all"


class Show(StrEnum):
    """How a value is written in a table; `analysis.report.tables` has the function of each."""

    PLAIN = "plain"
    NUMBER = "number"
    """Three significant digits."""
    PERCENT = "percent"
    MEBIBYTES = "mebibytes"
    SENT = "sent"
    """Bytes in MiB, three digits however few they are."""
    MILLISECONDS = "milliseconds"
    """Of seconds, three significant digits."""
    SCIENTIFIC = "scientific"
    CONFIGURATION = "configuration"
    INTERVAL = "interval"
    """A ratio; beside it, its lower and its upper end."""
    MEAN_AND_MAX = "mean-and-max"
    COUNTED = "counted"
    """So many runs; beside them, of how many, and their outcomes."""
    KNOWN = "known"
    """The value; where it is null, the one beside it."""
    PASSED = "passed"
    """Passed, failed or not checked."""
    VERDICT = "verdict"
    """Beside it, the pairs that it rests on."""
    EXCLUSION = "exclusion"
    """Why a run doesn't count; beside it, the run's own detail."""


@dataclass(frozen=True)
class Column:
    """One number: what it is, what follows from it, and how it is shown."""

    name: str
    type: Type
    meaning: str
    unit: Unit | None = None
    null: str | None = None
    """What null means; None: it is never null."""
    over: Over | None = None
    """How the values of the column that this one follows from become one; None: it is measured, or a formula."""
    steady: bool = False
    """Each attempt's first epoch, which warms up, doesn't count."""
    into: tuple[Column, ...] = ()
    """What follows from this column: over the ranks of an epoch, the epochs of a run, or a run's rows."""
    repeats: Over | None = None
    """How the runs of a configuration become a row of `summary`; None: it has no such column."""
    excluded_too: bool = False
    """Excluded runs count in this aggregate, too."""
    heading: str = ""
    """In the tables of the page, without the unit; empty: in none."""
    tables: tuple[Place, ...] = ("configurations", "runs")
    """Those that show it, where there is a heading."""
    where_known: bool = False
    """Those show it only where one of their rows has a value."""
    show: Show | None = None
    """None: by unit and type."""
    beside: tuple[str, ...] = ()
    """Further columns that its text is made of."""
    brief: str = ""
    """Heading on the terminal; empty: not there."""

    @property
    def nullable(self) -> bool:
        """Whether it may be null."""
        return self.null is not None

    @property
    def doc(self) -> str:
        """The meaning, and what null means."""
        return self.meaning if self.null is None else f"{self.meaning}; null: {self.null}"

    @property
    def shown(self) -> Show:
        """How it is written in tables."""
        by_unit = {"share": Show.PERCENT, "bytes": Show.MEBIBYTES}
        return self.show or by_unit.get(self.unit or "", Show.NUMBER if self.type == "float64" else Show.PLAIN)

    @property
    def title(self) -> str:
        """The heading with the unit that is shown."""
        unit = {"share": None, "bytes": "MiB"}.get(self.unit or "", self.unit)
        unit = "ms" if self.shown is Show.MILLISECONDS else unit
        return f"{self.heading} ({unit})" if unit else self.heading

    @property
    def numeric(self) -> bool:
        """Whether it is written flush right, as numbers are."""
        return self.type not in ("string", "bool")

    def derived(self, depth: int = 1) -> Iterator[tuple[Column, Column]]:
        """The columns derived from this one in `steps` steps, each with its source column."""
        for column in self.into:
            if depth == 1:
                yield self, column
            else:
                yield from column.derived(depth - 1)


KEYS = (
    Column("run_id", "string", "sha256 of what defines the experiment"),
    Column(
        "attempt",
        "int32",
        "the attempt that measured this, in `run` the one that published it; counts from 1",
        heading="Attempt",
        tables=("runs",),
    ),
)
"""The first columns of every table."""
EPOCH = Column("epoch", "int32", "counts from 1")


_NO_NUMBER = "it is not a number"
PARITY = (
    *KEYS,
    Column("step", "int32", "counts from 1"),
    Column("loss", "float64", "loss of the strategy", null=_NO_NUMBER),
    Column("loss_reference", "float64", "loss of one device"),
    Column("loss_difference", "float64", "|difference| ÷ max(1, |reference|)", null=_NO_NUMBER),
    Column(
        "gradient_difference",
        "float64",
        "largest |difference| of a gradient ÷ largest |gradient| of the model",
        null=_NO_NUMBER,
    ),
    Column(
        "parameter_difference",
        "float64",
        "largest |difference| of a parameter ÷ max(1, largest |parameter|)",
        null=_NO_NUMBER,
    ),
    Column(
        "evaluation_difference",
        "float64",
        "on 37 test samples, the larger of: |difference| of the loss ÷ max(1, |reference|); |difference| of the share "
        "of correct predictions ÷ 10",
        null=_NO_NUMBER,
    ),
    Column("tolerance", "float64", "limit of each of the four differences"),
    Column("passed", "bool", "all four are within the tolerance"),
)

COPIES, SAMPLES, SETTLED = "copies", "samples", "settled"
"""Checks that are made after each epoch."""
INITIAL = "initial"
"""Before the first."""
CLOSING = "closing check"
"""Stands for all checks after the last epoch, where they did not end."""
CHECKS = (
    *KEYS,
    EPOCH,
    Column(
        "check",
        "string",
        "initial: parameters and buffers before the first step; copies: of parameters, after each epoch; samples: "
        "those that gradients were taken of, after the last one or "
        "where they are not all; settled: parameters that changed between training and the end of the evaluation, "
        "likewise; the rest after the last: evaluation loss and accuracy, loss, gradients, update, "
        "buffers, bytes, exchanges, settings of torch; steps: why none was compared; closing check: it did not end",
    ),
    Column("detail", "string", "what was compared with what, or why nothing was"),
    Column("step", "int32", "step over all epochs, counts from 1", null="not of a step"),
    Column(
        "difference",
        "float64",
        "difference that was found; relative, or a number of ranks or tensors",
        null=("nothing was compared, or it is not a number"),
    ),
    Column("limit", "float64", "largest difference that passes", null="nothing was compared"),
    Column("passed", "bool", "the difference is within the limit", null="nothing was compared"),
)


_NOT_CLIPPED = "clip_norm is null, this rank clips no gradient (workers of parameter servers), or an older release"
_NONE = "no rank has clipped"
_STEPS = "without those that overflowed, which are skipped (precision=fp16)"

CLIPPING = (
    Column(
        "gradient_norm_mean",
        "float64",
        "norm of the whole gradient before it was clipped, over all ranks that hold a part: mean over the epoch's "
        f"steps, {_STEPS}",
        null=_NOT_CLIPPED,
        into=(
            Column(
                "mean_gradient_norm",
                "float64",
                "norm of the gradient before it was clipped: mean over the epoch's steps",
                null=_NONE,
                over=Over.MAX,
                into=(
                    Column(
                        "steady_gradient_norm",
                        "float64",
                        "mean_gradient_norm: median over the epochs without each attempt's first one",
                        null=f"{_NONE}, or no such epoch",
                        over=Over.MEDIAN,
                        steady=True,
                        repeats=Over.MEDIAN,
                        heading="Gradient norm before clipping",
                        where_known=True,
                    ),
                ),
            ),
        ),
    ),
    Column(
        "gradient_norm_max",
        "float64",
        f"the largest of these norms in the epoch, {_STEPS}",
        null=_NOT_CLIPPED,
        into=(
            Column(
                "largest_gradient_norm",
                "float64",
                "norm of the gradient before it was clipped: the largest of the epoch's steps",
                null=_NONE,
                over=Over.MAX,
                into=(
                    Column(
                        "highest_gradient_norm",
                        "float64",
                        "largest_gradient_norm of any finished epoch",
                        null=_NONE,
                        over=Over.MAX,
                        repeats=Over.MAX,
                        heading="Largest gradient norm before clipping",
                        where_known=True,
                    ),
                ),
            ),
        ),
    ),
    Column(
        "clipped_share",
        "float64",
        f"share of the epoch's steps in which this norm exceeded clip_norm, {_STEPS}",
        "share",
        null=_NOT_CLIPPED,
        into=(
            Column(
                "share_of_steps_clipped",
                "float64",
                "share of the epoch's steps in which the gradient's norm exceeded clip_norm",
                "share",
                null=_NONE,
                over=Over.MAX,
                into=(
                    Column(
                        "clipped_steps_share",
                        "float64",
                        "share_of_steps_clipped: mean over all finished epochs",
                        "share",
                        null=_NONE,
                        over=Over.MEAN,
                        repeats=Over.MEDIAN,
                        heading="Steps clipped",
                        where_known=True,
                    ),
                ),
            ),
        ),
    ),
)
"""The same on every rank that clips."""


_NO_EXPERTS = "the model has no experts among which tokens are divided, or an older release"

EXPERT_BALANCE = (
    Column(
        "expert_imbalance",
        "float64",
        "tokens of a block's busiest expert ÷ mean of the block's experts, all of the epoch's training and all ranks "
        "together; mean over the blocks. 1: even",
        null=_NO_EXPERTS,
        into=(
            Column(
                "final_expert_imbalance",
                "float64",
                "expert_imbalance of the last finished epoch",
                null=f"{_NO_EXPERTS}; no epoch finished",
                over=Over.LAST,
                repeats=Over.MEDIAN,
                heading="Expert imbalance",
                where_known=True,
            ),
        ),
    ),
)
"""1 + MaxVio_global of Wang et al. 2024 (arXiv 2408.15664, section 4.1), which they average over layers, too."""


_NO_METRIC = "metric=none, no finite number, or an older release"

METRIC = (
    Column(
        "test_metric",
        "float64",
        "the run's `metric` on the test set after the epoch, from sums over all ranks",
        null=_NO_METRIC,
        into=(
            Column(
                "final_test_metric",
                "float64",
                "test_metric of the last finished epoch that has it",
                null=f"{_NO_METRIC}; no epoch finished",
                over=Over.LAST,
                repeats=Over.MEDIAN,
                heading="Test metric",
                where_known=True,
            ),
        ),
    ),
)


PROCESSOR_SHARE = (
    Column(
        "others_time_s",
        "float64",
        "processor time that this rank's own cores gave to others in it: other programs, interrupts, the hypervisor",
        "s",
        null="it has no cores of its own (GPU ranks), or the kernel does not say",
    ),
    Column(
        "others_signed_time_s",
        "float64",
        "the same before it is cut off at 0: the kernel counts idle time in steps of 10 ms, so a short epoch's may be "
        "negative; those of many epochs add up",
        "s",
        null="likewise",
    ),
    Column(
        "stolen_time_s",
        "float64",
        "of that, what the hypervisor gave to other machines",
        "s",
        null="likewise",
    ),
    Column(
        "run_delay_s",
        "float64",
        "how long the training thread was ready to run in it, and had to wait for a core",
        "s",
        null="the kernel does not say",
    ),
)
"""Measured by `parallelbench.measure.processor`."""


_LATER = "a later execution of the same process"
_KEPT_NOT = "neither the first nor the last execution: only these are written, and compared with NumPy"
_KERNEL = "the kernel does not say"

PREPROCESS = (
    *KEYS,
    Column("execution", "int32", "counts from 1, in one process: the first is cold"),
    Column("start_s", "float64", "launch of the engine's process to its libraries being loaded", "s", null=_LATER),
    Column("read_s", "float64", "reading the table from a file that was just written", "s", null=_LATER),
    Column("take_in_s", "float64", "Arrow to the engine's own form", "s"),
    Column("compute_s", "float64", "the recipe; of duckdb and velox, with handing over what they return", "s"),
    Column("give_out_s", "float64", "the engine's own form to Arrow", "s"),
    Column("execution_time_s", "float64", "take_in_s + compute_s + give_out_s", "s"),
    Column("write_s", "float64", "writing the result as an Arrow file", "s", null=_KEPT_NOT),
    Column(
        "cold_time_s",
        "float64",
        "launch of the process to the end of the first execution: start, reading, execution",
        "s",
        null=_LATER,
        into=(
            Column(
                "preprocess_cold_time_s",
                "float64",
                "preprocessing by a new process: its start, reading the table, the first execution",
                "s",
                null="nothing was preprocessed",
                over=Over.MEDIAN,
                repeats=Over.MEDIAN,
                heading="Preprocessing, cold",
            ),
        ),
    ),
    Column(
        "warm_time_s",
        "float64",
        "execution_time_s of a later execution",
        "s",
        null="the first execution",
        into=(
            Column(
                "preprocess_warm_time_s",
                "float64",
                "an execution in a process that has done it before: median over all but the first",
                "s",
                null="there was one execution, or none",
                over=Over.MEDIAN,
                repeats=Over.MEDIAN,
                heading="Preprocessing, warm",
            ),
        ),
    ),
    Column(
        "cpu_time_s",
        "float64",
        "processor time of the execution: all threads of the process, user and system",
        "s",
        into=(
            Column(
                "preprocess_cpu_time_s",
                "float64",
                "processor time of an execution: median over all",
                "s",
                null="nothing was preprocessed",
                over=Over.MEDIAN,
                repeats=Over.MEDIAN,
                heading="Preprocessing, processor time",
                tables=("runs",),
            ),
        ),
    ),
    Column(
        "peak_memory_bytes",
        "int64",
        "peak resident memory of the process from its launch to the end of this execution, its libraries and the table "
        "included",
        "bytes",
        null=_KERNEL,
        into=(
            Column(
                "preprocess_peak_memory_bytes",
                "int64",
                "peak resident memory of the engine's process at the end of its first execution",
                "bytes",
                null="nothing was preprocessed, or the kernel does not say",
                over=Over.MIN,
                repeats=Over.MEDIAN,
                heading="Preprocessing, memory",
            ),
        ),
    ),
    Column("process_threads", "int32", "threads of the process at the end, idle ones included", null=_KERNEL),
    Column("bytes_read", "int64", "bytes that the process read for its table", "bytes", null=f"{_LATER}, or {_KERNEL}"),
    Column("input_rows", "int64", "rows of the table"),
    Column("input_bytes", "int64", "the table in Arrow's form", "bytes"),
    Column(
        "copied_in_bytes",
        "int64",
        "of these, bytes of buffers that the engine's own form does not consist of: they were copied or converted",
        "bytes",
        null="the engine does not say",
    ),
    Column(
        "output_rows",
        "int64",
        "rows of the result",
        into=(
            Column(
                "preprocess_output_rows",
                "int64",
                "rows that the engine prepared, equal to NumPy's",
                null="nothing was preprocessed",
                over=Over.MIN,
                repeats=Over.MEDIAN,
            ),
        ),
    ),
    Column("output_bytes", "int64", "the result in Arrow's form", "bytes"),
    Column("output_file_bytes", "int64", "the result's file", "bytes", null=_KEPT_NOT),
)


_NO_GPU = "not sampled of all the run's GPUs for the whole window"
_NO_HOST = "not sampled for the whole window"

GPU_AND_HOST = (
    Column(
        "gpu_energy_j",
        "float64",
        "energy of all the run's GPUs, each once, from the first rank's start of training to the last rank's end",
        "J",
        null=f"{_NO_GPU}; telemetry_flags may say why",
        into=(
            Column(
                "gpu_energy_per_epoch_j",
                "float64",
                "energy of all the run's GPUs in an epoch's training window: median over the epochs that have one, "
                "without each attempt's first one",
                "J",
                null="no GPU, or no telemetry of all of them",
                over=Over.MEDIAN,
                steady=True,
                repeats=Over.MEDIAN,
                heading="GPU energy per epoch",
                tables=("energy",),
            ),
        ),
    ),
    Column(
        "gpu_power_mean_w",
        "float64",
        "mean power of all these GPUs together in that window",
        "W",
        null=_NO_GPU,
        into=(
            Column(
                "steady_gpu_power_mean_w",
                "float64",
                "mean power of all the run's GPUs together: median over the epochs without each attempt's first one",
                "W",
                null="no GPU, or no telemetry of all of them",
                over=Over.MEDIAN,
                steady=True,
                repeats=Over.MEDIAN,
                heading="Power, all GPUs",
                tables=("energy",),
            ),
        ),
    ),
    Column(
        "gpu_power_max_w",
        "float64",
        "highest power sampled of one GPU in that window",
        "W",
        null=_NO_GPU,
        into=(
            Column(
                "steady_gpu_power_max_w",
                "float64",
                "highest power sampled of one GPU in any epoch but each attempt's first one",
                "W",
                null="no GPU, or no telemetry of all of them",
                over=Over.MAX,
                steady=True,
                repeats=Over.MAX,
                heading="Highest power of one GPU",
                tables=("energy",),
            ),
        ),
    ),
    Column("gpu_utilization_mean", "float64", "mean share of time in which a kernel ran", "share", null=_NO_GPU),
    Column(
        "gpu_memory_used_max_bytes",
        "int64",
        "most memory sampled in use on one GPU, by all processes",
        "bytes",
        null=_NO_GPU,
    ),
    Column(
        "gpu_processes_max",
        "int64",
        "most processes sampled at a time that computed on one GPU; the run itself has one on each",
        null=_NO_GPU,
    ),
    Column(
        "gpu_throttle_reasons",
        "int64",
        "all sampled reasons for lower clocks (bits: nvmlClocksEventReason…)",
        null=_NO_GPU,
        into=(
            Column(
                "steady_gpu_throttle_reasons",
                "int64",
                "all sampled reasons for lower clocks in any epoch but each attempt's first one (bits: "
                "nvmlClocksEventReason…)",
                null="no GPU, or no telemetry of all of them",
                over=Over.BITS,
                steady=True,
            ),
        ),
    ),
    Column("gpu_clock_mean_hz", "float64", "mean clock of the GPUs' SMs", "Hz", null=_NO_GPU),
    Column("gpu_temperature_max_c", "float64", "highest temperature sampled of one GPU", "°C", null=_NO_GPU),
    Column(
        "cpu_energy_j",
        "float64",
        "energy of all the nodes' processors in that window (RAPL)",
        "J",
        null=f"not readable, or {_NO_HOST}",
        into=(
            Column(
                "cpu_energy_per_epoch_j",
                "float64",
                "energy of the nodes' whole processors, other programs' work included (RAPL), in an epoch's training "
                "window: median over the epochs without each attempt's first one",
                "J",
                null="not readable",
                over=Over.MEDIAN,
                steady=True,
                repeats=Over.MEDIAN,
                heading="Processors' energy per epoch",
                tables=("energy",),
            ),
        ),
    ),
    Column(
        "cpu_clock_mean_hz", "float64", "mean clock of all the nodes' cores, read once a second", "Hz", null=_NO_HOST
    ),
    Column(
        "host_memory_used_max_bytes",
        "int64",
        "most memory sampled in use on one node, by all processes",
        "bytes",
        null=_NO_HOST,
    ),
    Column(
        "network_sent_bytes",
        "int64",
        "sent by all processes of the nodes in that window, without the loopback interface and RDMA; sum over nodes",
        "bytes",
        null=_NO_HOST,
    ),
    Column("network_received_bytes", "int64", "received, likewise", "bytes", null=_NO_HOST),
    Column(
        "telemetry_flags",
        "string",
        "short: the window is under 2 s, so energies are not to be trusted; sparse: samples more than 1 s apart; "
        "from_power: energy integrated from power, since there is no counter; and why an energy is null: reset: the "
        "counter began anew; incomplete: no sample before or after the window",
        null="no flag",
        into=(
            Column(
                "energy_flags",
                "string",
                "flags of the energies of the epochs without each attempt's first one: short, sparse, from_power, "
                "reset, incomplete, see telemetry_flags",
                null="no flag",
                over=Over.FLAGS,
                steady=True,
                repeats=Over.FLAGS,
                heading="Flags",
                tables=("energy",),
                show=Show.PLAIN,
            ),
        ),
    ),
)
"""What `epochs` holds of them."""

WARNING = "telemetry_warning"
"""The event of a journal that gives the reason for a null."""
_NOT_READ = "the device or its driver does not say"
TELEMETRY = (
    *KEYS,
    Column("node", "string", "host name"),
    Column("device_uuid", "string", "the GPU that was sampled", null="the host itself was"),
    Column("time", "float64", "Unix time of the sample", "s"),
    Column(
        "energy_j",
        "float64",
        "energy counter: of a GPU since its driver was loaded, of a host's processors (RAPL) since an arbitrary moment",
        "J",
        null=_NOT_READ,
    ),
    Column("power_w", "float64", "power of a GPU, instantaneous where the driver has that", "W", null=_NOT_READ),
    Column("utilization", "float64", "recent share of time in which a kernel ran", "share", null=_NOT_READ),
    Column("memory_used_bytes", "int64", "memory in use, by all processes", "bytes", null=_NOT_READ),
    Column(
        "clock_hz",
        "float64",
        "clock of a GPU's SMs; mean clock of a host's cores, once in 10 samples",
        "Hz",
        null=_NOT_READ,
    ),
    Column("temperature_c", "float64", "temperature of a GPU", "°C", null=_NOT_READ),
    Column("throttle_reasons", "int64", "reasons for a GPU's lower clocks (bits)", null=_NOT_READ),
    Column("processes", "int64", "processes that compute on a GPU", null=_NOT_READ),
    Column(
        "network_sent_bytes",
        "int64",
        "sent by a host since it started, without the loopback interface and RDMA",
        "bytes",
        null=_NOT_READ,
    ),
    Column("network_received_bytes", "int64", "received, likewise", "bytes", null=_NOT_READ),
)


_UNPREPARED = "nothing was preprocessed"
_UNTRAINED = "nothing was trained (epochs=0)"
RUN = (
    *KEYS,
    Column("sweep", "string", "name of the sweep"),
    Column("slug", "string", "name of the run folder", heading="Run", tables=("runs",)),
    Column(
        "outcome",
        "string",
        "ok, or parity_failed: trained to the end, but not like one device",
        heading="Outcome",
        tables=("runs",),
        show=Show.KNOWN,
        beside=("state",),
    ),
    Column("reason", "string", "the outcome in one line", heading="Reason", tables=("runs",)),
    Column("model", "string", "configuration: model"),
    Column("data", "string", "configuration: data"),
    Column("strategy", "string", "configuration: strategy", repeats=Over.SAME),
    Column("framework", "string", "what trained: torch or tensorflow", null="a release that had torch only"),
    Column("optimizer", "string", "configuration: optimizer"),
    Column("loader", "string", "configuration: loader"),
    Column("devices", "int32", "devices over all nodes", repeats=Over.SAME),
    Column("nodes", "int32", "nodes", repeats=Over.SAME),
    Column("processes", "int32", "training processes"),
    Column("cores_per_device", "int32", "pinned cores of a CPU device", null="the devices are GPUs"),
    Column("device_type", "string", "cpu or cuda"),
    Column("device_name", "string", "name of the processor or GPU"),
    Column("epochs", "int32", "epochs asked for"),
    Column("batch_size", "int32", "as configured: global under strong scaling, per device under weak scaling"),
    Column("global_batch_size", "int32", "samples per optimizer step over all devices"),
    Column(
        "scaling",
        "string",
        "strong: the global batch is fixed; weak: the batch per device is",
        repeats=Over.SAME,
    ),
    Column("precision", "string", "arithmetic of forward and backward"),
    Column("channels_last", "bool", "configuration: channels_last"),
    Column("compile", "bool", "configuration: compile"),
    Column("seed", "int64", "seed that was used: configuration seed + repeat"),
    Column("repeat", "int32", "which repetition", heading="Repeat", tables=("runs",)),
    Column("parameters", "int64", "trainable parameters of the model", null=_UNTRAINED),
    Column("train_samples", "int64", "samples in the training set; where a run trains on prepared rows, of those"),
    Column("test_samples", "int64", "samples in the test set, each evaluated once; likewise"),
    Column("steps_per_epoch", "int32", "optimizer steps per epoch"),
    Column("dropped_samples", "int64", "training samples per epoch that were dropped, since they filled no batch"),
    Column(
        "tokens_per_sample",
        "int32",
        "tokens of a sample, at each of which the next one is predicted",
        null="the data are not such tokens, or an older release measured it",
    ),
    Column("learning_rate", "float64", "as used, after the scaling rule"),
    Column("oversubscribed", "bool", "more devices than cores: times mean nothing"),
    Column("launcher", "string", "what started its processes; inline: trained in the process that asked for it"),
    Column("packed", "bool", "forked from a warm process, so its start-up means nothing"),
    Column("deterministic", "bool", "deterministic algorithms only"),
    Column("detect_anomaly", "bool", "autograd searched for the source of NaNs"),
    Column(
        "theoretical_bubble",
        "float64",
        "share of a step that a device must idle by the schedule, if all stages take equally long; by formula, not "
        "measured",
        "share",
        null="no schedule",
        repeats=Over.MAX,
        heading="Bubble in theory",
    ),
    Column(
        "theoretical_state_bytes",
        "int64",
        "parameters, gradients and optimizer state on each device, without activations and buffers; by formula, not "
        "measured",
        "bytes",
        null="devices hold different things, or there is no formula",
        repeats=Over.MAX,
        heading="Model states in theory",
        tables=("configurations",),
    ),
    Column(
        "parity_passed",
        "bool",
        "training equals one device, or `parity_reference`, within the tolerance",
        null="not checked",
        heading="Parity",
        tables=("runs",),
        show=Show.PASSED,
    ),
    Column(
        "parity_reference",
        "string",
        "what parity was checked against, where that is not one device: the class of the author's own reference",
        null="one device, or not checked",
        heading="Parity's own reference",
        tables=("runs",),
    ),
    Column(
        "rounding",
        "float64",
        "relative rounding of the coarsest number format in training: losses differ from one device's by this alone, "
        "and by what steps make of it",
        null="it does not train like one device by design",
    ),
    Column(
        "least_flop_per_sample",
        "float64",
        "floating-point operations that training on a sample takes at least: matrix products, and a quarter of "
        "convolutions, as the fastest algorithms need",
        null="it has neither, or the run ended before",
    ),
    Column(
        "layers_json",
        "string",
        "of each layer of the model: operations, bytes and parameters, counted while one sample passes; JSON",
        null="the run ended before, an older release measured it, or it trained with TensorFlow",
    ),
    Column(
        "data_sha256",
        "string",
        "what the data set holds: sha256 of the arrays' own",
        null="the run ended before it was known",
    ),
    Column(
        "submit",
        "string",
        "identifies the `submit` command that asked for this attempt: its runs were measured in turn",
        null="not recorded",
    ),
    Column(
        "launched_at", "float64", "Unix time at which the attempt's processes were started", "s", null="not recorded"
    ),
    Column(
        "attempts_json",
        "string",
        "of each attempt that trained: number, time of day, host, commit, uncommitted changes, and a plugin's sources; "
        "canonical JSON",
        null="not recorded",
    ),
    Column(
        "resumed_after",
        "string",
        "epochs after which training was interrupted and a later attempt went on, as in '4, 9'",
        null="never interrupted",
    ),
    Column(
        "resumed_elsewhere",
        "string",
        "device, software, commit and settings in which a later attempt differed from the first one",
        null="none",
    ),
    Column("warnings", "string", "what a reader should know before comparing this run", null="nothing"),
    Column(
        "startup_s",
        "float64",
        "launch of the processes to the end of the first step on rank 0: the sum of the parts below; the "
        "capture of the environment is not part of it",
        "s",
        null=_UNTRAINED,
        heading="Start-up, parity check included",
        tables=("runs",),
    ),
    Column("startup_launch_s", "float64", "launch to the worker's first line: interpreter, torchrun's rendezvous", "s"),
    Column("startup_imports_s", "float64", "importing torch and the suite", "s"),
    Column(
        "startup_process_group_s",
        "float64",
        "initialising the devices and their libraries and, with several processes, joining the process group",
        "s",
    ),
    Column("startup_data_s", "float64", "opening the data set and moving it to the device", "s"),
    Column("startup_parity_s", "float64", "the parity check", "s", null="not checked"),
    Column(
        "startup_model_s", "float64", "building and wrapping the model, waiting for all ranks", "s", null=_UNTRAINED
    ),
    Column("startup_compile_s", "float64", "torch.compile", "s", null="not compiled"),
    Column("closing_check_s", "float64", "the closing check after the last epoch, on rank 0", "s", null="not checked"),
    Column("startup_first_step_s", "float64", "the first training step, synchronised", "s", null=_UNTRAINED),
    Column("preprocess_engine", "string", "configuration: preprocess.engine; none: nothing was preprocessed"),
    Column("preprocess_recipe", "string", "configuration: preprocess.recipe", null=_UNPREPARED),
    Column("preprocess_threads", "int32", "threads that the engine may use", null=_UNPREPARED),
    Column("preprocess_version", "string", "version of the engine's library", null=_UNPREPARED),
    Column(
        "preprocess_failed",
        "bool",
        "whether the engine's process crashed, lacked a function, or prepared something else than NumPy",
        null=f"{_UNPREPARED}, or the run ended for another reason",
    ),
    Column(
        "preprocess_time_s",
        "float64",
        "launch of the engine's process to its result being read back, all executions included; the comparison with "
        "NumPy is not part of it",
        "s",
        null=_UNPREPARED,
        repeats=Over.MEDIAN,
    ),
    Column(
        "probed_latency_s",
        "float64",
        "latency of one message in a ring over all ranks: a 1 KiB all-reduce ÷ 2(n − 1), after the last epoch",
        "s",
        null="one process, or no attribution pass (`measure.attribution_steps`)",
    ),
    Column(
        "probed_bandwidth_bytes_per_s",
        "float64",
        "bytes that each rank sends in a 16 MiB ring all-reduce, less those of a 1 KiB one, ÷ the difference of their "
        "times",
        "bytes/s",
        null="one process, or no attribution pass",
    ),
    *(
        Column(
            f"probed_{moment}_{what}",
            "float64",
            f"{meaning}, at the run's {moment}: the slowest rank's, measured on its own device and cores",
            "bytes/s" if what == "memory_bytes_per_s" else "flop/s",
            null="not measured (`measure.probe`, or the run's times mean nothing)",
        )
        for moment in ("start", "end")
        for what, meaning in (
            ("matmul_flop_per_s", "floating-point operations per second of a matrix product (CPU: fp32, GPU: fp16)"),
            ("memory_bytes_per_s", "bytes read and written per second when memory is copied"),
        )
    ),
    Column(
        "gloo_bytes_per_step_sum",
        "float64",
        "bytes that all ranks send per optimizer step as gloo sends them, messages of any size: counted in the closing "
        "check's steps; a reduce-scatter goes as an all-reduce, which is twice the textbook's bytes",
        "bytes",
        null="one process, another library (NCCL does not say), or not counted (measure.parity, compile, graph)",
        repeats=Over.MEDIAN,
        heading="Sent per step by gloo, all processes",
        show=Show.SENT,
    ),
    Column("config_json", "string", "the whole configuration, canonical JSON"),
    Column("environment_json", "string", "versions, devices, topology, allowed environment variables"),
)


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
