"""A cluster's day on a real Slurm: what a site asks for, single runs, the report that follows, and containers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from launch.slurm.cluster import in_reservation, partitions, reservations
from parallelbench.results.folder import RunFolder, find_runs
from tests.slurm.daemons import until
from tests.slurm.jobs import show, submit
from tests.slurm.runs import WITHOUT_TORCH
from tests.slurm.sweeps import PATIENCE_S, Sweeps, closed


@pytest.fixture
def reserved(sweeps: Sweeps) -> Iterator[Sweeps]:
    """A cluster with a reservation of n2, for half an hour from now on."""
    create = ("StartTime=now", "Duration=30", "Users=root", "Nodes=n2", "ReservationName=deadline")
    sweeps.cluster.run("scontrol", "create", "reservation", *create)
    yield sweeps
    sweeps.cluster.run("scancel", "--user=root")
    until(lambda: not sweeps.queue(), what="an empty queue", timeout_s=60)
    sweeps.cluster.run("scontrol", "delete", "ReservationName=deadline")


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["site.partition=normal,preemptible"], {"Partition": "normal,preemptible"}),
        (["site.nodelist=n[2]"], {"ReqNodeList": "n2"}),
        (["site.exclude=n1"], {"ExcNodeList": "n1"}),
        (["site.nice=77"], {"Nice": "77"}),
        (["site.exclusive=true"], {"OverSubscribe": "NO"}),
    ],
)
def test_slurm_has_what_the_site_asks_for(sweeps: Sweeps, overrides: list[str], shown: dict[str, str]) -> None:
    with closed(sweeps.cluster):
        code, text = sweeps.submit(*overrides)
        assert code == 0, text
        ((_, job),) = sweeps.queue()
        assert shown.items() <= show(sweeps.cluster, job).items()


def test_an_exclusive_job_gets_all_of_its_node(sweeps: Sweeps) -> None:
    """So the account is charged for all of it, which `plan` and the GPU-hours count."""
    assert sweeps.submit("site.exclusive=true", "epochs=1000000", *WITHOUT_TORCH, "strategy.step_s=0.02")[0] == 0
    ((_, job),) = sweeps.queue()
    until(lambda: show(sweeps.cluster, job)["JobState"] == "RUNNING", what="a running job", timeout_s=PATIENCE_S)
    tres = dict(part.split("=") for part in show(sweeps.cluster, job)["TRES"].split(","))
    assert (tres["cpu"], tres["gres/gpu"]) == ("8", "4")
    assert "4.00 GPU-hours" in sweeps.submit("site.exclusive=true", "launcher.attempts=1", "seed=1", verb="plan")[1]


def test_a_reservation_is_planned_and_kept(reserved: Sweeps) -> None:
    (found,) = reservations()
    assert (found["ReservationName"], found["State"], found["Duration"]) == ("deadline", "ACTIVE", "00:30:00")
    assert in_reservation(found, 25) == ([], [])
    code, text = reserved.submit("site.reservation=deadline")
    assert code == 2
    assert "launcher.time_limit_min=60, but the reservation deadline lasts 30" in text
    assert "Requested reservation is invalid: check site.reservation" in reserved.submit("site.reservation=other")[1]
    assert not reserved.results.exists()
    with closed(reserved.cluster):
        assert reserved.submit("site.reservation=deadline", "launcher.time_limit_min=5")[0] == 0
        ((_, job),) = reserved.queue()
        assert show(reserved.cluster, job)["Reservation"] == "deadline"


def test_a_job_that_may_outlast_its_reservation_is_refused_though_slurm_starts_it(reserved: Sweeps) -> None:
    code, text = reserved.submit("site.reservation=deadline", "launcher.time_limit_min=30")
    assert (code, "min are left of the reservation deadline" in text) == (2, True), text
    job = submit(reserved.cluster, "true", "--reservation=deadline", "--time=30")
    until(lambda: show(reserved.cluster, job)["JobState"] == "COMPLETED", what="its end", timeout_s=PATIENCE_S)


def test_sbatch_decides_what_the_test_leaves_open(reserved: Sweeps) -> None:
    """Slurm's test says the same of nodes that others have reserved, for which jobs wait, and of nodes left out."""
    two_nodes = ("nodes=2", "devices=2", "strategy=ddp", "site.exclude=n1")
    for overrides, code in ((("site.nodelist=n2",), 0), (two_nodes, 2)):
        planned, text = reserved.submit(*overrides, verb="plan")
        assert (planned, "sbatch may refuse it" in " ".join(text.split())) == (0, True), text
        assert reserved.submit(*overrides)[0] == code
    assert len(reserved.queue()) == len(find_runs(reserved.results)) == 1


def test_what_the_cluster_refuses_leaves_no_folder(sweeps: Sweeps) -> None:
    refused = (
        (["site.partition=normal,nowhere"], "invalid partition specified: nowhere"),
        (["cores_per_device=9"], "1 node with 9 cores, 2.5 GiB, 1 GPU, but normal has 2 nodes with 8 cores"),
        (["site.nodelist=n9"], "Invalid node name specified: check site.nodelist"),
        (["site.nodelist=n[1-2]"], "invalid number of nodes"),
        (["strategy=ddp", "devices=3", "nodes=3", "batch_size=33"], "3 nodes with 1 core"),
        (["site.qos=nowhere"], "Invalid qos specification: check site.qos"),
        (["site.account=nowhere"], "check site.account"),
    )
    for overrides, word in refused:
        code, text = sweeps.submit(*overrides)
        assert (code, text.count("\n")) == (2, 1)
        assert word in text
    assert not sweeps.results.exists()


def test_nodes_that_are_drained_are_counted(sweeps: Sweeps) -> None:
    assert [(kind.name, kind.nodes, kind.out) for kind in partitions()] == [
        (name, 2, 0) for name in ("normal", "preemptible")
    ]
    two = ("nodes=2", "devices=2", "strategy=ddp")
    sweeps.cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    try:
        code, text = sweeps.submit(*two, verb="plan")
        assert sweeps.submit(*two, "cores_per_device=9", verb="plan")[0] == 2, "no node has so many"
        assert sweeps.submit(*two)[0] == 0
        assert len(sweeps.queue()) == 1
    finally:
        sweeps.cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    assert "note: Slurm has no nodes for it now (1 of 2 nodes that suit are down or drained): jobs wait" in text
    assert code == 0


def test_the_plan_says_when_a_job_would_start(sweeps: Sweeps) -> None:
    assert "would start at once" in sweeps.submit(verb="plan")[1]
    job = submit(sweeps.cluster, "sleep 600", "--nodes=2", "--exclusive", "--time=130")
    until(lambda: show(sweeps.cluster, job)["JobState"] == "RUNNING", what="a full cluster", timeout_s=PATIENCE_S)
    text = sweeps.submit(verb="plan")[1]
    assert re.search("would start in about 2 h (8|9|10) min", text), text
    assert not sweeps.results.exists()


def test_one_task_of_an_array_is_cancelled(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit("sweep.repeats=3")[0] == 0
        first, second, third = (run.path for run in find_runs(sweeps.results))
        code, text = sweeps.run("cancel", str(second))
        assert (code, "1 job cancelled" in text) == (0, True)
        assert len(sweeps.queue()) == 2
        text = sweeps.run("status", str(sweeps.results))[1]
        assert "1 missing, 2 queued" in text
        assert sweeps.run("cancel", str(first), str(third))[0] == 0
        assert sweeps.queue() == []


def test_shapes_are_queued_in_turns(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit("sweep.repeats=3", "devices=1,2", "strategy=ddp", "site.memory_gib_per_device=1")[0] == 0
        mine = sorted(sweeps.submissions(), key=lambda submission: int(submission.job or 0))
        first, second = mine[0].devices, mine[1].devices
        assert {first, second} == {1, 2}
        assert [each.devices for each in mine] == [first, second, second, first, first, second]


def test_a_throttle_does_not_undo_the_turns(sweeps: Sweeps) -> None:
    """Slurm starts no job of the second round while one of the first waits for others of its array."""
    options = ("sweep.repeats=2", "seed=0,1", "cores_per_device=1,2", "site.memory_gib_per_device=1")
    assert sweeps.submit(*WITHOUT_TORCH, *options, "launcher.array_parallelism=1")[0] == 0
    mine = sorted(sweeps.submissions(), key=lambda submission: int(submission.job or 0))
    assert [bool(each.after) for each in mine] == [False, False, True, True]
    sweeps.until_done(8)
    sweeps.until_queue_is_empty()
    folders = [[RunFolder(sweeps.adhoc / name) for (name,) in each.tasks] for each in mine]
    infos = [[info for run in each if (info := run.attempts()[0].info())] for each in folders]
    assert len({each.launcher.limit_min for each in mine}) == 1
    # When Slurm ends a job is when it has started it, and its limit: runs of jobs that start at once begin at random.
    ends = [[info.job_ends_at or 0.0 for info in each] for each in infos]
    assert len([*ends[0], *ends[1]]) == len([*ends[2], *ends[3]]) == 4
    assert 0.0 < max(ends[0] + ends[1]) <= min(ends[2] + ends[3])
    assert [info.waited_s for each in infos for info in each] == [None] * 8, "they waited for each other"


def test_a_wait_in_the_queue_is_recorded_and_told_by_plan(sweeps: Sweeps) -> None:
    words = (*WITHOUT_TORCH, "sweep.repeats=2")
    assert sweeps.submit(*words)[0] == 0
    sweeps.until_done(2)
    (mine,) = sweeps.submissions()
    infos = [RunFolder(sweeps.adhoc / name).attempts()[0].info() for (name,) in mine.tasks]
    waited = [(info.waited_s, info.launched_at - mine.created_at) for info in infos if info is not None]
    assert len(waited) == 2
    assert all(own is not None and 0 <= own <= since for own, since in waited)
    assert "jobs of this shape waited" in sweeps.submit(*words, "sweep.repeats=3", verb="plan")[1]


def test_the_report_follows_the_runs(sweeps: Sweeps) -> None:
    """Also on a partition where no job may have as long as a report usually asks for."""
    sweeps.cluster.run("scontrol", "create", "PartitionName=brief", "Nodes=ALL", "MaxTime=3")
    limits = ("site.partition=brief", "launcher.time_limit_min=3", "launcher.signal_delay_s=30")
    code, text = sweeps.submit("sweep.repeats=2", "--then", "report", *limits)
    assert code == 0, text
    assert "writes the report once the others are over" in text
    assert "writing reports once the others are over" in sweeps.run("status", str(sweeps.results))[1]
    sweeps.until_done(2)
    page = sweeps.adhoc / "report" / "index.html"
    log = sweeps.adhoc.glob("submissions/*_log.out")
    until(page.exists, what="the report", timeout_s=PATIENCE_S)
    sweeps.until_queue_is_empty()
    sweeps.cluster.run("scontrol", "delete", "PartitionName=brief")
    assert str(page) in "".join(file.read_text() for file in log).replace("\n", "")


def test_following_a_run_ends_with_it(sweeps: Sweeps) -> None:
    assert sweeps.submit(*WITHOUT_TORCH)[0] == 0
    (run,) = find_runs(sweeps.results)
    code, text = sweeps.run("logs", str(run.path), "--follow")
    assert code == 0, text
    assert text.rstrip().splitlines()[-1].startswith(f"{run.path.name}: ok")
    assert f"{run.path.name}: ok: trained" in text or "parallelbench: submission" in text
    assert sweeps.run("status", str(sweeps.results), "--watch")[0] == 0
