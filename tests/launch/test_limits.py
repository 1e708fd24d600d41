"""Limits of accounts and QOSs on a job's length and nodes: read as sacctmgr writes them, the first that counts wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.slurm.limits import Allowed, allowed
from launch.slurm.sbatch import JobGroup
from launch.slurm.scheduler import SchedulerError
from tests.launch.fake_slurm import FakeSlurm, group

ENFORCED = "ClusterName = here\nAccountingStorageEnforce = associations,limits,qos\n"
# Cluster DefaultAccount Account Partition QOS DefaultQOS MaxWall MaxTRES
USERS = (
    "here|lab|lab||normal,short||02:00:00|cpu=64,node=1\n"
    "here|lab|lab|preemptible|normal|normal||\n"
    "here|lab|grp_b||short|short||\n"
    "here|lab|cpus|cpu|normal,short|||\n"
    "there|lab|far||normal|||\n"
)
#         Cluster Account ParentName User
GROUPS = "here|root||\nhere|root|root|root\nhere|grp_b|science|\nhere|grp_b||me\nhere|lab|root|\nthere|grp_b|root|\n"
#      Name Flags MaxWall MaxTRES
QOS = "normal|||\nshort||1-00:00:00|gres/gpu=2,node=2\n"


@pytest.fixture
def slurm(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """One that knows accounts and QOSs."""
    ask = fake.ask

    def told(command: list[str], **options: object) -> str:
        key = command[4] if command[0] == "sacctmgr" else command[0]
        return ask([key, *command[1:]], **options)

    monkeypatch.setattr("launch.slurm.scheduler.ask", told)
    fake.answers |= {"scontrol": ENFORCED, "user": USERS, "qos": QOS, "assoc": GROUPS}
    return fake


def refusals(found: Allowed, asked: JobGroup) -> list[str]:
    return list(found.refusals(asked.job, asked.job.site.partition or "normal"))


def test_only_this_clusters_accounts_count(slurm: FakeSlurm) -> None:
    found: Any = allowed()
    assert [each.account for each in found.associations] == ["lab", "lab", "grp_b", "cpus"]
    assert dict(found.findings()) == {
        "account lab (default)": "QOS normal, short; 120 min a job, 1 node(s) a job",
        "account lab on preemptible (default)": "QOS normal (default)",
        "account grp_b": "QOS short (default)",
        "account cpus on cpu": "QOS normal, short",
        "QOS normal": "no limits of a job's length or nodes",
        "QOS short": "1440 min a job, 2 node(s) a job",
    }


TWO_NODES = ("strategy=ddp", "devices=2", "nodes=2", "launcher.time_limit_min=5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launcher.time_limit_min=121"], "launcher.time_limit_min=121, but the account lab allows 120"),
        (["launcher.time_limit_min=121", "site.partition=preemptible"], None),  # its own association has no limit
        (["launcher.time_limit_min=121", "site.qos=short"], None),  # the QOS's longer one counts
        (["launcher.time_limit_min=1441", "site.qos=short"], "but the QOS short allows 1440"),
        (["site.account=cpus", "site.partition=cpu", "launcher.time_limit_min=1441"], None),  # the cluster's normal
        (["site.account=grp_b", "launcher.time_limit_min=1441"], "the QOS short allows 1440"),  # its default
        (TWO_NODES, "nodes=2, but the account lab allows 1"),
        ([*TWO_NODES, "site.qos=short"], None),
        (["strategy=ddp", "devices=4", "site.qos=short", "launcher.time_limit_min=5"], None),  # GPUs: squeue says it
    ],
)
def test_what_accounting_never_starts_is_said(
    slurm: FakeSlurm, overrides: list[str], message: str | None, tmp_path: Path
) -> None:
    found: Any = allowed()
    texts = refusals(found, group(tmp_path, *overrides))
    assert len(texts) == (message is not None), texts
    assert message is None or message in texts[0]


def test_the_qos_of_a_partition_comes_before_the_jobs(slurm: FakeSlurm, tmp_path: Path) -> None:
    found: Any = allowed({"normal": "short"})
    asked = group(tmp_path, "launcher.time_limit_min=121")
    assert refusals(found, asked) == []
    asked = group(tmp_path, "launcher.time_limit_min=1441")
    (text,) = refusals(found, asked)
    assert "the QOS short allows 1440" in text
    slurm.answers["qos"] = QOS.replace("normal||", "normal|OverPartQOS|01:00:00")
    found = allowed({"normal": "short"})
    (text,) = refusals(found, asked)
    assert "the QOS normal allows 60" in text


def test_an_accounts_only_qos_is_the_one_that_counts(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers["user"] = "here|lab|lab||short|||\n"
    found: Any = allowed()
    (text,) = refusals(found, group(tmp_path, "launcher.time_limit_min=1441"))
    assert "the QOS short allows 1440" in text


@pytest.mark.parametrize(
    ("enforced", "time"),
    [("associations", False), ("associations,qos", False), ("associations,limits", True), ("safe", True)],
)
def test_only_what_is_enforced_refuses(slurm: FakeSlurm, enforced: str, time: bool, tmp_path: Path) -> None:
    slurm.answers["scontrol"] = f"ClusterName = here\nAccountingStorageEnforce = {enforced}\n"
    found: Any = allowed()
    assert bool(refusals(found, group(tmp_path, "launcher.time_limit_min=121"))) == time


@pytest.mark.parametrize("enforced", ["none", "nojobs,nosteps"])
def test_what_is_not_enforced_is_not_asked_for(slurm: FakeSlurm, enforced: str) -> None:
    slurm.answers["scontrol"] = f"AccountingStorageEnforce = {enforced}\n"
    assert allowed() is None
    assert slurm.asked == ["scontrol"]


def test_no_answer_is_an_error(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(command: list[str], **_: object) -> str:
        if command[0] == "scontrol":
            return ENFORCED
        raise SchedulerError("sacctmgr: Unable to contact slurmdbd")

    monkeypatch.setattr("launch.slurm.scheduler.ask", down)
    with pytest.raises(SchedulerError, match="slurmdbd"):
        allowed()
