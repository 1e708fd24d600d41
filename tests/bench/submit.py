"""Handing 1,000 runs to a throwaway Slurm cluster, whose partition is down so that none of them starts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.measure import Figure
from tests.helpers import TINY
from tests.slurm.cluster import Cluster
from tests.slurm.packages import UnavailableError, missing_packages

RUNS, ROUNDS = 1000, 5
FILES_PER_RUN = 3
"""config.yaml, overrides.txt, and submitit's pickle."""


def figures() -> list[Figure]:
    """Wall time of the whole command; one sbatch for all and so many files are asserted. None without a cluster."""
    if missing := missing_packages(accounting=False):
        print(f"left out: {', '.join(missing)} not installed")
        return []
    try:
        with Cluster("no_accounting") as cluster:
            cluster.run("scontrol", "update", "PartitionName=normal", "State=DOWN")
            times = [_seconds(cluster) for _ in range(1 + ROUNDS)][1:]  # the first warms up
    except UnavailableError as error:
        print(f"left out: {error}")
        return []
    note = f"one sbatch, {FILES_PER_RUN} files per run, {ROUNDS} rounds; on a throwaway cluster on the same machine"
    return [Figure(f"parallelbench submit of {RUNS:,} runs to Slurm", times, "s", 5, False, note)]


def _seconds(cluster: Cluster) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = ["launcher=slurm", "site=local_cluster", f"sweep.repeats={RUNS}", f"results={folder}"]
        command = [sys.executable, "-m", "parallelbench.cli", "submit", *TINY, *options]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=cluster.env)
        taken = time.perf_counter() - start
        _check(cluster, Path(folder))
    cluster.run("scancel", "--user=root")
    return taken


def _check(cluster: Cluster, results: Path) -> None:
    queued = cluster.run("squeue", "--noheader", "--array", "--format=%F", "--states=PENDING").split()
    assert len(queued) == RUNS
    assert len(set(queued)) == 1, "one sbatch"
    files = [path for path in results.rglob("*") if path.is_file()]
    own = [path for path in files if path.name not in ("submission.json",) and not path.name.endswith(".sh")]
    assert len(own) == FILES_PER_RUN * RUNS, f"{len(own)} files"
