"""Limits of accounts and QOSs: read as sacctmgr writes them, a QOS before its account, each said before it bites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from launch.slurm.limits import allowed
from launch.slurm.scheduler import SchedulerError
from launch.slurm.submit import batches, prepare_for_site
from launch.sweep import expand
from tests.launch.fake_slurm import ON_SITE

if TYPE_CHECKING:
    from pathlib import Path

    from launch.slurm.submit import Batch
    from tests.launch.fake_slurm import FakeSlurm

ENFORCED = "ClusterName = here\nAccountingStorageEnforce = associations,limits,qos\n"
#        Cluster DefaultAccount Account Partition QOS DefaultQOS MaxWall MaxTRES GrpTRES MaxJobs MaxSubmitJobs
USERS = (
    "here|lab|lab||normal,short||02:00:00|cpu=64,gres/gpu=4||9|30\n"
    "here|lab|lab|preemptible|normal|normal|||||\n"
    "here|lab|grp_b||short|short|||gres/gpu:a100=2||\n"
    "there|lab|far||normal|||||\n"
)
#      Name MaxWall MaxTRES GrpTRES MaxJobsPU MaxSubmitPU MaxTRESPU
QOS = "normal||||||\nshort|1-00:00:00|gres/gpu=2,mem=20G||2||gres/gpu=6,cpu=20\n"


@pytest.fixture
def slurm(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """One that knows accounts and QOSs."""
    ask = fake.ask

    def told(command: list[str], **options: object) -> str:
        key = "scontrol" if command[0] == "scontrol" else command[4]
        return ask([key, *command[1:]], **options)

    monkeypatch.setattr("launch.slurm.scheduler.ask", told)
    fake.answers |= {"scontrol": ENFORCED, "user": USERS, "qos": QOS}
    return fake


def group(results: Path, *overrides: str) -> Batch:
    plan = expand([*ON_SITE, f"results={results}", *overrides])
    (batch,) = batches([prepare_for_site(planned) for planned in plan])
    return batch


def test_only_this_clusters_accounts_count(slurm: FakeSlurm) -> None:
    found: Any = allowed()
    assert [each.account for each in found.associations] == ["lab", "lab", "grp_b"]
    assert dict(found.findings()) == {
        "account lab (default)": "QOS normal, short; 120 min a job; 64 cores a job; 4 GPUs a job; "
        "9 jobs run at once; 30 jobs in the queue",
        "account lab on preemptible (default)": "QOS normal (default)",
        "account grp_b": "QOS short (default); 2 a100 GPUs in all",
        "QOS normal": "no limits of its own",
        "QOS short": "1440 min a job; 2 GPUs a job; 20480 MiB a job; 2 jobs run at once; 6 GPUs a user; "
        "20 cores a user",
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
        (["site.qos=long"], "site.qos=long is not open to the account lab: normal, short"),
        (["site.account=grp_a"], "site.account=grp_a is none of this user's: grp_b, lab"),
        (["site.account=far"], "site.account=far is none of this user's"),
        (["site.account=grp_b", "site.gpu_type=a100", "strategy=ddp", "devices=2"], None),
    ],
)
def test_what_accounting_refuses_is_said(
    slurm: FakeSlurm, overrides: list[str], message: str | None, tmp_path: Path
) -> None:
    found: Any = allowed()
    texts = list(found.refusals(group(tmp_path, "launcher.time_limit_min=5", *overrides)))
    assert [message in text for text in texts] == ([True] if message else []), texts


def test_a_limit_of_a_type_of_gpu_counts_for_that_type(slurm: FakeSlurm, tmp_path: Path) -> None:
    found: Any = allowed()
    four = ["site.account=grp_b", "site.qos=short", "strategy=ddp", "devices=4", "launcher.time_limit_min=5"]
    of_any = "4 GPUs a job, but the QOS short allows 2: ask for fewer"
    of_type = "4 a100 GPUs a job, but the account grp_b allows 2: ask for fewer"
    assert list(found.refusals(group(tmp_path, *four))) == [of_any, of_type]
    assert list(found.refusals(group(tmp_path, *four, "site.gpu_type=null"))) == [of_any]


def test_what_waits_is_counted(slurm: FakeSlurm, tmp_path: Path) -> None:
    found: Any = allowed()
    few = group(tmp_path, "sweep.repeats=9")
    assert list(found.warnings([few])) == []
    many = group(tmp_path, "sweep.repeats=31")
    assert list(found.warnings([many])) == [
        "the account lab allows 30 jobs in the queue, these are 31: submit again, later, for the rest",
        "the account lab lets 9 of these 31 jobs run at once",
    ]
    wide = group(tmp_path, "sweep.repeats=5", "strategy=ddp", "devices=2", "site.qos=short")
    assert list(found.warnings([wide])) == ["the QOS short lets 2 of these 5 jobs run at once"]


def test_without_an_account_nothing_runs(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers["user"] = ""
    found: Any = allowed()
    assert "has no account in the cluster's accounting" in next(found.refusals(group(tmp_path)))


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
