"""What `doctor` says of a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import fault
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import until
from tests.slurm.jobs import submit, wait


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


@fault(
    "lifecycle",
    "Ctrl-C while a command waits for its job",
    injection="SIGINT to all that a terminal runs, or to the program alone, as its job runs, or waits",
    outcome="the job is gone when the program is, and nothing is left behind",
)
@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
@pytest.mark.parametrize("tell", [os.killpg, os.kill])
def test_a_job_that_nobody_waits_for_any_more_ends(
    tell: Callable[[int, int], None], state: str, accounting: Cluster, tmp_path: Path
) -> None:
    accounting.restore()
    (tmp_path / "conf" / "site").mkdir(parents=True)
    begun = tmp_path / "begun"
    text = f"defaults: [local_cluster, _self_]\nname: slow\nsetup: [touch {begun}, sleep 600]\n"
    (tmp_path / "conf" / "site" / "slow.yaml").write_text(text)
    own = ("--conf", str(tmp_path / "conf"), "site=slow", f"results={tmp_path / 'results'}")

    def jobs(states: str) -> str:
        named = accounting.run("squeue", "--noheader", "--format=%j", f"--states={states}").splitlines()
        return "".join(name for name in named if "calibration" in name)

    if state == "PENDING":
        wait(accounting, submit(accounting, "sleep 600", "--nodes=2", "--exclusive"), JobState="RUNNING")
    program = subprocess.Popen(
        [sys.executable, "-m", "parallelbench.cli", "calibrate", "launcher=slurm", "nodes=2", *own],
        env=os.environ | accounting.env,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )
    try:
        until(lambda: jobs(state) and (begun.exists() or state == "PENDING"), what="its job", timeout_s=120)
        tell(program.pid, signal.SIGINT)
        assert program.wait(timeout=60) == 130
        assert jobs("PENDING,RUNNING") == ""
    finally:
        program.kill()
        accounting.run("scancel", f"--user={os.geteuid()}")
    assert list((tmp_path / "results").iterdir()) == []


def test_a_site_is_held_against_the_cluster(accounting: Cluster) -> None:
    text = doctor(accounting, "site=local_cluster", "site.devices_per_node=4")
    assert "site=local_cluster, 1 device" in text
    assert "the cluster takes it" in text
    assert "invalid partition specified: nowhere" in doctor(accounting, "site=local_cluster", "site.partition=nowhere")
