"""Short runs in warm processes against the same runs with processes of their own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from parallelbench.results.folder import find_runs
from tests.bench.measure import Figure, ratios

RUNS = {"packed": 20, "separate": 5}
"""Runs of one sweep of each kind. More of them would favour packing, whose start they share."""
ROUNDS = 3
OVERRIDES = (
    "model=logistic_regression",
    "data=synthetic",
    "data.channels=1",
    "data.image_size=28",
    "data.train_samples=1280",
    "data.test_samples=128",
    "device=cpu",
    "epochs=2",
    "sweep.order=listed",
)


def figures() -> list[Figure]:
    """Wall time of whole commands per run; the losses of the runs that both do are asserted to be the same bits."""
    times: dict[str, list[float]] = {kind: [] for kind in RUNS}
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            results = {kind: Path(folder) / kind for kind in RUNS}
            for kind in sorted(RUNS, reverse=number % 2 == 0):
                times[kind].append(_seconds(kind, results[kind]) / RUNS[kind])
            losses = {kind: _losses(path) for kind, path in results.items()}
            for repeat, found in losses["separate"].items():
                assert found == losses["packed"][repeat], f"repeat {repeat} was not the same work"
    each = {kind: f"{statistics.median(values):.2f} s" for kind, values in times.items()}
    note = (
        f"a run takes {each['packed']} of a sweep of {RUNS['packed']} packed ones, {each['separate']} of one of "
        f"{RUNS['separate']} separate ones, both with the program's start; {ROUNDS} rounds; identical losses"
    )
    what = "logistic regression of 2 × 10 steps, separate ÷ packed, time per run"
    return [Figure(what, ratios(times, "separate", "packed"), "×", 5, True, note)]


def _seconds(kind: str, results: Path) -> float:
    options = [f"sweep.repeats={RUNS[kind]}", f"launcher.pack={str(kind == 'packed').lower()}", f"results={results}"]
    start = time.perf_counter()
    command = [sys.executable, "-m", "parallelbench.cli", "submit", *OVERRIDES, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _losses(results: Path) -> dict[int, list[dict[str, float]]]:
    """All losses, by repeat."""
    columns = ["train_loss", "test_loss"]
    return {
        run.config().repeat: pq.read_table(run.result / "epochs.parquet", columns=columns).to_pylist()
        for run in find_runs(results)
    }
