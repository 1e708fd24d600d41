"""What an engine's process executes: read the table, carry the recipe out, write results and measurements, leave.

It leaves by `os._exit`: libraries that crash while they are unloaded do so after everything was written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.config.task import Request

if TYPE_CHECKING:
    import pyarrow as pa

    from parallelbench.preprocess.engines import Engine


ENGINES = {
    "numpy": "numpy.WithNumpy",
    "torch": "torch.WithTorch",
    "arrow": "arrow.WithArrow",
    "polars": "polars.WithPolars",
    "duckdb": "duckdb.WithDuckdb",
    "velox": "velox.WithVelox",
}
"""Engine → its module and class."""


def main(path: str) -> None:
    """Carry out the request in this file."""
    request = Request.read(Path(path))
    report = carry_out(request)
    temporary = request.report.with_suffix(".tmp")
    temporary.write_text(json.dumps(report))
    temporary.replace(request.report)
    sys.stdout.flush()
    os._exit(0)


def carry_out(request: Request) -> dict[str, Any]:
    """Measure and carry out all executions; returns the columns of their rows, and of the run."""
    from parallelbench.preprocess import tables

    engine = engine_of(request)
    tables.load_pandas()
    started_s = time.time() - request.launched_at
    before = _field(_IO, "rchar")
    began = time.perf_counter()
    table = tables.read(request.input)
    read_s = time.perf_counter() - began
    after = _field(_IO, "rchar")
    executions = []
    for number in range(1, request.executions + 1):
        ready_s = time.time() - request.launched_at
        row, result = execute(engine, table)
        row["cold_time_s"] = ready_s + row["execution_time_s"] if number == 1 else None
        row["warm_time_s"] = None if number == 1 else row["execution_time_s"]
        peak_kib = _field(_STATUS, "VmHWM")
        row |= {
            "process_threads": _field(_STATUS, "Threads"),
            "peak_memory_bytes": None if peak_kib is None else peak_kib * 1024,
        }
        if number in (1, request.executions):  # those that are compared
            began = time.perf_counter()
            row["output_file_bytes"] = tables.write(result, request.output(number))
            row["write_s"] = time.perf_counter() - began
        row |= {"output_rows": result.num_rows, "output_bytes": result.nbytes}
        del result
        executions.append(row | {"execution": number})
    executions[0] |= {"start_s": started_s, "read_s": read_s}
    executions[0]["bytes_read"] = None if before is None or after is None else after - before
    return {"version": metadata.version(type(engine).package), "input_bytes": table.nbytes, "executions": executions}


def execute(engine: Engine, table: pa.Table) -> tuple[dict[str, Any], pa.Table]:
    """One execution: its times, and its result.

    Copied in are the table's buffers that the engine's form does not consist of; None: it doesn't say.
    """
    from parallelbench.preprocess import tables

    cpu_s, began = time.process_time(), time.perf_counter()
    data = engine.take_in(table)
    taken_in = time.perf_counter()
    value = engine.compute(data)
    computed = time.perf_counter()
    result = engine.give_out(value)
    ended = time.perf_counter()
    cpu_s, shared = time.process_time() - cpu_s, engine.shared(data)
    held = tables.addresses(table).items()
    copied_bytes = None if shared is None else sum(size for address, size in held if address not in shared)
    row = {
        "cpu_time_s": cpu_s,
        "take_in_s": taken_in - began,
        "compute_s": computed - taken_in,
        "give_out_s": ended - computed,
        "execution_time_s": ended - began,
        "copied_in_bytes": copied_bytes,
        **dict.fromkeys(("start_s", "read_s", "bytes_read", "write_s", "output_file_bytes")),
    }
    return row, result


def engine_of(request: Request) -> Engine:
    """The engine, with its library loaded and its threads set."""
    module, _, name = ENGINES[request.engine].partition(".")
    cls = getattr(import_module(f"parallelbench.preprocess.engines.{module}"), name)
    engine: Engine = cls(request.task, request.threads)
    return engine


_IO, _STATUS = Path("/proc/self/io"), Path("/proc/self/status")
"""Of this process; `rchar`: bytes that it has read so far, from files in memory, too (proc(5))."""


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


if __name__ == "__main__":
    main(sys.argv[1])
