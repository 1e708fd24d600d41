"""`make gpu-check LAUNCHER=slurm`, where CPU processes take the place of GPUs: no node here has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.slurm.cluster import Cluster


def test_a_strategy_is_checked_across_two_nodes_of_a_job(accounting: Cluster, tmp_path: Path) -> None:
    command = ["make", "gpu-check", "LAUNCHER=slurm", "SITE=local_cluster", f"RESULTS={tmp_path}"]
    arguments = "nodes=2 --rehearse '--only=strategy sandblaster_lbfgs'"
    environment = os.environ | accounting.env | {"BIN": str(Path(sys.executable).parent)}

    def checked() -> str:
        made = [*command, f"ARGS={arguments}"]
        done = subprocess.run(made, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    text = checked()
    assert "2 nodes × 2 × processes on CPUs in the place of GPUs" in text
    assert "| strategy sandblaster_lbfgs | ok | 2 devices, mlp, 2 nodes, largest difference" in text
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-check-rehearsal.jsonl"]
    assert "before  strategy sandblaster_lbfgs" in checked(), "the next job repeats only what has not passed"
