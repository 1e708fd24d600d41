"""Ranks, nodes and devices that fail under a job: the run ends soon, says which one it was, and can be repeated."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from parallelbench.results.folder import find_runs
from tests.faults import fault
from tests.launch.programs import finished_epochs
from tests.slurm import daemons
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import started
from tests.slurm.faulty import faulty
from tests.slurm.runs import ENDLESS, ON_TWO_NODES, QUICK, TWO_NODES, Sweep

# --- ranks


@fault(
    "workers",
    "A rank raises on the second node",
    injection="a user's strategy whose rank 1 raises, whereupon rank 0 raises as well",
    outcome="error, with the rank and the message of the one that failed first",
)
def test_the_earliest_error_wins(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path / "results", (*faulty(tmp_path, "raises"), *ON_TWO_NODES))
    sweep.submit()
    outcome, reason = sweep.outcome(sweep.attempt())
    assert (outcome, reason.partition(": ")[0]) == ("error", "rank 1")
    assert reason.endswith(": RuntimeError: the cable is loose")
    sweep.over()
    assert "0 runs to submit" in sweep.submit(), "trying again would give the same"


@fault(
    "workers",
    "A rank is killed on the second node",
    injection="SIGKILL to rank 1 after its second epoch",
    outcome="killed, naming rank and signal; finished epochs are kept; submitting again tries again",
)
def test_a_killed_rank_is_named(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, ENDLESS))
    sweep.submit()
    attempt = sweep.attempt()
    before = sweep.epochs(attempt, at_least=2)
    sweep.signal("rank 1", attempt, signal.SIGKILL)
    outcome, reason = sweep.outcome(attempt)
    assert (outcome, reason.partition(",")[0]) == ("killed", "rank 1 was killed by SIGKILL")
    assert finished_epochs(attempt)[: len(before)] == before
    sweep.over()
    assert sweep.run.state().to_run


@fault(
    "workers",
    "A rank hangs on the second node",
    injection="SIGSTOP to rank 1, with launcher.collective_timeout_s=15",
    outcome="timeout, naming the rank that hangs and not the one that waited for it; nothing is left on either node",
)
def test_a_hanging_rank_is_named(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, ENDLESS, "launcher.collective_timeout_s=15"))
    sweep.submit()
    attempt = sweep.attempt()
    sweep.epochs(attempt, at_least=1)
    sweep.signal("rank 1", attempt, signal.SIGSTOP)
    outcome, reason = sweep.outcome(attempt)
    assert (outcome, reason.partition(":")[0]) == ("timeout", "rank 1 hangs")
    sweep.over()


@fault(
    "workers",
    "Too much memory",
    injection="a user's strategy takes 4 GB on a node where the job may have 2 (Slurm's OverMemoryKill)",
    outcome="killed, and retried when submitted again; the job's log says that it exceeded its memory",
)
def test_a_job_over_its_memory_is_killed(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path / "results", (*faulty(tmp_path, "hoards"), *QUICK, "devices=2"))
    sweep.submit()
    sweep.over()
    state = sweep.run.state()
    assert (state.label, state.to_run) == ("killed", True), sweep.story()
    said = sweep.run.attempts()[-1].path / "log.txt"
    assert "exceeded memory limit" in said.read_text(), sweep.story()


@pytest.fixture
def constrained() -> Iterator[Cluster]:
    """A cluster whose cgroups hold jobs to their memory."""
    yield from started("cgroup", constrain_ram=True)


@fault(
    "workers",
    "Too much memory for a job's cgroup",
    injection="the same where ConstrainRAMSpace is set: the kernel kills a rank; accounting says FAILED of the job and "
    "OUT_OF_MEMORY of its step",
    outcome="killed, and started again only with more memory",
)
def test_a_job_over_the_memory_of_its_cgroup_needs_more(constrained: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(constrained, tmp_path / "results", (*faulty(tmp_path, "hoards"), *QUICK, "devices=2"))
    sweep.submit()
    sweep.over()
    assert sweep.run.state().label == "killed", sweep.story()
    said = sweep.submit()
    assert "0 runs to submit" in said
    assert "out of host memory: raise launcher.memory_gib_per_device above 1" in said
    assert len(sweep.jobs) == 1
    sweep.submit("launcher.memory_gib_per_device=5")
    assert len(sweep.jobs) == 2


# --- nodes


@fault(
    "workers",
    "One task dies",
    injection="SIGKILL to the task on node 1 of 2, which looks after the ranks there",
    outcome="its ranks end with it, those of the other node soon after; killed, so submitting again tries again",
)
def test_a_dead_task_ends_the_others(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, ENDLESS))
    sweep.submit()
    attempt = sweep.attempt()
    sweep.epochs(attempt, at_least=1)
    sweep.signal("task", attempt, signal.SIGKILL)
    outcome, reason = sweep.outcome(attempt)
    assert outcome == "killed"
    assert reason in ("rank 1 ended without a record", "interrupted by SIGTERM")
    sweep.over()


@fault(
    "workers",
    "The rendezvous port is taken",
    injection="another program listens on the port between its choice and its use",
    outcome="no rank joins anything foreign; the outcome says that the port was taken, and submitting again works",
)
def test_a_taken_port(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, "epochs=1"))
    sweep.submit()
    port = sweep.wait(lambda: next(filter(None, map(_chosen_port, sweep.processes())), None), "torchrun, which loads")
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        outcome, reason = sweep.outcome(sweep.attempt())
    assert outcome == "killed"
    assert "address already in use" in reason.lower()
    sweep.over()
    sweep.submit()
    sweep.done()


def _chosen_port(process: psutil.Process) -> int | None:
    """Where a torchrun is told to meet the others."""
    with suppress(psutil.Error):
        found = [word for word in process.cmdline() if word.startswith("--rdzv-endpoint=")]
        return int(found[0].rpartition(":")[2]) if found else None
    return None


@fault(
    "workers",
    "The head's name can't be resolved",
    injection="site.network_interface=null on nodes whose names nobody knows",
    outcome="the host's own name, or where that means loopback its address on the route; the run is ok",
)
def test_an_unresolvable_name(ours: Cluster, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        socket.gethostbyname("n1")
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, "epochs=1", "site.network_interface=null"))
    sweep.submit()
    sweep.done()


@fault(
    "workers",
    "No such network interface",
    injection="site.network_interface=nowhere0",
    outcome="error, naming the key, before any rank starts",
)
def test_an_unknown_interface(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, "epochs=1", "site.network_interface=nowhere0"))
    sweep.submit()
    outcome, reason = sweep.outcome(sweep.attempt())
    assert outcome == "error"
    assert "site.network_interface=nowhere0" in reason
    sweep.over()


# --- devices


@fault(
    "workers",
    "No GPUs where some were planned",
    injection="device=cuda on nodes whose GPUs Slurm hands out, but no driver knows",
    outcome="refused before any rank starts: error, with how many there are",
)
def test_fewer_gpus_than_planned(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*QUICK, "device=cuda"))
    sweep.submit()
    outcome, reason = sweep.outcome(sweep.attempt())
    assert outcome == "error"
    assert "devices=1, but this machine has 0 CUDA devices" in reason
    sweep.over()


@pytest.fixture
def small_node(request: pytest.FixtureRequest, ours: Cluster) -> Iterator[str]:
    """A node whose tasks get one core only."""
    node: str = request.param
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores, of which a node gets one")
    _pin(ours, node, cores[:1])
    yield node
    _pin(ours, node, cores)


def _pin(cluster: Cluster, node: str, cores: list[int]) -> None:
    slurmd = daemons.find(node, folder=cluster.folder)
    assert slurmd is not None
    for thread in slurmd.threads():
        psutil.Process(thread.id).cpu_affinity(cores)


@fault(
    "workers",
    "Fewer cores than planned",
    injection="the tasks of one of two nodes are pinned to a single core; two ranks are to train there",
    outcome="refused before any rank trains: error, with how many there are, also where it is the second node",
)
@pytest.mark.parametrize("small_node", ["n1", "n2"], indirect=True)
def test_fewer_cores_than_planned(small_node: str, ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*QUICK, "strategy=ddp", "devices=4", "nodes=2", "epochs=1"))
    sweep.submit()
    attempt = sweep.attempt()
    outcome, reason = sweep.outcome(attempt)
    where = "rank 2: on node 1: " if small_node == "n2" else ""
    assert outcome == "error"
    assert reason.startswith(f"{where}devices=2 with cores_per_device=1, but this machine has 1 core")
    assert finished_epochs(attempt) == []
    sweep.over()


# --- losses


@fault(
    "workers",
    "A loss that is not a number",
    injection="a learning rate of 1e30 in one of two runs",
    outcome="nan, with advice; the other run is ok; submitting again starts neither",
)
def test_a_diverging_run(ours: Cluster, tmp_path: Path) -> None:
    options = ("model=mlp", "model.hidden=[16]", "optimizer=sgd", "optimizer.lr=1e30,0.1", "epochs=2")
    sweep = Sweep(ours, tmp_path, (*QUICK, *options))
    sweep.submit()
    sweep.over()
    labels = {run.config().optimizer.lr: run.state().label for run in find_runs(tmp_path)}
    assert labels == {1e30: "nan", 0.1: "ok"}
    assert "0 runs to submit" in sweep.submit()
