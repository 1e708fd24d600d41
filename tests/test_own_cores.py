"""Jobs of one node take cores of their own where Slurm binds them to none."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from parallelbench.world import affinity
from parallelbench.world.affinity import own_cores
from parallelbench.world.machine import Machine
from tests.faults import fault

CORES = tuple(range(900, 908))
"""Of a made-up node; no process of this machine has taken them."""


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The cores that this process may use, the last entry now: all of the node, as without core binding."""
    allowed = [set(CORES)]
    monkeypatch.setattr(affinity.os, "sched_getaffinity", lambda _: allowed[-1])
    monkeypatch.setattr(affinity.os, "sched_setaffinity", lambda _, cores: allowed.append(set(cores)))
    machine = Machine(cores=CORES, physical_cores=len(CORES), gpus=())
    monkeypatch.setattr(affinity, "this_machine", lambda: machine)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    return allowed


def test_two_jobs_of_a_node_share_no_core_and_give_theirs_back(node: list[set[int]]) -> None:
    with own_cores("cpu"):
        first = node[-1]
        node.append(set(CORES))  # as the other job sees the node
        with own_cores("cpu"):
            second = node[-1]
    assert (len(first), len(second)) == (3, 3)
    assert not first & second
    assert node[-1] == set(CORES)
    with own_cores("cpu"):
        assert node[-1] == first, "free again"


def test_where_too_few_are_free_all_stays_as_it_is(node: list[set[int]]) -> None:
    with ExitStack() as others:
        for _ in range(2):
            others.enter_context(own_cores("cpu"))
            node.append(set(CORES))
        with own_cores("cpu"):
            assert node[-1] == set(CORES), "two are left, three are needed"
            node.append(set(CORES))
            os.environ["SLURM_CPUS_PER_TASK"] = "2"
            with own_cores("cpu"):
                assert len(node[-1]) == 2, "what was taken in vain is free"


@fault(
    "workers",
    "Two local runs at once",
    injection="a run begins while another one has taken its cores",
    outcome="it takes the next free cores, as Slurm's unbound jobs do; where too few are free, all stays as it was",
)
def test_two_local_runs_of_a_machine_begin_with_other_cores(node: list[set[int]]) -> None:
    def first_cores() -> list[int]:
        return [core for core in CORES if core in node[-1]]

    with own_cores("cpu", needed=2):
        assert first_cores() == list(CORES), "what nobody has taken stays for the sampler"
        node.append(set(CORES))
        with own_cores("cpu", needed=1):
            assert first_cores() == list(CORES[2:])
            node.append(set(CORES))
            with own_cores("cpu", needed=6):
                assert first_cores() == list(CORES), "too few are free"
    assert node[-1] == set(CORES)


@pytest.mark.parametrize(("device_type", "needed"), [("cuda", "3"), ("cpu", "8"), ("cpu", "9"), ("cpu", "")])
def test_who_needs_no_cores_of_its_own_takes_none(
    device_type: str, needed: str, node: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs' ranks run near their GPUs; a job that Slurm has bound has as many as it asked for; no job has no number."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", needed or "0")
    with own_cores(device_type):
        assert node[-1] == set(CORES)
        assert len(node) == 1


def test_a_job_that_is_killed_leaves_its_cores(node: list[set[int]]) -> None:
    code = (
        "import socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        f"s.bind('\\0parallelbench-core-{CORES[0]}')\nprint('taken', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"taken\n"
        with own_cores("cpu"):
            assert CORES[0] not in node[-1]
        other.kill()
        other.wait()
    with own_cores("cpu"):
        assert CORES[0] in node[-1]
