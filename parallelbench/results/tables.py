"""The result tables: a list of columns each. Ranks write what they measured, nothing derived.

Of each column: its name, whose end says type and unit, what it means, and what null means. Below it stands what follows
from it: `over` the ranks of an epoch, the epochs of a run, or a run's rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelbench.results.declaration import Column, Over, Show, count, flag, share, table_of, text

if TYPE_CHECKING:
    import pyarrow as pa

TABLES_VERSION = 12
"""Version of the result tables, in manifests and Parquet files; not in run ids, so a new column reruns nothing."""
COPIES, SAMPLES, SETTLED = "copies", "samples", "settled"
"""Checks that are made after each epoch."""
INITIAL = "initial"
"""Before the first."""
CLOSING = "closing check"
"""Stands for all checks after the last epoch, where they did not end."""
WARNING = "telemetry_warning"
"""The event of a journal that gives the reason for a null."""
SUSPENDED = "suspended"
"""The event of a sampler's journal that ranks of its node, or the sampler itself, had been stopped or frozen."""

_NOT_CHECKED = "not checked"
_NOT_RECORDED = "not recorded"
_UNSAVED = "no checkpoint was saved (launcher.checkpoint=always saves some)"
_UNTRAINED = "nothing was trained (epochs=0)"
_UNPREPARED = "nothing was preprocessed"
_MATMUL = "floating-point operations per second of a matrix product (CPU: fp32, GPU: fp16)"
_MEMORY = "bytes read and written per second when memory is copied"
_SLOWEST = ": the slowest of up to eight ranks of each node, each on its first device and its own cores"
_UNPROBED = "not measured (`measure.probe`, or the run's times mean nothing)"
_NO_METRIC = "metric=none, or no finite number"
_NO_EXPERTS = "the model has no experts among which tokens are divided"
_UNSAMPLED = "not sampled for the whole window"
_UNSAMPLED_GPU = "not sampled of all the run's GPUs for the whole window"
_NO_GPUS = "no GPU, or no telemetry of all of them (measure.telemetry_hz)"
_NOT_CLIPPED = "clip_norm is null, or this rank clips no gradient (workers of parameter servers)"
_NO_RANK_CLIPPED = "no rank has clipped"
_NOT_SKIPPED = "without those that overflowed, which are skipped (precision=fp16)"
_NO_NUMBER = "it is not a number"
_NOT_COMPARED = "nothing was compared"
_NOT_READ = "the device or its driver does not say"
_NOT_HERE = "none on this rank"
_LATER = "a later execution of the same process"
_NOT_KEPT = "neither the first nor the last execution: only these are written, and compared with NumPy"
_KERNEL = "the kernel does not say"
_PROGRAM = "a program of the user's own, whose part this is"
_PACKED = "packed: a warm process was forked, so no start is measured"

# A column takes one line, or as few as its words do: the formatter would give each argument one.
# fmt: off
KEYS = (
    text("run_id", "sha256 of what defines the experiment"),
    count("attempt", "the attempt that measured this, in `run` the one that published it; counts from 1",
        heading="Attempt", tables=("runs",)),
)
"""The first columns of every table."""
EPOCH = count("epoch", "counts from 1")
RANK = count("rank", "0 … processes − 1")

RUN = table_of(
    *KEYS,
    text("sweep", "name of the sweep"),
    text("slug", "name of the run folder", heading="Run", tables=("runs",)),
    text("outcome", "ok, or parity_failed: trained to the end, but not like one device", heading="Outcome",
        tables=("runs",), show=Show.KNOWN, beside=("state",)),
    text("reason", "the outcome in one line", heading="Reason", tables=("runs",)),
    text("model", "configuration: model"),
    text("data", "configuration: data", null=_PROGRAM),
    text("strategy", "configuration: strategy", repeats=Over.SAME),
    text("framework", "what trained: torch, tensorflow, or a program of the user's own", repeats=Over.SAME),
    text("optimizer", "configuration: optimizer", null=_PROGRAM),
    text("loader", "configuration: loader", null=_PROGRAM),
    count("devices", "devices over all nodes", repeats=Over.SAME),
    count("nodes", "nodes", repeats=Over.SAME),
    count("processes", "training processes", null=_PROGRAM),
    count("cores_per_device", "pinned cores of a CPU device", null="the devices are GPUs"),
    text("device_type", "cpu or cuda"),
    text("device_name", "name of the processor or GPU, of rank 0"),
    Column("memory_limit_bytes", "memory of the run's smallest GPU, as torch has it, or for a user's program as the "
        "driver has it; on CPUs what the run's processes may take of the node that allows least: its memory, or less "
        "by its cgroups; at the run's start", null="TensorFlow, which does not say it of GPUs, or the driver does not",
        repeats=Over.MIN, heading="Memory limit", tables=("configurations",), where_known=True),
    text("memory_limit_by", "what limits it: device (the GPU's memory), cgroup, or node (its memory)",
        null="likewise", repeats=Over.FIRST),
    count("epochs", "epochs asked for"),
    count("batch_size", "as configured: global under strong scaling, per device under weak scaling"),
    count("global_batch_size", "samples per optimizer step over all devices", null=_PROGRAM),
    text("scaling", "strong: the global batch is fixed; weak: the batch per device is", repeats=Over.SAME),
    text("precision", "arithmetic of forward and backward", null=_PROGRAM),
    flag("channels_last", "configuration: channels_last", null=_PROGRAM),
    flag("compile", "configuration: compile", null=_PROGRAM),
    Column("seed", "seed that was used: configuration seed + repeat", type="int64"),
    count("repeat", "which repetition", heading="Repeat", tables=("runs",)),
    Column("parameters", "trainable parameters of the model", type="int64", null=_UNTRAINED),
    Column("train_samples", "samples in the training set; where a run trains on prepared rows, of those",
        null=_PROGRAM),
    Column("test_samples", "samples in the test set, each evaluated once; likewise", null=_PROGRAM),
    count("loader_samples_per_step", "samples that the DataLoaders of a user's program gave for a step, over all "
        "ranks; held against `global_batch_size`, which is what its user says", null="a run of the suite's own, or no "
        "DataLoader of torch's"),
    count("steps_per_epoch", "optimizer steps per epoch"),
    Column("dropped_samples", "training samples per epoch that were dropped, since they filled no batch, or the epoch "
        "was cut short (`measure.steps_per_epoch`)", null=_PROGRAM),
    count("tokens_per_sample", "tokens of a sample, at each of which the next one is predicted",
        null="the data are not such tokens"),
    Column("learning_rate", "as used, after the scaling rule", null=_PROGRAM),
    flag("oversubscribed", "more devices than cores: times mean nothing"),
    text("launcher", "what started its processes; inline: trained in the process that asked for it"),
    flag("packed", "forked from a process that had loaded torch: one for each repeat"),
    flag("deterministic", "deterministic algorithms only", null=_PROGRAM),
    flag("detect_anomaly", "autograd searched for the source of NaNs", null=_PROGRAM),
    share("theoretical_bubble", "share of a step that a device must idle by the schedule, if all stages take equally "
        "long; by formula, not measured", null="no schedule", repeats=Over.MAX, heading="Bubble in theory"),
    Column("theoretical_state_bytes", "parameters, gradients and optimizer state on each device, without activations "
        "and buffers; by formula, not measured", null="devices hold different things, or there is no formula",
        repeats=Over.MAX, heading="Model states in theory", tables=("configurations",),
        show=Show.SENT),
    flag("parity_passed", "training equals one device, or `parity_reference`, within the tolerance; where "
        "`parity_model` is given, that of a smaller model", null=_NOT_CHECKED, heading="Parity", tables=("runs",),
        show=Show.PASSED),
    text("parity_model", "how much of the model parity was checked on, where that is a smaller one of its kind: its "
        "blocks, values per token, entries of the vocabulary and tokens per sample, and how many the whole has",
        null="the model itself, or not checked", heading="Parity's smaller model", tables=("runs",)),
    text("parity_reference", "what parity was checked against, where that is not one device: the class of the author's "
        "own reference", null="one device, or not checked", heading="Parity's own reference", tables=("runs",)),
    Column("rounding", "relative rounding of the coarsest number format in training: losses differ from one device's "
        "by this alone, and by what steps make of it", null="it does not train like one device by design"),
    Column("least_flop_per_sample", "floating-point operations that training on a sample takes at least: matrix "
        "products, attention (of torch's causal one, what the mask leaves), and convolutions as the fastest algorithms "
        "compute them: 1×1 whole, 3×3 a quarter, others a k²-th", null="it has none, or the run ended before"),
    text("layers_json", "of each layer of the model: operations, bytes and parameters, counted while one sample "
        "passes; JSON", null="the run ended before, or it trained with TensorFlow"),
    text("data_sha256", "what the data set holds: sha256 of the arrays' own", null="the run ended before it was known"),
    text("submit", "identifies the `submit` command that asked for this attempt: its runs were measured in turn",
        null=_NOT_RECORDED),
    Column("launched_at", "Unix time just before the attempt's processes were started or, with several nodes, before "
        "these met", null=_NOT_RECORDED),
    Column("waited_s", "submission to the start of the job that the attempt is a part of: how long it waited in the "
        "queue", null="no job was queued, or it was started again, or waited for other jobs of its sweep"),
    text("attempts_json", "of each attempt that trained: number, the `submit` that asked for it, time of day, host, "
        "commit, uncommitted changes, and a plugin's sources; canonical JSON", null=_NOT_RECORDED),
    text("resumed_after", "epochs after which training was interrupted and a later attempt went on, as in '4, 9'",
        null="never interrupted"),
    text("resumed_elsewhere",
        "device, software, commit and settings in which a later attempt differed from the first one", null="none"),
    text("warnings", "what a reader should know before comparing this run", null="nothing"),
    Column("startup_s", "launch of the processes to the end of the first step on rank 0: the sum of the parts below; "
        "the capture of the environment is not part of it", null=f"{_UNTRAINED}, or {_PACKED}",
        heading="Start-up, parity check included", tables=("runs",)),
    Column("startup_launch_s", "launch to the worker's first line: interpreter, torchrun's rendezvous", null=_PACKED),
    Column("startup_imports_s", "importing torch and the suite", null=_PACKED),
    Column("startup_process_group_s",
        "initialising the devices and their libraries and, with several processes, joining the process group",
        null=_PACKED),
    Column("startup_data_s", "opening the data set and moving it to the device", null=_PACKED),
    Column("startup_parity_s", "the parity check", null=f"{_NOT_CHECKED}, or {_PACKED}"),
    Column("startup_model_s", "building and wrapping the model, waiting for all ranks; of a user's program, from its "
        "command to the end of its first step, which is in no epoch",
        null=f"{_UNTRAINED}, or {_PACKED}"),
    Column("startup_compile_s", "torch.compile, or the capture of a CUDA graph; TensorFlow: tracing",
        null=f"neither compiled nor captured nor traced, or {_PACKED}"),
    Column("closing_check_s", "the closing check after the last epoch, on rank 0", null=_NOT_CHECKED),
    Column("checkpoint_save_s", "from the end of an epoch to its state being on disk, of all ranks: median over the "
        "checkpoints of the run; training stands still meanwhile", null=_UNSAVED),
    count("checkpoint_bytes", "size of the run's last checkpoint: the files of all ranks", null=_UNSAVED),
    Column("startup_first_step_s", "the first training step, synchronised", null=f"{_UNTRAINED}, or {_PACKED}"),
    text("preprocess_engine", "configuration: preprocess.engine; none: nothing was preprocessed", null=_PROGRAM),
    text("preprocess_recipe", "configuration: preprocess.recipe", null=_UNPREPARED),
    count("preprocess_threads", "threads that the engine may use", null=_UNPREPARED),
    text("preprocess_version", "version of the engine's library", null=_UNPREPARED),
    flag("preprocess_failed", "whether the engine's process crashed, lacked a function, or prepared something else "
        "than NumPy", null=f"{_UNPREPARED}, or the run ended for another reason"),
    Column("preprocess_time_s", "launch of the engine's process to its result being read back, all executions "
        "included; the comparison with NumPy is not part of it", null=_UNPREPARED, repeats=Over.MEDIAN),
    Column("probed_latency_s", "latency of one message in a ring over all ranks: a 1 KiB all-reduce ÷ 2(n − 1), after "
        "the last epoch", null="one process, or no attribution pass (`measure.attribution_steps`)"),
    Column("probed_bandwidth_bytes_per_s", "bytes that each rank sends in a 16 MiB ring all-reduce, less those of "
        "a 1 KiB one, ÷ the difference of their times", null="one process, or no attribution pass"),
    Column("probed_start_matmul_flop_per_s", f"{_MATMUL}, at the run's start{_SLOWEST}", null=_UNPROBED),
    Column("probed_start_memory_bytes_per_s", f"{_MEMORY}, at the run's start{_SLOWEST}", null=_UNPROBED),
    Column("probed_end_matmul_flop_per_s", f"{_MATMUL}, at the run's end{_SLOWEST}", null=_UNPROBED),
    Column("probed_end_memory_bytes_per_s", f"{_MEMORY}, at the run's end{_SLOWEST}", null=_UNPROBED),
    Column("gloo_bytes_per_step_sum",
        "bytes that all ranks send per optimizer step as gloo sends them, messages of any size: counted in the closing "
        "check's steps; a reduce-scatter goes as an all-reduce, which is twice the textbook's bytes", unit="bytes",
        null="one process, another library (NCCL does not say), or not counted (measure.parity, compile, graph)",
        repeats=Over.MEDIAN, heading="Sent per step by gloo, all processes", show=Show.SENT),
    text("config_json", "the whole configuration, canonical JSON"),
    text("environment_json", "versions, devices, topology, allowed environment variables"),
)

METRIC = table_of(
    Column("test_metric", "the run's `metric` on the test set after the epoch, from sums over all ranks",
        null=_NO_METRIC),
    Column("final_test_metric", "test_metric of the last finished epoch that has it", over=Over.LAST, of="test_metric",
        null=f"{_NO_METRIC}; no epoch finished", repeats=Over.MEDIAN, heading="Test metric", where_known=True),
)

EXPERT_BALANCE = table_of(
    Column("expert_imbalance", "tokens of a block's busiest expert ÷ mean of the block's experts, all of the epoch's "
        "training and all ranks together; mean over the blocks. 1: even", null=_NO_EXPERTS),
    Column("final_expert_imbalance", "expert_imbalance of the last finished epoch", over=Over.LAST,
        of="expert_imbalance", null=f"{_NO_EXPERTS}; no epoch finished", repeats=Over.MEDIAN,
        heading="Expert imbalance", where_known=True),
)
"""1 + MaxVio_global of Wang et al. 2024 (arXiv 2408.15664, section 4.1), which they average over layers, too."""

GPU_AND_HOST = table_of(
    Column("gpu_energy_j", "energy of all the run's GPUs, each once, from the first rank's start of training to the "
        "last rank's end", window="steady", null=f"{_UNSAMPLED_GPU}; telemetry_flags may say why"),
    Column("gpu_energy_per_epoch_j", "energy of all the run's GPUs in an epoch's training window: median over the "
        "epochs that have one, without each attempt's first one", over=Over.MEDIAN, of="gpu_energy_j", steady=True,
        window="steady", null=_NO_GPUS, repeats=Over.MEDIAN, heading="GPU energy per epoch", tables=("energy",)),
    Column("training_gpu_energy_j", "energy of all the run's GPUs in the training windows of all finished epochs",
        over=Over.SUM, of="gpu_energy_j", window="whole", null=f"{_NO_GPUS}, or an epoch without energy"),
    Column("gpu_power_mean_w", "mean power of all these GPUs together in that window", window="steady",
        null=_UNSAMPLED_GPU),
    Column("steady_gpu_power_mean_w", "mean power of all the run's GPUs together: median over the epochs without each "
        "attempt's first one", over=Over.MEDIAN, of="gpu_power_mean_w", steady=True, window="steady", null=_NO_GPUS,
        repeats=Over.MEDIAN, heading="Power, all GPUs", tables=("energy",)),
    Column("gpu_power_max_w", "highest power sampled of one GPU in that window", null=_UNSAMPLED_GPU),
    Column("steady_gpu_power_max_w", "highest power sampled of one GPU in any epoch but each attempt's first one",
        over=Over.MAX, of="gpu_power_max_w", steady=True, window="steady", null=_NO_GPUS, repeats=Over.MAX,
        heading="Highest power of one GPU", tables=("energy",)),
    share("gpu_utilization_mean", "mean share of time in which a kernel ran", null=_UNSAMPLED_GPU),
    Column("gpu_memory_used_max_bytes", "most memory sampled in use on one GPU, by all processes", window="steady",
        null=_UNSAMPLED_GPU),
    Column("gpu_processes_max", "most processes sampled at a time that computed on one GPU; the run itself has one on "
        "each", type="int64", null=_UNSAMPLED_GPU),
    Column("gpu_throttle_reasons", "all sampled reasons for lower clocks (bits: nvmlClocksEventReason…)", type="int64",
        null=_UNSAMPLED_GPU),
    Column("steady_gpu_throttle_reasons", "all sampled reasons for lower clocks in any epoch but each attempt's first "
        "one (bits: nvmlClocksEventReason…)", over=Over.BITS, of="gpu_throttle_reasons", steady=True, null=_NO_GPUS),
    Column("gpu_clock_mean_hz", "mean clock of the GPUs' SMs", null=_UNSAMPLED_GPU),
    Column("gpu_temperature_max_c", "highest temperature sampled of one GPU", null=_UNSAMPLED_GPU),
    Column("cpu_energy_j", "energy of all the nodes' processors in that window (RAPL)",
        null=f"not readable, or {_UNSAMPLED}"),
    Column("cpu_energy_per_epoch_j", "energy of the nodes' whole processors, other programs' work included (RAPL), in "
        "an epoch's training window: median over the epochs without each attempt's first one", over=Over.MEDIAN,
        of="cpu_energy_j", steady=True, window="steady",
        null="counters that can't be read (RAPL), or no telemetry (measure.telemetry_hz)", repeats=Over.MEDIAN,
        heading="Processors' energy per epoch", tables=("energy",)),
    Column("training_cpu_energy_j", "energy of the nodes' whole processors, likewise, in the training windows of all "
        "finished epochs", over=Over.SUM, of="cpu_energy_j", window="whole", null="not readable in all of them"),
    Column("cpu_clock_mean_hz", "mean clock of all the nodes' cores, read with every tenth sample", null=_UNSAMPLED),
    Column("host_memory_used_max_bytes", "most memory sampled in use on one node, by all processes", null=_UNSAMPLED),
    Column("suspended_s", "time in that window for which a rank, or what watches it, stood still: stopped by a signal "
        "(SIGSTOP, a suspended job), or frozen with its container or machine; of the node where it was longest",
        null=_UNSAMPLED),
    Column("longest_suspension_s", "longest suspended_s of any epoch without each attempt's first one", over=Over.MAX,
        of="suspended_s", steady=True, null="not sampled"),
    Column("network_sent_bytes", "sent by all processes of the nodes in that window, without the loopback interface "
        "and RDMA; sum over nodes", null=_UNSAMPLED),
    Column("network_received_bytes", "received, likewise", null=_UNSAMPLED),
    text("telemetry_flags", "short: the window is under 2 s, so energies are not to be trusted; sparse: samples more "
        "than 1 s apart; from_power: energy integrated from power, since there is no counter; and why an energy is "
        "null: reset: the counter began anew; incomplete: no sample before or after the window", null="no flag"),
    Column("energy_flags", "flags of the energies of the epochs without each attempt's first one: short, sparse, "
        "from_power, reset, incomplete, see telemetry_flags", over=Over.FLAGS, of="telemetry_flags", steady=True,
        repeats=Over.FLAGS, heading="Flags", tables=("energy",), show=Show.PLAIN),
)
"""What `epochs` holds of them."""

EPOCHS = table_of(
    *KEYS,
    EPOCH,
    Column("train_loss", "mean of `loss` over the epoch's training samples, while training", null=_PROGRAM),
    share("train_accuracy", "share of correct predictions on the training samples, while training", null=_PROGRAM),
    Column("test_loss", "mean of `loss` over the test set after the epoch", null=_PROGRAM),
    share("test_accuracy", "share of correct predictions on the test set after the epoch", null=_PROGRAM),
    Column("best_test_accuracy", "highest test accuracy after any finished epoch", over=Over.MAX, of="test_accuracy",
        null="no epoch finished", repeats=Over.MEDIAN),
    *METRIC,
    Column("train_samples", "samples trained on in this epoch, over all ranks", null=_PROGRAM),
    Column("test_samples", "samples evaluated, over all ranks", null=_PROGRAM),
    count("steps", "optimizer steps in this epoch"),
    *EXPERT_BALANCE,
    Column("finished_at", "Unix time at the end of the epoch"),
    *GPU_AND_HOST,
)

CLIPPING = table_of(
    Column("gradient_norm_mean", "norm of the whole gradient before it was clipped, over all ranks that hold a part: "
        f"mean over the epoch's steps, {_NOT_SKIPPED}", null=_NOT_CLIPPED),
    Column("mean_gradient_norm", "norm of the gradient before it was clipped: mean over the epoch's steps",
        over=Over.MAX, of="gradient_norm_mean", null=_NO_RANK_CLIPPED),
    Column("steady_gradient_norm", "mean_gradient_norm: median over the epochs without each attempt's first one",
        over=Over.MEDIAN, of="mean_gradient_norm", steady=True, null=f"{_NO_RANK_CLIPPED}, or no such epoch",
        repeats=Over.MEDIAN, heading="Gradient norm before clipping", where_known=True),
    Column("gradient_norm_max", f"the largest of these norms in the epoch, {_NOT_SKIPPED}", null=_NOT_CLIPPED),
    Column("largest_gradient_norm", "norm of the gradient before it was clipped: the largest of the epoch's steps",
        over=Over.MAX, of="gradient_norm_max", null=_NO_RANK_CLIPPED),
    Column("highest_gradient_norm", "largest_gradient_norm of any finished epoch", over=Over.MAX,
        of="largest_gradient_norm", repeats=Over.MAX, heading="Largest gradient norm before clipping",
        where_known=True),
    share("clipped_share", f"share of the epoch's steps in which this norm exceeded clip_norm, {_NOT_SKIPPED}",
        null=_NOT_CLIPPED),
    Column("share_of_steps_clipped", "share of the epoch's steps in which the gradient's norm exceeded clip_norm",
        over=Over.MAX, of="clipped_share", null=_NO_RANK_CLIPPED),
    Column("clipped_steps_share", "share_of_steps_clipped: mean over all finished epochs", over=Over.MEAN,
        of="share_of_steps_clipped", repeats=Over.MEDIAN, heading="Steps clipped", where_known=True),
)
"""The same on every rank that clips."""

RANKS = table_of(
    *KEYS,
    EPOCH,
    RANK,
    count("local_rank", "rank within its node"),
    text("node", "Slurm's name of the node, or the host name"),
    text("device_uuid", "UUIDs of this rank's GPUs, or its CPU cores"),
    Column("epoch_time_s", "training window of the epoch on this rank"),
    Column("slowest_epoch_time_s", "training window of the epoch on its slowest rank", over=Over.MAX,
        of="epoch_time_s", window="steady"),
    Column("steady_epoch_time_s", "training window of the slowest rank: median over the epochs without each attempt's "
        "first one", over=Over.MEDIAN, of="slowest_epoch_time_s", steady=True, window="steady", null="no such epoch",
        repeats=Over.MEDIAN, heading="Time per epoch", brief="s per\nepoch"),
    Column("training_started_at", "Unix time at the start of the training window, by this node's clock"),
    Column("training_ended_at", "Unix time at its end"),
    Column("cpu_time_s", "processor time of this process in it: all threads, user and system", null=_PROGRAM),
    Column("others_time_s", "processor time that this rank's own cores gave to others in it: other programs, "
        "interrupts, the hypervisor. The kernel counts idle time in steps of 10 ms: a short epoch's may be negative; "
        "those of many epochs add up", null="it has no cores of its own (GPU ranks), or the kernel does not say"),
    Column("stolen_time_s", "of that, what the hypervisor gave to other machines", null="likewise"),
    Column("run_delay_s", "how long the training thread was ready to run in it, and had to wait for a core",
        null=_KERNEL),
    Column("evaluation_time_s", "evaluation window after the epoch on this rank", null=_PROGRAM),
    Column("slowest_evaluation_time_s", "evaluation window after the epoch on its slowest rank", over=Over.MAX,
        of="evaluation_time_s"),
    Column("train_samples", "training samples whose loss this rank owned, and took a gradient of", null=_PROGRAM),
    Column("train_loss_sum", "summed loss of those samples", null=_PROGRAM),
    Column("train_correct", "correct predictions among them", null=_PROGRAM),
    Column("test_samples", "test samples whose loss this rank owned", null=_PROGRAM),
    Column("test_loss_sum", "summed loss of those samples", null=_PROGRAM),
    Column("test_correct", "correct predictions among them", null=_PROGRAM),
    *CLIPPING,
    Column("gradient_bytes_sent", "gradients sent to other ranks in the training window", null=_PROGRAM),
    Column("activation_bytes_sent", "activations and their gradients sent to other ranks", null=_PROGRAM),
    Column("parameter_bytes_sent", "parameters and buffers sent to other ranks", null=_PROGRAM),
    Column("peak_allocated_bytes",
        "peak of device memory held by tensors in the training window, summed over this rank's GPUs", null="no GPU"),
    text("peak_allocated_bytes_by_device", "of each of this rank's GPUs, in the order of device_uuid, the peak of its "
        "memory held by tensors in the training window; bytes, with commas between them",
        null="no GPU: devices of a CPU that one process drives share its memory"),
    Column("peak_reserved_bytes", "peak of device memory held by torch's allocator, what earlier evaluations left in "
        "its cache included, summed over this rank's GPUs", null="no GPU, or TensorFlow"),
    text("peak_reserved_bytes_by_device", "the same of each of these GPUs, as in peak_allocated_bytes_by_device",
        null="likewise"),
    count("alloc_retries", "how often torch's allocator found no room in the training window, and asked again "
        "after giving its cache back, summed over this rank's GPUs: one of them is at its memory's limit, and slower",
        null="no GPU, TensorFlow, or a program of the user's own"),
    count("allocator_retries_sum", "alloc_retries of all ranks together", over=Over.SUM, of="alloc_retries",
        null="no GPU, or not measured on every rank"),
    Column("device_used_bytes", "device memory in use at the window's end, by all processes (cudaMemGetInfo), what "
        "torch keeps in its cache included", null="no GPU, or TensorFlow"),
    Column("data_wait_s", "time that a user's program spent inside a DataLoader's `next` in it",
        null="a run of the suite's own, whose `phases` say it, or no DataLoader of torch's"),
    Column("forward_s", "time of a user's program from each step's end to the next one's first backward pass, in it: "
        "waiting for data and the forward pass, before ranks wait for each other", null="likewise, or no backward"),
    share("data_wait_share", "data_wait_s ÷ epoch_time_s", null="likewise"),
    share("longest_data_wait_share", "data_wait_share of the rank that waited longest", over=Over.MAX,
        of="data_wait_share"),
    share("steady_data_wait_share", "share of a step that a user's program waited for data, on the rank that waited "
        "longest: median over the windows after the warm-up", over=Over.MEDIAN, of="longest_data_wait_share",
        steady=True, window="steady", repeats=Over.MEDIAN, heading="Waiting for data", where_known=True),
    Column("host_peak_rss_bytes", "peak of this process's resident host memory in the window", null=_KERNEL),
    Column("loader_cpu_time_s", "processor time of the loader's worker processes in the training window",
        null="it has none"),
    Column("loader_memory_bytes", "host memory that only these workers hold, at the window's end, summed over them",
        null="there are none then"),
)

LOSSES = table_of(
    *KEYS,
    EPOCH,
    count("step", "step within the epoch, counts from 1; of several, the first"),
    count("steps", "steps that this row is of: 1 for the first 64 of a run, then up to 64 together"),
    Column("train_loss", "mean of `loss` over their samples, over all ranks"),
)

STEPS = table_of(
    *KEYS,
    EPOCH,
    count("step", "step within the epoch, counts from 1"),
    RANK,
    Column("step_time_s", "fetching the batch to the end of the optimizer step, on the device"),
)

PARITY = table_of(
    *KEYS,
    count("step", "counts from 1"),
    Column("loss", "loss of the strategy", null=_NO_NUMBER),
    Column("loss_reference", "loss of one device"),
    Column("loss_difference", "|difference| ÷ max(1, |reference|)", null=_NO_NUMBER),
    Column("gradient_difference", "largest |difference| of a gradient ÷ largest |gradient| of the model",
        null=_NO_NUMBER),
    Column("parameter_difference", "largest |difference| of a parameter ÷ max(1, largest |parameter|)",
        null=_NO_NUMBER),
    Column("evaluation_difference", "on 37 test samples, the larger of: |difference| of the loss "
        "÷ max(1, |reference|); |difference| of the share of correct predictions ÷ 10", null=_NO_NUMBER),
    Column("tolerance", "limit of each of the four differences"),
    flag("passed", "all four are within the tolerance"),
)

CHECKS = table_of(
    *KEYS,
    EPOCH,
    text("check", "initial: parameters and buffers before the first step; copies: of parameters, after each epoch; "
        "samples: those that gradients were taken of, after the last one or where they are not all; settled: "
        "parameters that changed between training and the end of the evaluation, likewise; the rest after the last: "
        "evaluation loss and accuracy, of the last epoch and of an earlier one; loss, gradients, update, buffers, "
        "rounding, resolution, bytes, messages, exchanges, draws, settings of torch; steps: why none was compared; "
        "closing check: it did not end"),
    text("detail", "what was compared with what, or why nothing was"),
    count("step", "step over all epochs, counts from 1", null="not of a step"),
    Column("difference", "difference that was found; relative, or a number of ranks or tensors",
        null="nothing was compared, or it is not a number"),
    Column("limit", "largest difference that passes", null=_NOT_COMPARED),
    flag("passed", "the difference is within the limit", null=_NOT_COMPARED),
)

PUSHES = table_of(
    *KEYS,
    EPOCH,
    count("rank", "worker that pushed"),
    count("step", "the worker's step within the epoch, counts from 1"),
    count("staleness",
        "updates by others between the worker's fetch and the use of its push; for several gradients, of the first"),
    Column("staleness_mean", "mean staleness of all pushes to parameter servers, over all workers and epochs",
        over=Over.MEAN, of="staleness", null="no pushes", repeats=Over.MEDIAN, heading="Staleness, mean (max)",
        show=Show.MEAN_AND_MAX, beside=("staleness_max",)),
    Column("staleness_max", "largest staleness of any push", over=Over.MAX, of="staleness", null="no pushes",
        repeats=Over.MAX),
)

TELEMETRY = table_of(
    *KEYS,
    text("node", "host name"),
    text("device_uuid", "the GPU that was sampled", null="the host itself was"),
    Column("time", "Unix time of the sample", unit="s"),
    Column("energy_j", "energy counter: of a GPU since its driver was loaded, of a host's processors (RAPL) since an "
        "arbitrary moment", null=_NOT_READ),
    Column("power_w", "power of a GPU, instantaneous where the driver has that", null=_NOT_READ),
    share("utilization", "recent share of time in which a kernel ran", null=_NOT_READ),
    Column("memory_used_bytes", "memory in use, by all processes", null=_NOT_READ),
    Column("clock_hz", "clock of a GPU's SMs; mean clock of a host's cores, once in 10 samples", null=_NOT_READ),
    Column("temperature_c", "temperature of a GPU", null=_NOT_READ),
    Column("throttle_reasons", "reasons for a GPU's lower clocks (bits)", type="int64", null=_NOT_READ),
    Column("processes", "processes that compute on a GPU", type="int64", null=_NOT_READ),
    Column("network_sent_bytes", "sent by a host since it started, without the loopback interface and RDMA",
        null=_NOT_READ),
    Column("network_received_bytes", "received, likewise", null=_NOT_READ),
)

PHASES = table_of(
    *KEYS,
    RANK,
    count("step", "step of the attribution pass after the last epoch (`measure.attribution_steps`); from 1"),
    Column("step_time_s", "fetching the batch to the update's end: the sum of all columns below"),
    Column("data_wait_s", "waiting for the batch"),
    Column("host_to_device_s", "moving the batch to the GPU, as far as nothing hides it",
        null="it is there already (loader=resident), this rank needs no batch, or there is no GPU"),
    Column("forward_s", "forward passes and losses", null=_NOT_HERE),
    Column("backward_s", "backward passes", null=_NOT_HERE),
    Column("communication_s", "exposed communication: waiting for other ranks, slower ones included, and for "
        "transfers, while nothing is computed", null="none, or not separable from the phase it happens in"),
    Column("bubble_s", "idle in a pipeline or a naive layer split, waiting for another stage or its output",
        null="no stages, or not separable"),
    Column("optimizer_s", "updating parameters", null=_NOT_HERE),
    Column("other_s", "the rest: summing losses, clearing and packing gradients, the schedule's own work"),
)

PREPROCESS = table_of(
    *KEYS,
    count("execution", "counts from 1, in one process: the first is cold"),
    Column("start_s", "launch of the engine's process to its libraries being loaded", null=_LATER),
    Column("read_s", "reading the table from a file that was just written", null=_LATER),
    Column("take_in_s", "Arrow to the engine's own form"),
    Column("compute_s", "the recipe; of duckdb and velox, with handing over what they return"),
    Column("give_out_s", "the engine's own form to Arrow"),
    Column("execution_time_s", "take_in_s + compute_s + give_out_s"),
    Column("write_s", "writing the result as an Arrow file", null=_NOT_KEPT),
    Column("cold_time_s", "launch of the process to the end of the first execution: start, reading, execution",
        null=_LATER),
    Column("preprocess_cold_time_s",
        "preprocessing by a new process: its start, reading the table, the first execution", over=Over.MEDIAN,
        of="cold_time_s", null=_UNPREPARED, repeats=Over.MEDIAN, heading="Preprocessing, cold"),
    Column("warm_time_s", "execution_time_s of a later execution", null="the first execution"),
    Column("preprocess_warm_time_s", "an execution in a process that has done it before: median over all but the first",
        over=Over.MEDIAN, of="warm_time_s", null="there was one execution, or none", repeats=Over.MEDIAN,
        heading="Preprocessing, warm"),
    Column("cpu_time_s", "processor time of the execution: all threads of the process, user and system"),
    Column("preprocess_cpu_time_s", "processor time of an execution: median over all", over=Over.MEDIAN,
        of="cpu_time_s", null=_UNPREPARED, repeats=Over.MEDIAN, heading="Preprocessing, processor time",
        tables=("runs",)),
    Column("peak_memory_bytes", "peak resident memory of the process from its launch to the end of this execution, its "
        "libraries and the table included", null=_KERNEL),
    Column("preprocess_peak_memory_bytes", "peak resident memory of the engine's process at the end of its first "
        "execution", over=Over.MIN, of="peak_memory_bytes", null="nothing was preprocessed, or the kernel does not say",
        repeats=Over.MEDIAN, heading="Preprocessing, memory"),
    count("process_threads", "threads of the process at the end, idle ones included", null=_KERNEL),
    Column("bytes_read", "bytes that the process read for its table", type="int64", unit="bytes",
        null=f"{_LATER}, or {_KERNEL}"),
    Column("input_rows", "rows of the table"),
    Column("input_bytes", "the table in Arrow's form"),
    Column("copied_in_bytes", "of these, bytes of buffers that the engine's own form does not consist of: they were "
        "copied or converted", null="the engine does not say"),
    Column("output_rows", "rows of the result"),
    Column("preprocess_output_rows", "rows that the engine prepared, equal to NumPy's", over=Over.MIN, of="output_rows",
        null=_UNPREPARED, repeats=Over.MEDIAN),
    Column("output_bytes", "the result in Arrow's form"),
    Column("output_file_bytes", "the result's file", null=_NOT_KEPT),
)

# fmt: on
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


OF_PROGRAMS = ("data_wait_s", "forward_s", "data_wait_share")
"""Columns of `ranks` that only a user's program has."""


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
