"""Sweeps of 10,000 runs: what planning one costs, and what looking at the folders of one that has finished does."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from launch.local import prepare_here
from launch.sweep import expand
from parallelbench.results.folder import RunFolder
from parallelbench.world.machine import this_machine
from tests.analysis.factory import config, published
from tests.bench.measure import Figure, paired
from tests.bench.startup import seconds_of

RUNS = 10_000
OVERRIDES = [
    "model=cnn_small,cnn_large,mlp,vit_tiny,resnet_tiny",
    "strategy=ddp,fsdp,zero1,ring_ddp",
    "optimizer=sgd,adam",
    "optimizer.lr=range(1,26)",
    "batch_size=range(64,84,2)",
    "devices=2",
    "launcher.oversubscribe=true",  # the benchmarks' own process is pinned to one core
]
"""5 models, 4 strategies, 2 optimizers, 25 learning rates and 10 batch sizes, so 40 choices of files."""


def figures() -> list[Figure]:
    """Wall time of whole commands; from plans, that of a plan of one run is taken off."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "finished"
        make_results(results)
        none = f"results={folder}/none"
        times = paired(
            {
                "one": lambda: seconds_of("plan", none),
                "missing": lambda: seconds_of("plan", *OVERRIDES, none),
                "done": lambda: seconds_of("plan", *OVERRIDES, f"results={results}"),
                "status": lambda: seconds_of("status", str(results)),
            }
        )
    one, missing, done = (statistics.median(times[name]) for name in ("one", "missing", "done"))
    each_ms = [1e3 * (all_s - one_s) / RUNS for all_s, one_s in zip(times["missing"], times["one"], strict=True)]
    files = "40 choices of files"
    note = f"{files}; the command takes {missing:.2f} s, {done:.2f} s where all are done, {one:.2f} s for one run"
    return [
        Figure(f"parallelbench plan, each of {RUNS:,} runs after the first", each_ms, "ms", 0.3, False, note),
        Figure(f"parallelbench status of {RUNS:,} finished runs", times["status"], "s", 2, False, "the whole command"),
    ]


def make_results(results: Path) -> None:
    """The folder of every run of the sweep, finished; their files are links to those of one."""
    machine = this_machine()
    plan = [prepare_here(planned, machine) for planned in expand([*OVERRIDES, f"results={results}"])]
    assert len({item.folder.path for item in plan}) == RUNS
    with tempfile.TemporaryDirectory(dir=results.parent) as elsewhere:
        pattern = published(config(Path(elsewhere), strategy="ddp", devices=2))
        for item in plan:
            _link(pattern.path, item.folder)


def _link(source: Path, folder: RunFolder) -> None:
    for path, _, files in os.walk(source):
        target = folder.path / Path(path).relative_to(source)
        target.mkdir(parents=True)
        for name in files:
            os.link(os.path.join(path, name), target / name)
