"""Handing runs to a throwaway Slurm cluster, whose partition is down so that none of them starts, and asking it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.measure import Figure
from tests.helpers import TINY
from tests.slurm.cluster import Cluster
from tests.slurm.packages import PROGRAMS, UnavailableError, missing_packages

RUNS, QUEUED, ROUNDS = 1000, 10_000, 5
FILES_PER_RUN = 3
"""config.yaml, overrides.txt, and submitit's pickle."""


def figures() -> list[Figure]:
    """Wall time of whole commands; one sbatch for all and so many files are asserted. None without a cluster."""
    if missing := missing_packages(PROGRAMS):
        print(f"left out: {', '.join(missing)} not installed")
        return []
    try:
        with Cluster("no_accounting", max_array_size=QUEUED + 1) as cluster:
            cluster.run("scontrol", "update", "PartitionName=normal", "State=DOWN")
            times = [_submitting_s(cluster) for _ in range(1 + ROUNDS)][1:]  # the first warms up
            asking = _asking_s(cluster)
    except UnavailableError as error:
        print(f"left out: {error}")
        return []
    note = f"one sbatch, {FILES_PER_RUN} files per run, {ROUNDS} rounds; on a throwaway cluster on the same machine"
    asked = f"one squeue, whole commands, {ROUNDS} rounds; on the same cluster"
    return [
        Figure(f"parallelbench submit of {RUNS:,} runs to Slurm", times, "s", 5, False, note),
        Figure(f"parallelbench status of {QUEUED:,} runs in the queue", asking, "s", 2, False, asked),
    ]


def _submitting_s(cluster: Cluster) -> float:
    with tempfile.TemporaryDirectory() as folder:
        taken = _submit(cluster, folder, RUNS)
        _check(cluster, Path(folder))
    cluster.run("scancel", "--user=root")
    return taken


def _asking_s(cluster: Cluster) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        _submit(cluster, folder, QUEUED)
        texts, times = zip(*(_timed(cluster, "status", folder) for _ in range(1 + ROUNDS)), strict=True)
    assert all(f"{QUEUED:,} queued" in text or f"{QUEUED} queued" in text for text in texts), texts[0]
    cluster.run("scancel", "--user=root")
    return list(times[1:])


def _submit(cluster: Cluster, folder: str, runs: int) -> float:
    options = ["launcher=slurm", "site=local_cluster", f"sweep.repeats={runs}", f"results={folder}"]
    return _timed(cluster, "submit", *TINY, *options)[1]


def _timed(cluster: Cluster, *arguments: str) -> tuple[str, float]:
    """What a whole command prints, and the seconds that it takes."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "parallelbench.cli", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=cluster.env)
    return done.stdout, time.perf_counter() - start


def _check(cluster: Cluster, results: Path) -> None:
    queued = cluster.run("squeue", "--noheader", "--array", "--format=%F", "--states=PENDING").split()
    assert len(queued) == RUNS
    assert len(set(queued)) == 1, "one sbatch"
    files = [path for path in results.rglob("*") if path.is_file()]
    own = [path for path in files if path.name not in ("submission.json",) and not path.name.endswith(".sh")]
    assert len(own) == FILES_PER_RUN * RUNS, f"{len(own)} files"
