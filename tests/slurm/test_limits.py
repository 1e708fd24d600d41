"""What `plan` says that accounting refuses is what the real Slurm refuses, or would let wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.slurm.cluster import cluster_of
from launch.slurm.sbatch import job_groups
from launch.slurm.submit import prepare_for_site
from launch.sweep import expand
from parallelbench.cli import main
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import started
from tests.slurm.daemons import DaemonError, until
from tests.slurm.jobs import show, submit

DDP = ("strategy=ddp", "devices=4")
NODES = ("strategy=ddp", "devices=2", "nodes=2", "launcher.memory_gib_per_device=1")


@pytest.fixture(scope="module")
def limited() -> Iterator[Cluster]:
    """A cluster whose root has the accounts lab (the default, below science) and root, and four QOSs."""
    for cluster in started("accounting"):

        def change(*what: str, cluster: Cluster = cluster) -> None:
            cluster.run("sacctmgr", "--immediate", *what)

        change("add", "qos", "short", "MaxWall=30", "MaxTRESPerJob=gres/gpu=2", "MaxJobsPerUser=2")
        change("add", "qos", "wide", "MaxTRESPerUser=gres/gpu=3")
        change("add", "qos", "brief", "MaxTRESMinsPerJob=cpu=30")
        change("add", "qos", "strict", "MaxWall=30", "Flags=DenyOnLimit")
        change("add", "account", "science", "GrpTRES=gres/gpu=6")
        change("add", "account", "lab", "parent=science", "MaxWall=120", "MaxTRESPerJob=mem=9G")
        change("add", "user", "root", "account=lab", "DefaultAccount=lab", "MaxSubmitJobs=5")
        change("modify", "user", "where", "name=root", "account=lab", "set", "qos=normal,short,wide,brief,strict")
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
            [*DDP, "site.qos=short", "launcher.time_limit_min=30", "launcher.memory_gib_per_device=1"],
            ["--time=30", "--qos=short", "--gpus-per-node=4"],
            "4 GPUs a job, but the QOS short allows 2",
            "QOSMaxGRESPerJob",
        ),
        (DDP, ["--time=60", "--mem=10240M"], "10240 MiB a job, but the account lab allows 9216", "AssocMaxMemPerJob"),
        (
            [*DDP, "site.qos=wide", "launcher.memory_gib_per_device=1"],
            ["--time=60", "--qos=wide", "--gpus-per-node=4"],
            "4 GPUs a job, but the QOS wide allows 3",
            "QOSMaxGRESPerUser",
        ),
        (
            ["strategy=ddp", "devices=8", "nodes=2", "launcher.memory_gib_per_device=1"],
            ["--time=60", "--nodes=2", "--gpus-per-node=4"],
            "8 GPUs a job, but the account science allows 6",
            "AssocGrpGRES",
        ),
        (  # without `safe`, too
            ["site.qos=brief"],
            ["--time=60", "--qos=brief"],
            "1 cores for 60 min, but the QOS brief allows 30 cores × min a job",
            "QOSMaxCpuMinutesPerJobLimit",
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
                ("maxtime", [], ["--time=60"], "launcher.time_limit_min=60, but maxtime allows 3", "Partition"),
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


def test_the_plan_fails_on_what_would_wait_for_ever_and_counts_what_waits(
    limited: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in limited.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "200")
    plan = ["plan", "launcher=slurm", "site=local_cluster", f"results={tmp_path}", "sweep.repeats=6"]
    assert main([*plan, "launcher.time_limit_min=30", "site.qos=short"]) == 0
    text = capsys.readouterr().out
    assert "note: the account lab allows 5 jobs in the queue, these are 6: submit the rest later" in text
    assert "note: the QOS short lets 2 of these 6 jobs run at once" in text
    assert main([*plan, "launcher.time_limit_min=31", "site.qos=short"]) != 0
    assert "launcher.time_limit_min=31, but the QOS short allows 30" in capsys.readouterr().out
