"""The columns of the table `run`: one row per run."""

from __future__ import annotations

from parallelbench.store.columns import KEYS, Column, Over, Show

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
