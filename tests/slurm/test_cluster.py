"""The throwaway clusters behave like the real thing where it matters to a launcher."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import submitit

from tests.slurm.cluster import Cluster
from tests.slurm.config import NODES
from tests.slurm.daemons import until
from tests.slurm.jobs import show, submit, wait

WHOLE = ("--nodes=2", "--exclusive")
"""Options of a job that leaves no room for another."""

both_ways_of_tracking = pytest.mark.parametrize("cluster", ["no_accounting", "cgroup"], indirect=True)
"""For what has to do with a job's processes, and nothing with a database."""


def test_two_nodes(cluster: Cluster) -> None:
    said = cluster.run("srun", "--nodes=2", "printenv", "SLURMD_NODENAME")
    assert sorted(said.split()) == list(NODES)


def test_a_job_is_given_its_gpus(cluster: Cluster) -> None:
    assert cluster.run("srun", "--gpus-per-node=4", "printenv", "CUDA_VISIBLE_DEVICES").strip() == "0,1,2,3"


def test_gpus_are_shared_out(cluster: Cluster) -> None:
    first = submit(cluster, "sleep infinity", "--gpus-per-node=3", "--nodelist=n1")
    second = submit(cluster, "sleep infinity", "--gpus-per-node=2", "--nodelist=n1")
    wait(cluster, first, JobState="RUNNING")
    assert wait(cluster, second, JobState="PENDING", Reason="Resources")["NodeList"] == ""


def test_two_jobs_of_torch_fit_side_by_side(cluster: Cluster) -> None:
    jobs = [submit(cluster, "sleep infinity", "--mem=3500", "--nodelist=n1") for _ in range(2)]
    assert [wait(cluster, job, JobState="RUNNING")["NodeList"] for job in jobs] == ["n1", "n1"]


@both_ways_of_tracking
def test_an_array_of_submitit(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(cluster.env):
        monkeypatch.delenv(name)
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    executor = submitit.AutoExecutor(folder=tmp_path, cluster="slurm")
    executor.update_parameters(mem_gb=1, timeout_min=2)
    jobs = executor.map_array(math.factorial, range(6))
    until(lambda: all(job.paths.result_pickle.exists() for job in jobs), what="six results", timeout_s=240)
    assert [job.result() for job in jobs] == [1, 1, 2, 6, 24, 120]


@pytest.mark.parametrize("variant", ["accounting", "cgroup"])
def test_accounting_knows_how_jobs_ended(variant: str, request: pytest.FixtureRequest) -> None:
    cluster: Cluster = request.getfixturevalue(variant)
    job = submit(cluster, "exit 3")

    wait(cluster, job, JobState="FAILED")

    def accounted() -> list[str]:
        options = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode")
        return cluster.run("sacct", *options, f"--jobs={job}").split()

    until(lambda: not {"PENDING|0:0", "RUNNING|0:0"} & set(accounted()), what="sacct knowing the end", timeout_s=30)
    assert accounted() == ["FAILED|3:0"]


def test_without_accounting_sacct_fails(no_accounting: Cluster) -> None:
    with pytest.raises(Exception, match="accounting storage is disabled"):
        no_accounting.run("sacct")


@both_ways_of_tracking
def test_a_preempted_job_is_requeued_and_starts_again(cluster: Cluster) -> None:
    low = submit(cluster, "sleep infinity", "--partition=preemptible", *WHOLE)
    wait(cluster, low, JobState="RUNNING")
    high = submit(cluster, "sleep 1", *WHOLE)
    wait(cluster, high, JobState="RUNNING")
    assert show(cluster, low)["JobState"] == "PENDING"
    wait(cluster, low, JobState="RUNNING", Restarts="1", timeout_s=60)


def test_the_queue_outlives_the_controller(cluster: Cluster) -> None:
    running = submit(cluster, "sleep infinity")
    held = submit(cluster, "sleep infinity", "--hold")
    wait(cluster, running, JobState="RUNNING")
    saved, began = cluster.folder / "state" / "job_state", time.time()
    until(lambda: saved.stat().st_mtime > began, what="the controller saving its state", timeout_s=30)
    cluster.kill("slurmctld")
    assert "DOWN" in cluster.run("scontrol", "ping", check=False)
    cluster.start("slurmctld")
    assert show(cluster, running)["JobState"] == "RUNNING"
    assert show(cluster, held)["JobState"] == "PENDING"


@both_ways_of_tracking
def test_a_lost_node_is_down_and_its_job_starts_again(cluster: Cluster) -> None:
    job = submit(cluster, "sleep infinity", "--nodelist=n1")
    wait(cluster, job, JobState="RUNNING")
    cluster.crash_node("n1")
    until(lambda: cluster.node_states()["n1"].startswith("down"), what="n1 being down", timeout_s=60)
    assert show(cluster, job)["JobState"] == "PENDING"
    cluster.start("n1")
    wait(cluster, job, JobState="RUNNING", Restarts="1", timeout_s=60)


def test_a_job_lives_on_when_its_slurmd_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    submit(cluster, f"while true; do echo >> {beat}; sleep 0.1; done", "--nodelist=n2")
    until(beat.exists, what="the first beat", timeout_s=30)
    cluster.kill("n2")
    size = beat.stat().st_size
    until(lambda: beat.stat().st_size > size, what="another beat", timeout_s=5)
    cluster.crash_node("n2")
    size = beat.stat().st_size
    time.sleep(0.5)  # nothing to wait for: this is about what does not happen
    assert beat.stat().st_size == size


def test_jobs_run_without_the_database(accounting: Cluster) -> None:
    accounting.restore()
    accounting.kill("slurmdbd")
    assert wait(accounting, submit(accounting, "true"), JobState="COMPLETED")["ExitCode"] == "0:0"
    accounting.restore()


def test_clusters_know_nothing_of_each_other(accounting: Cluster, no_accounting: Cluster) -> None:
    job = submit(accounting, "sleep infinity")
    assert show(accounting, job)
    assert not show(no_accounting, job)


def test_a_job_that_takes_too_much_memory_is_killed(no_accounting: Cluster, tmp_path: Path) -> None:
    said = tmp_path / "said"
    hungry = "python3 -c 'import time; taken = bytearray(500_000_000); time.sleep(60)'"
    job = submit(no_accounting, hungry, "--mem=100", f"--output={said}")
    wait(no_accounting, job, JobState="FAILED", ExitCode="0:9")  # where cgroups limit, this is OUT_OF_MEMORY
    assert "exceeded memory limit" in said.read_text()
