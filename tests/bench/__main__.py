"""Run all benchmarks on one pinned core, print the table, and keep it in docs/benchmarks.md."""

from __future__ import annotations

import datetime
import os
import sys
from importlib import import_module, metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.command import MALLOC
from parallelbench.devices import cpu_name, this_machine
from tests.bench.measure import ROUNDS, Figure

PARTS = ("loop", "feeding", "startup", "scale", "submit", "packed", "ddp", "ring", "pipeline", "parameter_server")
HEADERS = ("what", "median", "range", "goal", "", "note")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main(parts: list[str]) -> int:
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # As the suite starts its own training processes: one device is one core.
        os.environ.update(MALLOC, OMP_NUM_THREADS="1", PYTHONPATH=os.getcwd())
        os.execv(sys.executable, [sys.executable, "-m", "tests.bench", *parts])
    os.sched_setaffinity(0, {this_machine().cores[0]})
    found: list[Figure] = []
    for part in parts or PARTS:
        print(f"{part} …", flush=True)
        found += import_module(f"tests.bench.{part}").figures()
    table = Table(*HEADERS)
    for figure in found:
        table.add_row(*figure.cells())
    Console().print(table)
    if not parts:
        write(found)
    return 0


def write(found: list[Figure]) -> None:
    """Replace the measured part of the page."""
    rows = [f"| {' | '.join(cells)} |" for cells in (HEADERS, ("---",) * len(HEADERS), *(f.cells() for f in found))]
    machine = f"{cpu_name()}, {os.cpu_count()} cores, torch {metadata.version('torch')}"
    today = datetime.datetime.now(datetime.UTC).date()
    method = f"one pinned core per process, median and range of {ROUNDS} interleaved rounds"
    intro = f"Measured on {today} on {machine}; {method}."
    page = PAGE.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", intro, "", *rows, f"{END}{after}"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
