"""The table `preprocess`: one row per execution of a recipe by an engine."""

from __future__ import annotations

from parallelbench.store.columns import KEYS, Column, Over

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
