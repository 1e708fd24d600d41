"""Short runs in warm processes against the same runs with processes of their own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl
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
PAIRS = 7
STEADY = ("data=digits", "model=cnn_small", "batch_size=256", "epochs=8", "device=cpu")


def figures() -> list[Figure]:
    """What packing saves, and that it changes neither an epoch's time nor a process's memory."""
    return [_saved(), *_unchanged()]


def _saved() -> Figure:
    """Wall time of whole commands per run; the losses of the runs that both do are asserted to be the same bits.

    The runs are one repeat of many learning rates: each repeat has a warm process of its own.
    """
    times: dict[str, list[float]] = {kind: [] for kind in RUNS}
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            results = {kind: Path(folder) / kind for kind in RUNS}
            for kind in sorted(RUNS, reverse=number % 2 == 0):
                times[kind].append(_seconds(kind, results[kind]) / RUNS[kind])
            losses = {kind: _losses(path) for kind, path in results.items()}
            for rate, found in losses["separate"].items():
                assert found == losses["packed"][rate], f"the rate {rate} was not the same work"
    each = {kind: f"{statistics.median(values):.2f} s" for kind, values in times.items()}
    note = (
        f"a run takes {each['packed']} of a sweep of {RUNS['packed']} packed ones, {each['separate']} of one of "
        f"{RUNS['separate']} separate ones, both with the program's start; {ROUNDS} rounds; identical losses"
    )
    what = "logistic regression of 2 × 10 steps, separate ÷ packed, time per run"
    return Figure(what, ratios(times, "separate", "packed"), "×", 5, True, note)


def _unchanged() -> list[Figure]:
    """Steady epoch and peak of resident memory of a packed run ÷ those of a separate one, pair by pair."""
    found: dict[str, list[float]] = {"steady epoch": [], "peak of resident memory": []}
    for number in range(PAIRS):
        measured = {}
        with tempfile.TemporaryDirectory() as folder:
            for kind in sorted(RUNS, reverse=number % 2 == 0):
                results = Path(folder) / kind
                _submit(kind, results, *STEADY, f"repeat={number}")
                (run,) = find_runs(results)
                measured[kind] = pl.read_parquet(run.result / "ranks.parquet").filter(pl.col("epoch") > 1)
        packed, separate = measured["packed"], measured["separate"]
        for what, column in zip(found, ("epoch_time_s", "host_peak_rss_bytes"), strict=True):
            found[what].append(float(packed[column].median()) / float(separate[column].median()))  # type: ignore[arg-type]
    note = f"cnn_small on one core, a new warm process for each of {PAIRS} pairs"
    return [Figure(f"{what}, packed ÷ separate", values, "×", 1.02, False, note) for what, values in found.items()]


def _seconds(kind: str, results: Path) -> float:
    rates = ",".join(f"{0.01 + 0.001 * k:.3f}" for k in range(RUNS[kind]))
    start = time.perf_counter()
    _submit(kind, results, *OVERRIDES, f"optimizer.lr={rates}")
    return time.perf_counter() - start


def _submit(kind: str, results: Path, *overrides: str) -> None:
    options = (f"launcher.pack={str(kind == 'packed').lower()}", f"results={results}")
    command = [sys.executable, "-m", "parallelbench.cli", "submit", *overrides, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _losses(results: Path) -> dict[float, list[dict[str, float]]]:
    """All losses, by learning rate."""
    columns = ["train_loss", "test_loss"]
    return {
        run.config().optimizer.lr: pq.read_table(run.result / "epochs.parquet", columns=columns).to_pylist()
        for run in find_runs(results)
    }
