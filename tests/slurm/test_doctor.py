"""What `doctor` says of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.cluster import Cluster


def doctor(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "parallelbench.cli", "doctor", *arguments]
    environment = os.environ | cluster.env | {"COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_cluster_is_described(accounting: Cluster, no_accounting: Cluster) -> None:
    text = doctor(accounting)
    assert "partition normal (default)" in text
    assert "2 nodes with 8 cores, 11 GiB, gpu:a100:4, no time limit" in text
    assert "how jobs ended is known" in text
    assert "judged by its folder" in doctor(no_accounting)


def test_all_reduces_between_two_nodes_are_measured(accounting: Cluster, tmp_path: Path) -> None:
    text = doctor(accounting, "--bandwidth", "site=local_cluster", f"results={tmp_path}")
    lines = [line for line in text.splitlines() if "all-reduce" in line]
    assert [line.split("KiB")[0].split()[-1] for line in lines] == [f"{4**k:,}" for k in range(9)]
    assert all("GB/s sent by each of 2 nodes" in line for line in lines)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_site_is_held_against_the_cluster(accounting: Cluster) -> None:
    text = doctor(accounting, "site=local_cluster", "site.devices_per_node=4")
    assert "site=local_cluster, 1 device" in text
    assert "the cluster takes it" in text
    assert "invalid partition specified: nowhere" in doctor(accounting, "site=local_cluster", "site.partition=nowhere")
