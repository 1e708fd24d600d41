"""Run all benchmarks, or those that are named, on one pinned core, and keep their rows in docs/benchmarks.md."""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib import import_module

from rich.console import Console
from rich.table import Table

from launch.attempt.processes import MALLOC
from parallelbench.errors import count_of
from parallelbench.world.machine import others_running, this_machine
from tests.bench.page import HEADERS, PAGE, Row, cells, update

PARTS = (
    *("loop", "gpt_loop", "telemetry", "figures", "feeding", "seeds", "trainers", "startup", "scale"),
    *(
        "program",
        "foreign",
        "answers",
        "submit",
        "packed",
        "ddp",
        "ring",
        "pipeline",
        "parameter_server",
        "tensorflow",
        "gpu",
    ),
)
"""Files of this folder. Each has `figures()`, which is empty where what it needs is not there."""


def main(parts: list[str]) -> int:
    if unknown := [part for part in parts if part not in PARTS]:
        print(f"{', '.join(unknown)}: no such benchmark; choose of {', '.join(PARTS)}")
        return 2
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # As the suite starts its own training processes: one device is one core.
        os.environ.update(MALLOC, OMP_NUM_THREADS="1", PYTHONPATH=os.getcwd())
        os.execv(sys.executable, [sys.executable, "-m", "tests.bench", *parts])
    core = this_machine().cores[0]
    found: dict[str, list[Row]] = {}
    asked, failed = parts or PARTS, []
    for number, part in enumerate(asked, start=1):
        print(f"[{number}/{len(asked)}] {part} …", end=" ", flush=True)
        start, others = time.perf_counter(), others_running()
        if others:
            print(f"(busy with {count_of(others, 'other process', 'other processes')})", end=" ", flush=True)
        os.sched_setaffinity(0, {core})  # a part that measures others on more cores may have taken them
        try:
            figures = import_module(f"tests.bench.{part}").figures()
        except Exception:  # the others' rows are worth as much without it
            traceback.print_exc()
            failed.append(part)
            continue
        found[part] = [cells(part, figure, others=others) for figure in figures]
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        update({part: found[part]}, PARTS)
    table = Table(*HEADERS[1:-1])
    for rows in found.values():
        for row in rows:
            table.add_row(*row[1:-1])
    Console().print(table)
    if any("**missed**" in row for rows in found.values() for row in rows):
        print(PAGE.read_text(encoding="utf-8").partition("## Goals that were missed")[2])
    if failed:
        print(f"failed, see above: {', '.join(failed)}; the page keeps their old rows")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
