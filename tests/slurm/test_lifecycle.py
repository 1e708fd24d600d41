"""What Slurm does to jobs: whatever it is, one valid result comes of each run, or a clear word and another try."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from parallelbench.results.attempt import Attempt
from parallelbench.results.folder import file_sha256
from tests.faults import fault
from tests.launch.programs import finished_epochs
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import until
from tests.slurm.faulty import faulty
from tests.slurm.jobs import show, submit, wait
from tests.slurm.runs import ENDLESS, ON_TWO_NODES, QUICK, TWO_NODES, WITHOUT_TORCH, Sweep, events, times_finished

FEW = "epochs=400"
"""Enough on two nodes that a fault hits in between, few enough to end soon."""
PACED = (*WITHOUT_TORCH, *QUICK, "epochs=150", "strategy.step_s=0.02")
"""One rank, which trains for six seconds."""
LONG = (*PACED, "strategy.step_s=0.05", "site.partition=preemptible")
"""One rank, which trains for fifteen, where preemption takes its node."""
BY_TORCHRUN = (*QUICK[:-1], "strategy=ddp", "devices=2", FEW, "site.partition=preemptible")
"""Two ranks there, with the site's memory: torchrun and what it starts take more than QUICK's."""
SAVING = ("launcher.checkpoint=always", "launcher.checkpoint_every_s=2")
WHOLE = ("--nodes=2", "--exclusive")


@pytest.fixture
def cgroups(cgroup: Cluster) -> Cluster:
    """Where Slurm signals only the tasks themselves, so that forwarding is ours."""
    cgroup.restore()
    return cgroup


def on(**options: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("special", [options], indirect=True)


def warn(sweep: Sweep) -> None:
    """What Slurm does some time before the limit; it looks at limits every 30 s only."""
    sweep.cluster.run("scancel", "--batch", "--signal=USR2", sweep.job)


# --- the time limit


@fault(
    "lifecycle",
    "Time-limit warning",
    injection="SIGUSR2 to the job, twice, as Slurm sends it before the limit, to a run on two nodes",
    outcome="all ranks stop after the same epoch and save; the job is requeued and goes on from there",
)
def test_a_warned_run_goes_on_in_the_next_start_of_its_job(cgroups: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cgroups, tmp_path, (*TWO_NODES, FEW))
    sweep.submit()
    first = sweep.attempt()
    sweep.epochs(first, at_least=2)
    warn(sweep)
    warn(sweep)
    assert sweep.outcome(first)[0] == "timeout"
    run = sweep.done()
    assert len(sweep.jobs) == 1
    assert show(cgroups, sweep.job)["Restarts"] == "1"
    stopped_after, row = len(finished_epochs(first)), sweep.row()
    assert (row["attempt"], row["resumed_after"]) == (2, str(stopped_after))
    epochs = pl.read_parquet(run.result / "epochs.parquet")
    assert epochs["epoch"].to_list() == list(range(1, 401))
    assert epochs["attempt"].to_list() == [1] * stopped_after + [2] * (400 - stopped_after)


@fault(
    "lifecycle",
    "An epoch that is longer than what is left after the warning",
    injection="SIGUSR2 to the job of a run with epochs of 6 s and launcher.signal_delay_s=2",
    outcome="timeout, before Slurm ends the job: it is queued again and goes on from the epoch before",
)
def test_a_warned_run_whose_epoch_does_not_end_goes_on_from_the_one_before(ours: Cluster, tmp_path: Path) -> None:
    long = ("strategy.step_s=3", "epochs=2", "launcher.signal_delay_s=2")
    sweep = Sweep(ours, tmp_path, (*WITHOUT_TORCH, *QUICK, *SAVING, *long))
    sweep.submit()
    first = sweep.attempt()
    sweep.wait(lambda: events(first)["checkpoint"], "a checkpoint")
    warn(sweep)
    assert sweep.outcome(first) == ("timeout", "ended within an epoch, since the time of its job was nearly up")
    row = sweep.row()
    assert (row["attempt"], row["resumed_after"], finished_epochs(first)) == (2, "1", [1])
    info = first.info()
    assert info is not None
    assert info.job_ends_at is not None
    assert 0 < info.job_ends_at - info.launched_at < 60 * 60, "what the job did before is a part of its limit"
    assert (len(sweep.jobs), show(ours, sweep.job)["Restarts"]) == (1, "1")


@fault(
    "lifecycle",
    "The task that has its array's job id is warned",
    injection="SIGUSR2 to the last task of an array that started, whose job id is the array's, while another trains",
    outcome="it alone is queued again and goes on; the other trains on in its first start",
)
def test_the_task_with_the_arrays_id_queues_itself_again_alone(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*PACED, "epochs=400", "repeat=0,1"))
    sweep.submit()

    def tasks() -> dict[str, str]:
        """Name → job id, of those that run."""
        told = ours.run(
            "squeue", "-h", "--array", "--states=R", f"--jobs={sweep.job}", "--format=%F_%K %A", check=False
        )
        return dict(line.split() for line in told.splitlines())

    running = sweep.wait(lambda: found if len(found := tasks()) == 2 else None, "two tasks")
    (last,) = (name for name, job in running.items() if job == sweep.job)
    (other,) = running.keys() - {last}
    sweep.wait(
        lambda: all(run.attempts() and len(finished_epochs(run.attempts()[0])) > 1 for run in sweep.runs), "epochs"
    )
    ours.run("scancel", "--batch", "--signal=USR2", last)
    sweep.wait(lambda: all(run.state().state == "done" for run in sweep.runs), "two results")
    assert [show(ours, task)["Restarts"] for task in (last, other)] == ["1", "0"]
    assert sorted(len(run.attempts()) for run in sweep.runs) == [1, 2]


@fault(
    "lifecycle",
    "Requeue is not allowed",
    injection="scontrol update Requeue=0 before the time-limit warning",
    outcome="the job's log says so; submitting again goes on from the checkpoint",
)
def test_a_warned_run_that_cannot_be_requeued(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, PACED)
    sweep.submit()
    first = sweep.attempt()
    sweep.epochs(first, at_least=2)
    ours.run("scontrol", "update", f"JobId={sweep.job}", "Requeue=0")
    warn(sweep)
    assert sweep.outcome(first)[0] == "timeout"
    sweep.over()
    assert "could not be queued again" in sweep.log()
    sweep.submit()
    assert sweep.row()["resumed_after"] == str(len(finished_epochs(first)))


@fault(
    "lifecycle",
    "Requeueing is off by default",
    injection="the time-limit warning on a cluster with JobRequeue=0",
    outcome="jobs ask for it themselves: the same job starts again, and goes on where it was",
)
@on(job_requeue=False)
def test_jobs_ask_for_requeueing_themselves(special: Cluster, tmp_path: Path) -> None:
    assert show(special, submit(special, "true", "--hold"))["Requeue"] == "0"
    sweep = Sweep(special, tmp_path, PACED)
    sweep.submit()
    first = sweep.attempt()
    sweep.epochs(first, at_least=2)
    warn(sweep)
    assert sweep.outcome(first)[0] == "timeout"
    assert sweep.row()["resumed_after"] == str(len(finished_epochs(first)))
    assert (len(sweep.jobs), show(special, sweep.job)["Restarts"]) == (1, "1")


@fault(
    "lifecycle",
    "A requeue loop",
    injection="the job is requeued as often as it starts, with launcher.attempts=2",
    outcome="the third start trains nothing, and says why; submitting again starts two more at most",
)
def test_starts_are_capped(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*PACED, ENDLESS, "launcher.attempts=2"))
    sweep.submit()
    for number in (1, 2):
        sweep.epochs(sweep.attempt(number), at_least=1)
        ours.run("scontrol", "requeue", sweep.job)
    sweep.over()
    capped = "not started again: it was started 2 times, and launcher.attempts=2"
    assert sweep.log().count(capped) == 1
    assert len(sweep.run.attempts()) == 2
    sweep.submit()
    for number in (3, 4):
        sweep.epochs(sweep.attempt(number), at_least=1)
        ours.run("scontrol", "requeue", sweep.job)
    sweep.over()
    assert sweep.log().count(capped) == 2
    assert (len(sweep.jobs), len(sweep.run.attempts())) == (2, 4)


@fault(
    "lifecycle",
    "Processes that ignore signals",
    injection="two ranks that ignore SIGTERM, one of them stopped by SIGSTOP; the job is cancelled, twice",
    outcome="all end within the grace that Slurm gives a job; killed, so submitting again tries again",
)
def test_stubborn_processes_end(cgroups: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cgroups, tmp_path / "results", (*faulty(tmp_path, "ignores"), *ON_TWO_NODES, ENDLESS))
    sweep.submit()
    attempt = sweep.attempt()
    sweep.epochs(attempt, at_least=1)
    sweep.signal("rank 1", attempt, signal.SIGSTOP)
    cgroups.run("scancel", sweep.job)
    cgroups.run("scancel", sweep.job)
    assert sweep.outcome(attempt) == ("killed", "interrupted by SIGTERM")
    sweep.over()
    assert sweep.run.state().to_run


# --- preemption


def preempt(sweep: Sweep) -> str:
    """Take both nodes away from the sweep for as long as the returned job runs."""
    return submit(sweep.cluster, "sleep 600", *WHOLE)


def preempted_after_a_checkpoint(sweep: Sweep) -> tuple[Attempt, str]:
    """The sweep's first attempt, and the job that takes both nodes away from it."""
    sweep.submit()
    first = sweep.attempt()
    sweep.wait(lambda: events(first)["checkpoint"], "a checkpoint")
    return first, preempt(sweep)


def give_back(sweep: Sweep, urgent: str) -> None:
    """End the job that has the nodes, once it does."""
    wait(sweep.cluster, urgent, JobState="RUNNING")
    sweep.cluster.run("scancel", urgent)


@fault(
    "lifecycle",
    "Preemption",
    injection="a job of higher priority takes both nodes (PreemptMode=REQUEUE)",
    outcome="the ranks end at once; the same job starts again later, goes on from the last checkpoint, and is ok",
)
def test_a_preempted_run_goes_on(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*LONG, *SAVING))
    _, urgent = preempted_after_a_checkpoint(sweep)
    sweep.wait(lambda: sweep.run.state().state != "running", "the end of the first start")
    give_back(sweep, urgent)
    row = sweep.row()
    assert row["attempt"] == 2
    assert int(row["resumed_after"]) > 0
    assert len(sweep.jobs) == 1


@fault(
    "lifecycle",
    "Preemption with a warning",
    injection="the same with SlurmctldParameters=preempt_send_user_signal and a grace time",
    outcome="the ranks stop after their epoch and save; the next start goes on from there",
)
@on(preempt_send_user_signal=True, grace_time_s=60)
def test_a_preempted_run_that_is_warned_loses_nothing(special: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(special, tmp_path, LONG)
    sweep.submit()
    first = sweep.attempt()
    sweep.epochs(first, at_least=2)
    urgent = preempt(sweep)
    assert sweep.outcome(first)[0] == "timeout"
    give_back(sweep, urgent)
    assert sweep.row()["resumed_after"] == str(len(finished_epochs(first)))


@fault(
    "lifecycle",
    "Preemption with a grace time",
    injection="the same with a grace time alone, at whose start Slurm sends SIGTERM: to the tasks (cgroups), or to all",
    outcome="the ranks stop after their epoch and save, and the job queues itself again; the run goes on and is ok",
)
@pytest.mark.parametrize(
    ("special", "run"),
    [
        ({"variant": "cgroup", "grace_time_s": 60}, (*LONG, *SAVING)),
        ({"variant": "no_accounting", "grace_time_s": 60}, (*LONG, *SAVING)),
        ({"variant": "no_accounting", "grace_time_s": 60}, (*BY_TORCHRUN, *SAVING)),
    ],
    indirect=["special"],
)
def test_a_preempted_run_in_its_grace_is_queued_again(special: Cluster, run: tuple[str, ...], tmp_path: Path) -> None:
    sweep = Sweep(special, tmp_path, run)
    first, urgent = preempted_after_a_checkpoint(sweep)
    assert sweep.outcome(first)[0] == "timeout"
    give_back(sweep, urgent)
    row = sweep.row()
    assert (row["attempt"], row["resumed_after"]) == (2, str(len(finished_epochs(first))))
    assert (len(sweep.jobs), show(special, sweep.job)["Restarts"]) == (1, "1")


@fault(
    "lifecycle",
    "An epoch that is longer than the grace",
    injection="the same with a grace time of 10 s, as an epoch of 12 s has begun",
    outcome="timeout, before the grace is over: the job queues itself again, and goes on from the epoch before",
)
@on(variant="cgroup", grace_time_s=10)
def test_a_preempted_run_whose_epoch_does_not_end_is_queued_again(special: Cluster, tmp_path: Path) -> None:
    long = ("strategy.step_s=6", "epochs=2", "site.partition=preemptible")
    sweep = Sweep(special, tmp_path, (*WITHOUT_TORCH, *QUICK, *SAVING, *long))
    first, urgent = preempted_after_a_checkpoint(sweep)
    assert sweep.outcome(first) == ("timeout", "ended within an epoch, since the time of its job was nearly up")
    give_back(sweep, urgent)
    row = sweep.row()
    assert (row["attempt"], row["resumed_after"]) == (2, "1")
    assert (len(sweep.jobs), show(special, sweep.job)["Restarts"]) == (1, "1")


@fault(
    "lifecycle",
    "Preemption that cancels",
    injection="a job of higher priority takes both nodes, with PreemptMode=CANCEL",
    outcome="killed; submitting again finishes the run",
)
@on(preempt_mode="CANCEL")
def test_a_run_that_preemption_cancels_is_submitted_again(special: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(special, tmp_path, LONG)
    sweep.submit()
    sweep.epochs(sweep.attempt(), at_least=1)
    urgent = preempt(sweep)
    sweep.over()
    assert sweep.run.state().label == "killed"
    special.run("scancel", urgent)
    sweep.submit()
    assert times_finished(sweep.done()) == 1
    assert len(sweep.jobs) == 2


# --- nodes


@fault(
    "lifecycle",
    "Node failure",
    injection="the first of two nodes loses its power: slurmd and all that its jobs run are killed",
    outcome="the same job starts again on what is there; one valid result",
)
def test_a_run_survives_its_node(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, FEW))
    sweep.submit()
    sweep.epochs(sweep.attempt(), at_least=1)
    ours.crash_node("n1", noticed=True)
    ours.start("n1")
    run = sweep.done()
    assert times_finished(run) == 1
    assert len(sweep.jobs) == 1
    assert int(show(ours, sweep.job)["Restarts"]) >= 1


@fault(
    "lifecycle",
    "Failure of another node than the first",
    injection="the second of two nodes loses its power; srun, on the first, notices before Slurm does",
    outcome="the job fails at once; killed, so submitting again finishes the run",
)
def test_a_run_without_its_second_node_is_submitted_again(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*TWO_NODES, FEW))
    sweep.submit()
    sweep.epochs(sweep.attempt(), at_least=1)
    ours.crash_node("n2")
    ours.start("n2")
    while sweep.settle(at_least=1) < 1:
        assert sweep.run.state().label == "killed"
        sweep.submit()
    assert times_finished(sweep.run) == 1


@fault(
    "lifecycle",
    "A zombie of an attempt",
    injection="all processes of a run are stopped, and Slurm loses their node; once the run has its result from the "
    "other node, they go on and train to the end",
    outcome="the zombie may not publish: the result stays as it was, to the byte",
)
def test_a_zombie_publishes_nothing(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, PACED)
    sweep.submit()
    zombie = sweep.attempt()
    sweep.epochs(zombie, at_least=1)
    with _lost_by_slurm(sweep, zombie) as (supervisor, rank):
        run = sweep.done()
        assert run.state().attempt == 2
        before = {path.name: file_sha256(path) for path in run.result.iterdir()}
        rank.resume()
        sweep.wait(lambda: events(zombie)["finished"], "the zombie's end of training")
        supervisor.resume()
        outcome, reason = sweep.outcome(zombie)
    assert (outcome, reason) == ("killed", "a newer attempt took over")
    assert {path.name: file_sha256(path) for path in run.result.iterdir()} == before


class _lost_by_slurm:  # noqa: N801
    """The supervisor and the rank of an attempt, stopped, while Slurm takes them for dead with their node."""

    def __init__(self, sweep: Sweep, attempt: Attempt) -> None:
        self._cluster = sweep.cluster
        self._node = show(sweep.cluster, sweep.job)["NodeList"]
        self._processes = [psutil.Process(sweep.pid_of(name, attempt)) for name in ("supervisor", "rank 0")]
        # They would pass on what the controller wants; without them the others would be told to hang up.
        self._slurm = [p for p in self._processes[0].parents() if p.name() == "slurmstepd"]
        self._slurm += [
            p for p in psutil.process_iter(["name"]) if p.info["name"] == "srun" and _job_of(p) == sweep.job
        ]

    def __enter__(self) -> tuple[psutil.Process, psutil.Process]:
        for process in (*self._processes, *self._slurm):
            process.suspend()
        self._cluster.kill(self._node)
        self._cluster.run("scontrol", "update", f"NodeName={self._node}", "State=DOWN", "Reason=lost")
        supervisor, rank = self._processes
        return supervisor, rank

    def __exit__(self, *_: object) -> None:
        self._cluster.crash_node(self._node)
        self._cluster.start(self._node)
        self._cluster.run("scontrol", "update", f"NodeName={self._node}", "State=RESUME", check=False)


def _job_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        return str(process.environ().get("SLURM_JOB_ID"))
    return None


# --- what Slurm says, and what is true


@fault(
    "lifecycle",
    "COMPLETED, but failed",
    injection="a table of the result is damaged after its job has ended well",
    outcome="the folder counts: submitting again publishes once more from the journals, without training",
)
def test_a_completed_job_may_have_failed(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*PACED, "epochs=2"))
    sweep.submit()
    run = sweep.done()
    sweep.over()
    wait(ours, sweep.job, JobState="COMPLETED")
    (run.result / "epochs.parquet").write_bytes(b"nothing")
    assert run.state().label == "storage"
    sweep.submit()
    sweep.done()
    assert (len(sweep.jobs), len(run.attempts()), times_finished(run)) == (2, 1, 1)


@fault(
    "lifecycle",
    "CANCELLED, but valid",
    injection="scancel once all ranks have trained to their end, but the supervisor has not seen it yet",
    outcome="the result is published; status says ok, and submitting again starts nothing",
)
def test_a_cancelled_job_may_be_valid(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*QUICK, "epochs=1000"))
    sweep.submit()
    attempt = sweep.attempt()
    sweep.epochs(attempt, at_least=1)
    sweep.signal("supervisor", attempt, signal.SIGSTOP)
    sweep.wait(lambda: events(attempt)["finished"], "the end of training")
    ours.run("scancel", sweep.job)
    sweep.done()
    sweep.over()
    wait(ours, sweep.job, JobState="CANCELLED")
    assert "0 runs to submit" in sweep.submit()


@fault(
    "lifecycle",
    "scancel during publication",
    injection="scancel, or SIGKILL to the supervisor, while the tables are being written",
    outcome="a valid result, or none; submitting again publishes from the journals, without training",
)
@pytest.mark.parametrize("how", ["scancel", "SIGKILL"])
def test_a_result_is_whole_or_not_there(how: str, ours: Cluster, tmp_path: Path) -> None:
    supervisor = None
    while supervisor is None:
        sweep = Sweep(ours, Path(tempfile.mkdtemp(dir=tmp_path)), PACED)
        supervisor = _stop_in_publication(sweep)
    run = sweep.run
    if how == "scancel":  # stopped until Slurm, which also sends SIGCONT, has the order to end it
        ours.run("scancel", sweep.job)
        until(lambda: not sweep.queued() or "COMPLETING" in sweep.queued(), what="the order", timeout_s=60)
        with suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGCONT)
    else:
        os.kill(supervisor, signal.SIGKILL)
    sweep.over()
    assert (run.published() is not None) == run.result.exists()
    sweep.submit()
    sweep.done()
    assert (len(run.attempts()), times_finished(run)) == (1, 1)


def _stop_in_publication(sweep: Sweep) -> int | None:
    """Submit a run, and stop its supervisor, which is returned, while it writes the tables.

    None: that took only a moment, which this process has missed.
    """
    sweep.submit()
    attempt = sweep.attempt()
    supervisor, run = psutil.Process(sweep.pid_of("supervisor", attempt)), sweep.run
    sweep.epochs(attempt, at_least=1)

    def publishes() -> bool:
        return run.result.exists() or any(run.path.glob(".result.*.tmp"))

    sweep.wait(publishes, "the publication", interval_s=0.002)
    with suppress(psutil.NoSuchProcess):
        supervisor.suspend()
        sweep.wait(lambda: supervisor.status() == psutil.STATUS_STOPPED, "the supervisor's stop")
        if not run.result.exists():
            return supervisor.pid
        supervisor.resume()
    sweep.over()
    return None
