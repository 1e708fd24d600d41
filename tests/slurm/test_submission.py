"""Faults while a sweep is handed to Slurm: every run is executed exactly once, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from launch.slurm import queue, record, scheduler
from parallelbench.results.folder import find_runs
from tests.faults import fault
from tests.slurm.cluster import Cluster
from tests.slurm.config import CLUSTER_NAME
from tests.slurm.conftest import started
from tests.slurm.daemons import until
from tests.slurm.jobs import show, submit
from tests.slurm.runs import WITHOUT_TORCH
from tests.slurm.sweeps import Sweeps, closed, deaf, limited

ONE, TWO, FIVE = "sweep.repeats=1", "sweep.repeats=2", "sweep.repeats=5"
LIGHT_ONE, LIGHT_TWO = (*WITHOUT_TORCH, ONE), (*WITHOUT_TORCH, TWO)
"""Of runs that are trained."""


@pytest.fixture(scope="module")
def short_arrays() -> Iterator[Cluster]:
    yield from started("no_accounting", max_array_size=3)


on = pytest.mark.parametrize


@fault(
    "submission",
    "QOS limit in the middle of a sweep",
    injection="the user may have 3 jobs in the queue, and submits 5",
    outcome="3 are submitted, one line says so; submitting later adds the other 2, nothing twice",
)
def test_a_limit_of_jobs(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        with limited(sweeps.cluster, 3):
            code, text = sweeps.submit(FIVE)
            assert code == 2
            assert "QOSMaxSubmitJobPerUserLimit" in text
            assert "(3 of 5 tasks of this shape submitted)" in text
            assert len(sweeps.queue()) == 3
        until(lambda: sweeps.submit(FIVE)[0] == 0, what="the end of the limit", timeout_s=60)
        assert len(sweeps.queue()) == 5
    names = [name for submission in sweeps.submissions() for task in submission.tasks for name in task]
    assert len(names) == len(set(names)) == 5


@fault(
    "submission", "array too big", injection="MaxArraySize=3, and 5 jobs of one shape", outcome="two arrays, of 3 and 2"
)
@on("sweeps", ["short_arrays"], indirect=True)
def test_an_array_too_big(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit(FIVE)[0] == 0
        assert [len(submission.tasks) for submission in sweeps.submissions()] == [3, 2]
        assert len(sweeps.queue()) == 5


@fault(
    "submission",
    "sbatch says 'Socket timed out' though the job exists",
    injection="an sbatch that submits, then fails with this message",
    outcome="the job is found by its name; it runs, once",
)
def test_an_answer_gets_lost(sweeps: Sweeps) -> None:
    sweeps.sbatch('$REAL "$@" > /dev/null; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1')
    assert sweeps.submit(*LIGHT_ONE)[0] == 0
    assert len(sweeps.submissions()) == 1
    assert "nothing to submit" in sweeps.submit(*LIGHT_ONE)[1]
    assert len(sweeps.submissions()) == 1
    sweeps.until_done()


@fault(
    "submission",
    "sbatch is a script that says more than Slurm",
    injection="an sbatch that prints 'Checking limits: job 1 of 64' first",
    outcome="the job has Slurm's number, and runs at once",
)
def test_an_sbatch_of_the_sites_own(sweeps: Sweeps) -> None:
    sweeps.sbatch('echo "Checking limits: job 1 of 64"; exec $REAL "$@"')
    with closed(sweeps.cluster):
        assert sweeps.submit(*LIGHT_TWO)[0] == 0
        (submission,) = sweeps.submissions()
        assert {job.partition("_")[0] for _, job in sweeps.queue()} == {submission.job}
        assert submission.cluster == CLUSTER_NAME
    sweeps.until_done(2)


@fault(
    "submission",
    "sbatch says 'Socket timed out', and there is no job",
    injection="an sbatch that only fails with this message",
    outcome="exit 2; for a minute the run is unknown and not submitted again, then it is",
)
def test_a_question_gets_lost(sweeps: Sweeps) -> None:
    sweeps.sbatch('echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1')
    code, text = sweeps.submit(ONE)
    assert (code, text.count("\n")) == (2, 1)
    assert "run the same command again later" in text
    sweeps.real_sbatch()
    _is_submitted_after_a_while(sweeps)


def _is_submitted_after_a_while(sweeps: Sweeps) -> None:
    """The record of the only run stays without a job for as long as one may still turn up."""
    with closed(sweeps.cluster):
        assert "nothing to submit" in sweeps.submit(ONE)[1]
        assert "1 unknown" in sweeps.run("status", str(sweeps.results))[1]
        sweeps.monkeypatch.setattr(queue, "UNSEEN_S", 0.0)
        assert "1 missing" in sweeps.run("status", str(sweeps.results))[1]
        code, _ = sweeps.submit(ONE)
        assert (code, len(sweeps.queue()), len(sweeps.submissions())) == (0, 1, 1)


@fault(
    "submission",
    "slurmctld is down",
    injection="slurmctld is stopped before submit, and again while jobs wait",
    outcome="submit: exit 2 and one line; status: the runs are unknown, not failed, and Slurm was asked once; logs and "
    "plan answer without it; all works after the restart",
)
def test_the_controller_is_down(sweeps: Sweeps) -> None:
    sweeps.monkeypatch.setattr(scheduler, "PAUSES_S", ())  # submit would ask again, each time for seconds
    sweeps.cluster.stop("slurmctld")
    code, text = sweeps.submit(ONE)
    assert (code, text.count("\n")) == (2, 1)
    assert "is slurmctld up? Nothing is lost" in text
    assert sweeps.submissions() == [], "it never got there"
    sweeps.cluster.start("slurmctld")
    with closed(sweeps.cluster):
        assert sweeps.submit(ONE)[0] == 0
        sweeps.cluster.stop("slurmctld")
        asked = sweeps.questions("squeue", "sacct", "sinfo", "scancel")
        code, text = sweeps.run("status", str(sweeps.results))
        assert code == 0
        assert "1 unknown" in text
        assert "is slurmctld up?" in text
        (run,) = find_runs(sweeps.adhoc)
        assert "nothing was printed yet" in sweeps.run("logs", str(run.path))[1]
        code, text = sweeps.submit(TWO, verb="plan")
        assert code == 2
        assert "#SBATCH --time=60" in text
        assert "the cluster's limits could not be checked: sinfo: " in text
        code, text = sweeps.run("cancel", str(sweeps.results))
        assert (code, text.count("\n")) == (2, 1)
        assert [line.partition(" ")[0] for line in asked()] == ["squeue", "squeue", "sinfo", "squeue"], "each once"
        sweeps.cluster.start("slurmctld")
        assert "1 queued" in sweeps.run("status", str(sweeps.results))[1]
        assert sweeps.submit(TWO)[0] == 0
        assert len(sweeps.queue()) == 2


@fault(
    "submission",
    "slurmctld is away for a moment",
    injection="slurmctld is stopped, and started again once submit has asked it in vain",
    outcome="submit asks again and goes on; each run is submitted once",
)
def test_the_controller_is_away_for_a_moment(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit(ONE)[0] == 0
        sweeps.cluster.stop("slurmctld")
        asked = sweeps.questions("squeue")

        def restart() -> None:
            until(lambda: bool(asked()), what="the first question", timeout_s=60)
            sweeps.cluster.start("slurmctld")

        with ThreadPoolExecutor(1) as pool:
            restarted = pool.submit(restart)
            code, text = sweeps.submit(TWO)
            restarted.result()
        assert code == 0, text
        assert len(sweeps.queue()) == 2


@fault(
    "submission",
    "no slurmdbd",
    injection="a cluster without accounting; a waiting job is cancelled behind the launcher's back",
    outcome="the run is missing, submitting again starts it, and it is done",
)
@on("sweeps", ["no_accounting"], indirect=True)
def test_no_accounting(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit(*LIGHT_ONE)[0] == 0
        sweeps.cluster.run("scancel", str(sweeps.submissions()[0].job))
        until(lambda: not sweeps.queue(), what="the end of the job", timeout_s=60)
        assert "1 missing" in sweeps.run("status", str(sweeps.results))[1]
    assert sweeps.submit(*LIGHT_ONE)[0] == 0
    sweeps.until_done()


@fault(
    "submission",
    "slurmdbd dies",
    injection="slurmdbd is killed while a job waits, and another one is cancelled",
    outcome="queued stays queued, the other is missing, none has failed; submitting again works",
)
def test_the_accounting_dies(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit(TWO)[0] == 0
        sweeps.cluster.kill("slurmdbd")
        sweeps.cluster.run("scancel", f"{sweeps.submissions()[0].job}_1")
        until(lambda: len(sweeps.queue()) == 1, what="the end of one job", timeout_s=60)
        code, text = sweeps.run("status", str(sweeps.results))
        assert code == 0
        assert "1 missing, 1 queued" in text
        assert sweeps.submit(TWO)[0] == 0
        assert len(sweeps.queue()) == 2
        sweeps.cluster.start("slurmdbd")


@fault(
    "submission",
    "accounting lags",
    injection="the database takes no writes while a job that runs is killed, and while a later one comes and goes",
    outcome="sacct says RUNNING of the first and nothing of the second, and is not believed: killed, then queued, then "
    "killed; how the last one ended is shown once accounting knows it",
)
def test_the_accounting_lags(sweeps: Sweeps) -> None:
    endless = (*LIGHT_ONE, "epochs=1000000", "strategy.step_s=0.02")
    assert sweeps.submit(*endless)[0] == 0
    (run,), (mine,) = find_runs(sweeps.adhoc), sweeps.submissions()

    def accounted() -> str:
        return sweeps.cluster.run("sacct", "-X", "-n", "-P", "--format=State", f"--name={mine.name}").strip()

    def status() -> str:
        return sweeps.run("status", str(sweeps.results))[1]

    until(lambda: bool(run.attempts()) and accounted() == "RUNNING", what="sacct saying so", timeout_s=240)
    with deaf(sweeps.cluster):
        os.kill(run.attempts()[-1].supervisor().pid, signal.SIGKILL)  # type: ignore[union-attr]
        sweeps.until_queue_is_empty()
        assert accounted() == "RUNNING"
        assert "1 killed" in status()
        assert "RUNNING" not in status()
        with closed(sweeps.cluster):
            assert sweeps.submit(*endless)[0] == 0
            assert "1 queued" in status()
            sweeps.cluster.run("scancel", str(sweeps.submissions()[-1].job))
            sweeps.until_queue_is_empty()
            assert "1 killed" in status()
            assert "CANCELLED" not in status()
    until(lambda: "(CANCELLED)" in status(), what="accounting catching up", timeout_s=120)


@fault("submission", "pending forever", injection="the partition is down", outcome="status says what Slurm waits for")
def test_pending_forever(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit(ONE)[0] == 0
        until(
            lambda: "PartitionDown" in sweeps.run("status", str(sweeps.results))[1],
            what="status showing the reason",
            timeout_s=60,
        )


@fault(
    "submission",
    "launcher killed between sbatch and its record",
    injection="an sbatch that submits, then kills its parent with SIGKILL",
    outcome="the next submit finds the array by its name and leaves its calls; each run is executed once",
)
def test_killed_after_sbatch(sweeps: Sweeps) -> None:
    sweeps.sbatch('$REAL "$@" > /dev/null; kill -KILL $PPID')
    with closed(sweeps.cluster):
        assert sweeps.start(*LIGHT_TWO).wait(timeout=60) == -signal.SIGKILL
        assert [submission.job for submission in sweeps.submissions()] == [None]
        sweeps.real_sbatch()
        code, text = sweeps.submit(*LIGHT_TWO)
        assert code == 0
        assert "nothing to submit" in text
        assert len(sweeps.queue()) == len(sweeps.pickles()) == 2
    sweeps.until_done(2)


@fault(
    "submission",
    "launcher killed before sbatch",
    injection="an sbatch that only kills its parent with SIGKILL",
    outcome="for a minute the run is unknown and not submitted again, then it is",
)
def test_killed_before_sbatch(sweeps: Sweeps) -> None:
    sweeps.sbatch("kill -KILL $PPID")
    assert sweeps.start(ONE).wait(timeout=60) == -signal.SIGKILL
    sweeps.real_sbatch()
    _is_submitted_after_a_while(sweeps)


@fault(
    "submission",
    "two launchers at once",
    injection="an sbatch that waits for a file; meanwhile another process submits the same sweep",
    outcome="the second one ends with exit 2 and names the first; each run is submitted once",
)
def test_two_launchers(sweeps: Sweeps, tmp_path: Path) -> None:
    sweeps.sbatch(f'touch {tmp_path}/asked; until [ -e {tmp_path}/go ]; do sleep 0.05; done; exec $REAL "$@"')
    with closed(sweeps.cluster):
        first = sweeps.start(TWO)
        until((tmp_path / "asked").exists, what="the first sbatch", timeout_s=60)
        code, text = sweeps.submit(TWO)
        assert (code, text.count("\n")) == (2, 1)
        assert f"another process is submitting this sweep (process {first.pid} on" in text
        (tmp_path / "go").touch()
        assert first.wait(timeout=60) == 0
        assert "nothing to submit" in sweeps.submit(TWO)[1]
        assert len(sweeps.queue()) == 2


@fault(
    "submission",
    "job id given out again",
    injection="the record names a job that is in the queue under another name",
    outcome="it is not believed: the run is missing, submit submits it, cancel leaves the other job alone",
)
def test_a_job_id_is_given_out_again(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit(ONE)[0] == 0
        (mine,) = sweeps.submissions()
        sweeps.cluster.run("scancel", str(mine.job))
        other = submit(sweeps.cluster, "true", "--job-name=other")
        record.write(sweeps.adhoc, msgspec.structs.replace(mine, job=other))
        assert "1 missing" in sweeps.run("status", str(sweeps.results))[1]
        assert sweeps.run("cancel", str(sweeps.adhoc))[0] == 0
        assert show(sweeps.cluster, other)["JobState"] == "PENDING"
        assert sweeps.submit(ONE)[0] == 0
        assert len(sweeps.queue()) == 2


@fault(
    "submission",
    "submission folder removed meanwhile",
    injection="the folder with records, calls and logs is removed while the job waits",
    outcome="that job ends without harm; the run is missing, and submitting again runs it",
)
def test_the_submission_is_removed(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit(*LIGHT_ONE)[0] == 0
        shutil.rmtree(sweeps.adhoc / record.FOLDER)
    sweeps.until_queue_is_empty()
    assert "1 missing" in sweeps.run("status", str(sweeps.results))[1]
    assert sweeps.submit(*LIGHT_ONE)[0] == 0
    sweeps.until_done()


@fault(
    "submission",
    "submitting from inside an allocation",
    injection="submit runs in a job step with two tasks' worth of SLURM_ variables",
    outcome="sbatch sees none of them: the new job has one task on one core",
)
def test_submitting_from_inside_a_job(sweeps: Sweeps, tmp_path: Path) -> None:
    sweeps.sbatch(f'env > {tmp_path}/environment; exec $REAL "$@"')
    sweeps.cluster.run(
        *("srun", "--cpus-per-task=4", "--mem=1000", f"--export=ALL,PATH={sweeps.results.parent}/bin:/usr/bin:/bin"),
        *("env", "SLURM_CPU_BIND=mask_cpu:0x1", "SLURM_NTASKS=8", "SBATCH_HOLD=1"),
        *(sys.executable, "-m", "parallelbench.cli", *sweeps.asked("submit", ONE)),
    )
    leaked = [line for line in (tmp_path / "environment").read_text().splitlines() if line.startswith(("SLURM", "SBA"))]
    assert [line.partition("=")[0] for line in leaked] == ["SLURM_CONF"]
    (mine,) = sweeps.submissions()
    job = show(sweeps.cluster, str(mine.job))
    assert (job["NumTasks"], job["NumCPUs"], job["CPUs/Task"]) == ("1", "1", "1")


@fault(
    "submission",
    "a hundred runs",
    injection="100 runs of one shape",
    outcome="one sbatch, and at most 3 files for each run before it starts",
)
def test_a_hundred_runs(sweeps: Sweeps, tmp_path: Path) -> None:
    sweeps.sbatch(f'echo >> {tmp_path}/count; exec $REAL "$@"')
    with closed(sweeps.cluster):
        assert sweeps.submit("sweep.repeats=100")[0] == 0
        assert (tmp_path / "count").read_text() == "\n"
        assert len(sweeps.queue()) == 100
        files = [path for path in sweeps.results.rglob("*") if not path.is_dir()]
        assert len(files) <= 3 * 100 + 3, "the record, the batch script, and a link to it come on top"
