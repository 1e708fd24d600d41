"""A cluster's bad days on a real Slurm: what hangs, is full, is set elsewhere, or fails before a run begins."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launch.slurm import scheduler
from parallelbench.results.folder import find_runs
from tests.faults import fault
from tests.helpers import fill_disk
from tests.slurm.daemons import until
from tests.slurm.jobs import show, submit, wait
from tests.slurm.runs import WITHOUT_TORCH
from tests.slurm.sweeps import PATIENCE_S, Sweeps, closed
from tests.slurm.test_input import fail

ENDLESS = (*WITHOUT_TORCH, "epochs=1000000", "strategy.step_s=0.02")


def rows(sweeps: Sweeps) -> list[dict[str, Any]]:
    """What `status --json` says of each run."""
    found: list[dict[str, Any]] = json.loads(sweeps.run("status", str(sweeps.results), "--json")[1])["runs"]
    return found


def running(sweeps: Sweeps) -> str:
    """The only job, once it runs."""
    ((_, job),) = sweeps.queue()
    wait(sweeps.cluster, job, timeout_s=PATIENCE_S, JobState="RUNNING")
    return job


@fault(
    "submission",
    "sbatch hangs",
    injection="an sbatch that submits, and then never ends; scheduler.TIMEOUT_S=10",
    outcome="it is ended; the job is found by its name, and is not submitted again; the sweep's lock is free",
)
def test_an_sbatch_that_hangs(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 10.0)
    with closed(sweeps.cluster):
        sweeps.sbatch('$REAL "$@" > /dev/null; sleep 600; true')
        code, text = sweeps.submit()
        assert code == 0, text
        sweeps.real_sbatch()
        assert "nothing to submit" in sweeps.submit()[1]
        assert len(sweeps.queue()) == len(sweeps.submissions()) == 1


@fault(
    "submission",
    "squeue hangs",
    injection="a squeue that never answers, while a job waits; scheduler.TIMEOUT_S=3",
    outcome="submit, status and cancel ask it once; exit 2 and one line, or the runs are unknown; then all works again",
)
def test_an_squeue_that_hangs(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit()[0] == 0
        starts = sweeps.results.parent / "starts"
        monkeypatch.setattr(scheduler, "TIMEOUT_S", 3.0)
        sweeps.replace("squeue", f"echo >> {starts}; exec sleep 600")
        for verb in ("submit", "cancel", "status"):
            given = sweeps.asked(verb) if verb == "submit" else [verb, str(sweeps.results)]
            code, text = sweeps.run(*given)
            assert "squeue gave no answer within 3 s" in " ".join(text.split())
            assert (code, starts.read_text()) == (0 if verb == "status" else 2, "\n")
            starts.unlink()
        sweeps.real_sbatch()
        monkeypatch.setattr(scheduler, "TIMEOUT_S", 30.0)
        assert [row["state"] for row in rows(sweeps)] == ["queued"]


def test_what_the_environment_says_to_sbatch_is_noted_and_the_site_decides(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed(sweeps.cluster):
        monkeypatch.setenv("SBATCH_PARTITION", "preemptible")
        for verb in ("plan", "submit"):
            code, text = sweeps.submit(verb=verb)
            assert code == 0, text
            assert "SBATCH_PARTITION of the environment has no effect" in " ".join(text.split())
        ((_, job),) = sweeps.queue()
        assert show(sweeps.cluster, job)["Partition"] == "normal"


def test_what_is_printed_may_be_pasted(sweeps: Sweeps, tmp_path: Path) -> None:
    """Brackets are no markup, and no part of a path is executed."""
    sweeps.results = tmp_path / "a[" / "b] $(touch pwned)"
    with closed(sweeps.cluster):
        code, text = sweeps.submit()
    assert code == 0, text
    (command,) = re.findall(r"`(parallelbench status .*)` shows each run", text)
    assert shlex.split(command) == ["parallelbench", "status", str(sweeps.adhoc)]
    assert sweeps.run(*shlex.split(command)[1:])[0] == 0


def test_tasks_that_were_cancelled_while_they_waited_say_so(sweeps: Sweeps) -> None:
    """Of an array that runs two at a time, accounting has one line with a pattern: 30_[0-7%2]."""
    other = submit(sweeps.cluster, "sleep 600", "--nodes=2", "--exclusive")
    wait(sweeps.cluster, other, JobState="RUNNING")  # where the partition is closed, accounting never shows the jobs
    assert sweeps.submit("sweep.repeats=8", "launcher.array_parallelism=2")[0] == 0
    (mine,) = sweeps.submissions()
    wait(sweeps.cluster, f"{mine.job}", Reason="Resources")

    def recorded() -> bool:
        return bool(sweeps.cluster.run("sacct", "--noheader", "--allocations", "--jobs", str(mine.job)).strip())

    until(recorded, what="accounting knowing the job", timeout_s=120)  # it never knows one that ends before
    sweeps.cluster.run("scancel", str(mine.job))
    until(lambda: len(sweeps.queue()) == 1, what="the end of the jobs", timeout_s=60)
    told = {f"its job {mine.job}_{task} ended before the run began: CANCELLED" for task in range(8)}

    def said() -> set[str]:
        return {(row["reason"] or "").partition(";")[0] for row in rows(sweeps)}

    until(lambda: said() == told, what="accounting knowing all ends", timeout_s=180)


@fault(
    "lifecycle",
    "Set-up that fails",
    injection="a module, where no node has the command for it; a site's line that fails",
    outcome="the job ends before the run begins, and its log says why, or in which line; nothing is trained",
)
def test_a_set_up_that_fails_ends_the_job(sweeps: Sweeps, tmp_path: Path) -> None:
    (tmp_path / "conf" / "site").mkdir(parents=True)
    own = {"moduleless": "modules: [nowhere/1]", "lineless": "setup: ['true', 'test -d /nowhere/2']"}
    for name, line in own.items():
        text = f"defaults: [local_cluster, _self_]\nname: {name}\n{line}\n"
        (tmp_path / "conf" / "site" / f"{name}.yaml").write_text(text)
    for name in own:
        code, text = sweeps.submit("--conf", str(tmp_path / "conf"), f"site={name}", f"sweep.name={name}")
        assert code == 0, text
    sweeps.until_queue_is_empty()
    assert [row["state"] for row in rows(sweeps)] == ["missing", "missing"]
    logs = sweeps.logs()
    assert logs.count("parallelbench: set-up failed with exit code 1 in line") == 1
    assert logs.count("parallelbench: site.modules, but no command module on") == 1
    assert [run for run in find_runs(sweeps.results) if run.attempts()] == []


@fault(
    "lifecycle",
    "Too little time",
    injection="Slurm's time limit ends a job whose rank has not finished an epoch, and does not answer the warning",
    outcome="killed, with TIMEOUT of accounting and the key to raise; submit leaves it alone until that is raised, and "
    "launcher.time_limit_min=auto asks for twice as much",
)
def test_a_run_that_needs_more_time_is_not_submitted_again_unchanged(sweeps: Sweeps) -> None:
    rule = (*ENDLESS, "strategy.step_s=1000")
    endless = (*rule, "launcher.time_limit_min=60")
    assert sweeps.submit(*endless)[0] == 0
    job = running(sweeps)
    (run,) = find_runs(sweeps.results)
    until(lambda: bool(list(run.path.glob("attempts/1/journal-rank0.jsonl"))), what="training", timeout_s=PATIENCE_S)
    sweeps.cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now+5")  # Slurm looks at limits every 30 s
    sweeps.until_queue_is_empty()
    word = "(TIMEOUT; nothing was saved within launcher.time_limit_min=60: raise it)"
    until(lambda: word in (rows(sweeps)[0]["reason"] or ""), what="accounting knowing the end", timeout_s=60)
    assert rows(sweeps)[0]["state"] == "killed"
    assert "1 killed (--retry killed tries again); 0 runs to submit" in sweeps.submit(*endless)[1]
    with closed(sweeps.cluster):
        assert sweeps.submit(*rule)[0] == 0
        ((_, job),) = sweeps.queue()
        assert show(sweeps.cluster, job)["TimeLimit"] == "02:00:00"
        assert sweeps.run("cancel", str(sweeps.adhoc))[0] == 0
        assert sweeps.submit(*rule, "launcher.time_limit_min=61")[0] == 0
        assert len(sweeps.queue()) == 1


def test_a_suspended_job_is_no_running_one(sweeps: Sweeps) -> None:
    assert sweeps.submit(*ENDLESS)[0] == 0
    job = running(sweeps)
    (run,) = find_runs(sweeps.results)
    until(lambda: run.state().state == "running", what="the run's beginning", timeout_s=PATIENCE_S)
    sweeps.cluster.run("scontrol", "suspend", job)
    try:
        (row,) = rows(sweeps)
        assert (row["state"], row["reason"].partition(":")[0]) == ("queued", "suspended")
        assert "nothing to submit" in sweeps.submit(*ENDLESS)[1]
    finally:
        sweeps.cluster.run("scontrol", "resume", job)
    assert rows(sweeps)[0]["state"] == "running"


def test_jobs_are_cancelled_on_a_full_disk(sweeps: Sweeps, small_disk: Path) -> None:
    sweeps.results = small_disk / "results"
    with closed(sweeps.cluster):
        assert sweeps.submit()[0] == 0
        ballast = fill_disk(small_disk)
        code, text = sweeps.run("cancel", str(sweeps.results))
        assert (code, "1 job cancelled" in text) == (0, True), text
        until(lambda: not sweeps.queue(), what="the end of the job", timeout_s=60)
        ballast.unlink()
        assert sweeps.submit()[0] == 0


def test_failures_end_the_watch_with_1(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit("sweep.repeats=2")[0] == 0
        queued, failed = find_runs(sweeps.results)
        assert sweeps.run("cancel", str(failed.path))[0] == 0
        until(lambda: len(sweeps.queue()) == 1, what="the end of a job", timeout_s=60)
        fail(failed, "error")
        assert queued.path.exists()
        assert sweeps.run("cancel", str(sweeps.results))[0] == 0
        until(lambda: not sweeps.queue(), what="the end of the last job", timeout_s=60)
    code, text = sweeps.run("status", str(sweeps.results), "--watch")
    assert (code, "1 error" in text) == (1, True), text
