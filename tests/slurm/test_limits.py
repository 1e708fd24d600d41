"""What `plan` says that accounting refuses is what the real Slurm refuses, or would let wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.slurm.cluster import cluster_of
from launch.slurm.sbatch import job_groups
from launch.slurm.submit import prepare_for_site
from launch.sweep import expand
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import started
from tests.slurm.daemons import DaemonError, until
from tests.slurm.jobs import show, submit

NODES = ("strategy=ddp", "devices=2", "nodes=2", "launcher.memory_gib_per_device=1")


@pytest.fixture(scope="module")
def limited() -> Iterator[Cluster]:
    """A cluster whose root has the accounts lab (the default, below science) and root, and three QOSs of its own."""
    for cluster in started("accounting"):

        def change(*what: str, cluster: Cluster = cluster) -> None:
            cluster.run("sacctmgr", "--immediate", *what)

        change("add", "qos", "short", "MaxWall=30")
        change("add", "qos", "narrow", "MaxTRESPerJob=node=1")
        change("add", "qos", "strict", "MaxWall=30", "Flags=DenyOnLimit")
        change("add", "account", "science")
        change("add", "account", "lab", "parent=science", "MaxWall=120")
        change("add", "user", "root", "account=lab", "DefaultAccount=lab")
        change("modify", "user", "where", "name=root", "account=lab", "set", "qos=normal,short,narrow,strict")
        change("add", "account", "other")
        rules = ("AllowAccounts=other", "DenyAccounts=lab", "AllowQos=short", "DenyQos=normal", "MaxNodes=1")
        for rule in (*rules, "MinNodes=2", "MaxCPUsPerNode=2", "QOS=short", "MaxTime=3"):
            name = rule.partition("=")[0].lower()
            cluster.run("scontrol", "create", f"PartitionName={name}", "Nodes=ALL", rule)
        yield cluster


@pytest.mark.parametrize(
    ("overrides", "options", "said", "reason"),
    [
        (["launcher.time_limit_min=121"], ["--time=121"], "account lab allows 120", "AssocMaxWallDurationPerJobLimit"),
        (["site.qos=short"], ["--time=60", "--qos=short"], "QOS short allows 30", "QOSMaxWallDurationPerJobLimit"),
        (
            [*NODES, "site.qos=narrow"],
            ["--time=60", "--qos=narrow", "--nodes=2"],
            "nodes=2, but the QOS narrow allows 1",
            "QOSMaxNodePerJobLimit",
        ),
        (["site.qos=long"], ["--qos=long"], "Invalid qos", "Invalid qos"),
        (["site.account=root", "site.qos=short"], ["--account=root", "--qos=short"], "Invalid qos", "Invalid qos"),
        (["site.account=far"], ["--account=far"], "Invalid account", "Invalid account"),
        (
            ["site.qos=strict"],
            ["--time=60", "--qos=strict"],
            "the QOS strict allows 30",
            "QOSMaxWallDurationPerJobLimit",
        ),
        *[
            ([f"site.partition={name}", *overrides], [f"--partition={name}", *options], said, reason)
            for name, overrides, options, said, reason in (
                ("allowaccounts", [], [], "the jobs' is lab: set site.account", "not_permitted_to_use_this_partition"),
                ("denyaccounts", [], [], "the jobs' is lab: set site.account", "not_permitted_to_use_this_partition"),
                ("allowqos", [], [], "the jobs' is normal: set site.qos", "not_permitted_to_use_this_partition"),
                ("denyqos", [], [], "the jobs' is normal: set site.qos", "not_permitted_to_use_this_partition"),
                ("maxnodes", NODES, ["--nodes=2", "--cpus-per-task=2"], "MaxNodes=1", "Partition"),
                ("minnodes", [], ["--nodes=1"], "MinNodes=2", "Partition"),
                (
                    "maxcpuspernode",
                    ["cores_per_device=3"],
                    ["--cpus-per-task=3"],
                    "MaxCPUsPerNode=2",
                    "node configuration",
                ),
                ("qos", [], ["--time=60"], "the QOS short allows 30", "QOSMaxWallDurationPerJobLimit"),
                (
                    "maxtime",
                    ["launcher.time_limit_min=60"],
                    ["--time=60"],
                    "launcher.time_limit_min=60, but maxtime allows 3",
                    "Partition",
                ),
            )
        ],
    ],
)
def test_a_refusal_is_slurms(
    limited: Cluster,
    overrides: list[str],
    options: list[str],
    said: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in limited.env.items():
        monkeypatch.setenv(name, value)
    plan = expand(["launcher=slurm", "site=local_cluster", f"results={tmp_path}", *overrides])
    (batch,) = job_groups([prepare_for_site(planned) for planned in plan])
    answer = cluster_of().answer(batch.job)
    assert any(said in text for text in answer.refusals), answer
    assert not answer.start
    assert reason in slurms_word(limited, options)


def slurms_word(cluster: Cluster, options: list[str]) -> str:
    """Why Slurm takes no such job, or lets it wait."""
    try:
        job = submit(cluster, "true", *options)
    except DaemonError as error:
        return str(error)
    until(lambda: show(cluster, job)["Reason"] not in ("None", "Priority"), what="a reason", timeout_s=30)
    word = show(cluster, job)["Reason"]
    cluster.run("scancel", job)
    return word
