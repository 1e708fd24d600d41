"""The suite's own training, measured by the suite and as a program that it knows nothing of."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from parallelbench.results.folder import find_runs
from tests.bench.foreign_program import OVERRIDES
from tests.bench.measure import Figure, all_cores, paired, ratios
from tests.helpers import interval

ROUNDS = 8
EPOCHS = 9
STEPS = 22
"""Of an epoch."""


def figures() -> list[Figure]:
    """Time of a step as a program's ÷ as the suite's own."""
    all_cores()
    root = Path(__file__).resolve().parents[2]
    program = [f"program={sys.executable} -m tests.bench.foreign_program", f"program.folder={root}"]
    program += [
        f"program.warmup_steps={STEPS}",
        f"program.steps={(EPOCHS - 1) * STEPS}",
        f"program.windows={EPOCHS - 1}",
    ]
    own = [*OVERRIDES, f"epochs={EPOCHS}", "measure.parity=false"]
    spent: dict[str, list[float]] = {"own": [], "program": []}
    results = paired(
        {"own": lambda: _step_s(own, spent["own"]), "program": lambda: _step_s(program, spent["program"])}, ROUNDS
    )
    found = ratios(results, "program", "own")
    low, high = interval(tuple(found)) or (0.0, 0.0)
    step_ms = statistics.median(results["own"]) * 1e3
    note = f"cnn_small on digits, steps of {step_ms:.1f} ms; {ROUNDS} rounds, 95 % interval {low:.3f} – {high:.3f}"
    of_core = ratios({name: times[1:] for name, times in spent.items()}, "program", "own")  # the first are warm-ups
    low, high = interval(tuple(of_core)) or (0.0, 0.0)
    of_core_note = f"its process alone; 95 % interval {low:.3f} – {high:.3f}"
    return [
        Figure("a step as a program's ÷ as the suite's own, time", found, "", 1.02, False, note),
        Figure("a step as a program's ÷ as the suite's own, processor time", of_core, "", 1.02, False, of_core_note),
    ]


def _step_s(overrides: list[str], spent: list[float]) -> float:
    """Of one run: the median over its epochs, or windows, but the first; `spent` gets its processor time of a step."""
    with tempfile.TemporaryDirectory() as results:
        command = [
            sys.executable,
            "-m",
            "parallelbench.cli",
            "run",
            *overrides,
            f"results={results}",
            "measure.probe=false",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = find_runs(Path(results))
        rows = pq.read_table(run.result / "ranks.parquet").to_pylist()
    steady = [row for row in rows if row["epoch"] > 1]
    spent.append(sum(row["cpu_time_s"] for row in steady) / len(steady) / STEPS)
    return float(statistics.median(row["epoch_time_s"] / STEPS for row in steady))
