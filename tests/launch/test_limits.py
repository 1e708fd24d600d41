"""Limits of accounts and QOSs: read as sacctmgr writes them, a QOS before its account, each said before it bites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.slurm.limits import Allowed, allowed
from launch.slurm.sbatch import JobGroup
from launch.slurm.scheduler import SchedulerError
from tests.launch.fake_slurm import FakeSlurm, group

ENFORCED = "ClusterName = here\nAccountingStorageEnforce = associations,limits,qos\n"
# Cluster DefaultAccount Account Partition QOS DefaultQOS MaxWall MaxTRES GrpTRES MaxJobs MaxSubmitJobs MaxTRESMins
# GrpTRESMins
USERS = (
    "here|lab|lab||normal,short||02:00:00|cpu=64,gres/gpu=4||9|30|cpu=3000|\n"
    "here|lab|lab|preemptible|normal|normal|||||||\n"
    "here|lab|grp_b||short|short|||||||\n"
    "here|lab|cpus|cpu|normal,short||||||||\n"
    "there|lab|far||normal|||||||\n"
)
#         Cluster Account ParentName User GrpTRES GrpTRESMins
GROUPS = (
    "here|root||||\nhere|root|root|root||\nhere|science|root||gres/gpu:a100=2,cpu=500|cpu=4000\n"
    "here|grp_b|science||cpu=600|\nhere|grp_b||me||\nhere|lab|root|||\nhere|cpus|root|||\n"
    "there|grp_b|root||gres/gpu=1|cpu=1\n"
)
#      Name Flags MaxWall MaxTRES GrpTRES MaxJobsPU MaxSubmitPU MaxTRESPU MaxTRESMins GrpTRESMins
QOS = "normal|||||||||\nshort||1-00:00:00|gres/gpu=2,mem=20G||2||gres/gpu=6,cpu=20||\nbrief||||||||cpu=50|cpu=90\n"


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


def warnings(found: Allowed, *asked: JobGroup) -> list[str]:
    return list(found.warnings([(each.job, len(each.tasks())) for each in asked]))


def test_only_this_clusters_accounts_count(slurm: FakeSlurm) -> None:
    found: Any = allowed()
    assert [each.account for each in found.associations] == ["lab", "lab", "grp_b", "cpus"]
    assert dict(found.findings()) == {
        "account lab (default)": "QOS normal, short; 120 min a job; 64 cores a job; 4 GPUs a job; "
        "9 jobs at once; 30 jobs in the queue; 3000 cores × min a job",
        "account lab on preemptible (default)": "QOS normal (default)",
        "account grp_b": "QOS short (default); 500 cores in all; 2 a100 GPUs in all; 4000 cores × min in all",
        "account cpus on cpu": "QOS normal, short",
        "QOS normal": "no limits of its own",
        "QOS short": "1440 min a job; 2 GPUs a job; 20480 MiB a job; 2 jobs at once; 6 GPUs a user; 20 cores a user",
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launcher.time_limit_min=121"], "launcher.time_limit_min=121, but the account lab allows 120"),
        (["launcher.time_limit_min=121", "site.partition=preemptible"], None),  # its own association has no limit
        (["launcher.time_limit_min=121", "site.qos=short"], None),  # the QOS's longer one counts
        (["launcher.time_limit_min=1441", "site.qos=short"], "but the QOS short allows 1440"),
        (["strategy=ddp", "devices=4"], None),
        (["strategy=ddp", "devices=4", "site.qos=short"], "4 GPUs a job, but the QOS short allows 2"),
        (["strategy=ddp", "devices=8", "nodes=2"], "8 GPUs a job, but the account lab allows 4"),
        (["launcher.memory_gib_per_device=21", "site.qos=short"], "21504 MiB a job, but the QOS short allows 20480"),
        (["cores_per_device=30", "launcher.time_limit_min=100"], None),
        (
            ["cores_per_device=30", "launcher.time_limit_min=101"],
            "30 cores for 101 min, but the account lab allows 3000 cores × min a job: lower launcher.time_limit_min",
        ),
        (["site.account=cpus", "site.partition=cpu", "launcher.time_limit_min=1441"], None),  # the cluster's normal
        (["site.account=grp_b", "launcher.time_limit_min=1441"], "the QOS short allows 1440"),  # its default
        (["site.account=grp_b", "site.gpu_type=a100", "strategy=ddp", "devices=2"], None),
    ],
)
def test_what_accounting_refuses_is_said(
    slurm: FakeSlurm, overrides: list[str], message: str | None, tmp_path: Path
) -> None:
    found: Any = allowed("normal")
    texts = list(refusals(found, group(tmp_path, "launcher.time_limit_min=5", *overrides)))
    assert len(texts) == (message is not None), texts
    assert message is None or message in texts[0]


def test_the_qos_of_a_partition_comes_before_the_jobs(slurm: FakeSlurm, tmp_path: Path) -> None:
    found: Any = allowed("normal", {"normal": "short"})
    asked = group(tmp_path, "launcher.time_limit_min=121")
    assert refusals(found, asked) == []
    asked = group(tmp_path, "launcher.time_limit_min=1441")
    (text,) = refusals(found, asked)
    assert "the QOS short allows 1440" in text
    slurm.answers["qos"] = QOS.replace("normal||", "normal|OverPartQOS|01:00:00")
    found = allowed("normal", {"normal": "short"})
    (text,) = refusals(found, asked)
    assert "the QOS normal allows 60" in text


def test_a_limit_of_a_type_of_gpu_counts_for_that_type(slurm: FakeSlurm, tmp_path: Path) -> None:
    found: Any = allowed()
    four = ["site.account=grp_b", "site.qos=short", "strategy=ddp", "devices=4", "launcher.time_limit_min=5"]
    of_any = "4 GPUs a job, but the QOS short allows 2: ask for fewer"
    of_type = "4 a100 GPUs a job, but the account science allows 2: ask for fewer"
    assert list(refusals(found, group(tmp_path, *four))) == [of_any, of_type]
    assert list(refusals(found, group(tmp_path, *four, "site.gpu_type=null"))) == [of_any]


def test_an_accounts_only_qos_is_the_one_that_counts(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers["user"] = "here|lab|lab||short||||||||\n"
    found: Any = allowed()
    (text,) = refusals(found, group(tmp_path, "launcher.time_limit_min=1441"))
    assert "the QOS short allows 1440" in text


def test_what_waits_is_counted(slurm: FakeSlurm, tmp_path: Path) -> None:
    found: Any = allowed()
    few = group(tmp_path, "sweep.repeats=9")
    assert warnings(found, few) == []
    assert warnings(found, few, group(tmp_path, "launcher.time_limit_min=5")) == [
        "the account lab lets 9 of these 10 jobs run at once"
    ]
    many = group(tmp_path, "sweep.repeats=31")
    assert warnings(found, many) == [
        "the account lab allows 30 jobs in the queue, these are 31: submit the rest later",
        "the account lab lets 9 of these 31 jobs run at once",
    ]
    wide = group(tmp_path, "sweep.repeats=5", "strategy=ddp", "devices=4", "site.account=grp_b", "site.qos=normal")
    assert warnings(found, wide) == []
    two = group(tmp_path, "sweep.repeats=5", "strategy=ddp", "devices=2", "site.qos=short")
    assert warnings(found, two) == [
        f"the QOS short lets 3 of these 5 jobs run at once ({two.shape})",
        "the QOS short lets 2 of these 5 jobs run at once",
    ]


def test_jobs_in_the_queue_count(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers["squeue"] = "".join(f"{job}|N/A|{job}|PENDING|None|N/A|N/A|mine\n" for job in range(25))
    found: Any = allowed()
    text = "allows 30 jobs in the queue, these are 6 and 25 are queued already: submit the rest later"
    assert text in warnings(found, group(tmp_path, "sweep.repeats=6"))[0]


@pytest.mark.parametrize(
    ("enforced", "time"),
    [("associations", False), ("associations,qos", False), ("associations,limits", True), ("safe", True)],
)
def test_only_what_is_enforced_refuses(slurm: FakeSlurm, enforced: str, time: bool, tmp_path: Path) -> None:
    slurm.answers["scontrol"] = f"ClusterName = here\nAccountingStorageEnforce = {enforced}\n"
    found: Any = allowed()
    assert bool(list(refusals(found, group(tmp_path, "launcher.time_limit_min=121")))) == time


@pytest.mark.parametrize(
    ("enforced", "wall_min", "messages"),
    [
        ("limits,qos", 50, []),
        ("limits,qos", 51, ["allows 50 cores × min a job"]),
        ("limits,qos", 91, ["allows 50 cores × min a job"]),
        ("safe,qos", 91, ["allows 50 cores × min a job", "allows 90 cores × min in all"]),
    ],
)
def test_a_groups_minutes_hold_only_where_safe_is_enforced_a_jobs_own_always(
    slurm: FakeSlurm, enforced: str, wall_min: int, messages: list[str], tmp_path: Path
) -> None:
    """slurm.conf(5) on `safe`: only jobs that end within `GrpTRESMins` start; without it, they start and are killed."""
    slurm.answers["scontrol"] = f"ClusterName = here\nAccountingStorageEnforce = {enforced}\n"
    slurm.answers["user"] = "here|lab|lab||brief|brief|||||||\n"
    found: Any = allowed()
    texts = list(refusals(found, group(tmp_path, f"launcher.time_limit_min={wall_min}")))
    assert len(texts) == len(messages), texts
    assert all(message in text for message, text in zip(messages, texts, strict=True)), texts


def test_minutes_of_the_accounts_above_count_for_their_own_cluster(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers["scontrol"] = "ClusterName = here\nAccountingStorageEnforce = safe\n"
    found: Any = allowed()
    mine = ["site.account=grp_b", "site.qos=normal", "cores_per_device=4"]
    assert list(refusals(found, group(tmp_path, *mine, "launcher.time_limit_min=1000"))) == []
    (text,) = refusals(found, group(tmp_path, *mine, "launcher.time_limit_min=1001"))
    assert "4 cores for 1001 min, but the account science allows 4000 cores × min in all" in text


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
