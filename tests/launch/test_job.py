"""What a Slurm job does at its start and after a warning, without Slurm: nothing trains here."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.attempt.processes import Spawned, Training, WarmWorkers
from launch.attempt.signals import heed
from launch.attempt.supervisor import Interrupted, stoppable
from launch.slurm import job, record, scheduler
from launch.slurm.sbatch import slurm
from launch.slurm.step import STEP_TERMINATED
from launch.sweep import one_run
from parallelbench.results.attempt import Attempt, Outcome
from parallelbench.results.folder import RunFolder
from tests.helpers import TINY
from tests.launch.fake_slurm import submission


@dataclass
class Warned:
    """In the place of training: warns its job in a run of the number given, and stops after an epoch."""

    number: int
    saves: bool
    begun: int = 0

    def train(self, training: Training, _: Any) -> Outcome:
        """As `launch.slurm.job.train`."""
        self.begun += 1
        if self.begun < self.number:
            return Outcome(outcome="error", reason="on purpose", finished_at=time.time())
        os.kill(os.getpid(), signal.SIGUSR2)
        if self.saves:
            leave_checkpoint(training.folder)
        return Outcome(outcome="timeout", reason="stopped after epoch 1", finished_at=time.time())


@dataclass
class Endless:
    """In the place of a run's processes: one in the midst of an epoch that does not end, whose job is warned."""

    saves: bool

    def start(self, training: Training, _: Any) -> Spawned:
        """As `WarmWorkers.start`."""
        if self.saves:
            leave_checkpoint(training.folder)
        os.kill(os.getpid(), signal.SIGUSR2)
        return Spawned(["sleep", "20"], os.environ)


def leave_checkpoint(folder: RunFolder) -> None:
    manifest = folder.path / "checkpoints" / "attempt-1-epoch-1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()


@pytest.fixture(autouse=True)
def in_job(told: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")


def submitted(tmp_path: Path, *overrides: str, runs: int = 1) -> tuple[Path, list[RunFolder]]:
    """The record of one job that works through so many runs."""
    plan = [
        one_run([*TINY, "launcher=slurm", "site=local_cluster", f"results={tmp_path}", f"repeat={number}", *overrides])
        for number in range(runs)
    ]
    folders = [RunFolder.of(planned.run) for planned in plan]
    for planned, folder in zip(plan, folders, strict=True):
        folder.write_intent(planned.run, [])
    run = plan[0].run
    tasks = [[folder.path.name for folder in folders]]
    mine = submission(job="17", tasks=tasks, launcher=slurm(run), site=run.site, umask=record.readable_by_others())
    return record.write(run.sweep_folder, mine), folders


def test_results_follow_the_users_umask_and_what_jobs_execute_does_not(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(training: Training, _: Any) -> Outcome:
        (training.folder.path / "written").touch()
        return Outcome(outcome="ok", reason="", finished_at=time.time())

    monkeypatch.setattr(job, "train", train)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800000000")
    before = os.umask(0o002)
    try:
        path, (folder,) = submitted(tmp_path)
        os.umask(0o077)  # as the batch script does
        job.run_task(str(path))
        (path.parent / "left by the job").touch()
    finally:
        os.umask(before)
    assert (folder.path / "written").stat().st_mode & 0o777 == 0o644, "readable by others, writable by none"
    assert (path.parent / "left by the job").stat().st_mode & 0o777 == 0o600
    info = folder.attempts()[0].info()
    assert info is not None
    assert info.job_ends_at == 1.8e9, "the end of its job"


@pytest.mark.parametrize("runs", [1, 3])
def test_a_job_starts_no_more_often_than_it_may(
    tmp_path: Path,
    told: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: int,
) -> None:
    path, folders = submitted(tmp_path, "launcher.attempts=2", runs=runs)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with pytest.raises(SystemExit) as ended:
        job.run_task(str(path))
    assert ended.value.code == 1
    assert "not started again: it was started 2 times, and launcher.attempts=2" in capsys.readouterr().out
    assert (told, [folder.attempts() for folder in folders]) == ([], [[]] * runs)


def test_a_task_of_an_array_is_queued_again_by_its_own_name(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last task to start has the array's job id, by which Slurm would queue all of its tasks again."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    path, _ = submitted(tmp_path, runs=1)
    monkeypatch.setattr(job, "train", Warned(1, True).train)
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    assert told == [["scontrol", "requeue", "17_0"]]


@pytest.mark.parametrize(
    ("overrides", "runs", "number", "saves", "requeued"),
    [
        ([], 1, 1, True, True),
        ([], 1, 1, False, False),
        (["launcher.checkpoint=never"], 1, 1, True, False),  # what an earlier launcher saved is not used
        (["launcher.checkpoint=never"], 2, 2, False, True),  # the next start has more time for it
        (["launcher.checkpoint=never"], 2, 1, False, True),  # the second was not begun
        (["launcher.attempts=1"], 1, 1, True, False),
    ],
)
def test_a_warned_job_is_queued_again_only_where_another_start_gets_further(
    tmp_path: Path,
    told: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    runs: int,
    number: int,
    saves: bool,
    requeued: bool,
) -> None:
    path, folders = submitted(tmp_path, *overrides, runs=runs)
    training = Warned(number, saves)
    monkeypatch.setattr(job, "train", training.train)
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    assert told == ([["scontrol", "requeue", "17"]] if requeued else [])
    begun: list[list[Attempt]] = [folder.attempts() for folder in folders]
    assert [len(attempts) for attempts in begun] == [1] * number + [0] * (runs - number)


@pytest.mark.parametrize(("runs", "saves", "requeued"), [(1, True, True), (1, False, False), (2, False, True)])
def test_an_epoch_that_does_not_end_before_the_limit_costs_only_itself(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch, runs: int, saves: bool, requeued: bool
) -> None:
    path, (first, *others) = submitted(tmp_path, "launcher.signal_delay_s=1", runs=runs)
    endless = Endless(saves)
    monkeypatch.setattr(WarmWorkers, "start", lambda _, *given: endless.start(*given))
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    outcome = first.attempts()[0].outcome()
    assert outcome is not None
    reason = "ended within an epoch, since the time of its job was nearly up"
    assert (outcome.outcome, outcome.reason) == ("timeout", reason)
    assert [folder.attempts() for folder in others] == [[]] * (runs - 1)
    assert told == ([["scontrol", "requeue", "17"]] if requeued else [])


def test_what_an_earlier_start_has_not_finished_comes_after_what_it_has_not_begun(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folders = submitted(tmp_path, runs=3)
    monkeypatch.setattr(job, "train", Warned(1, True).train)
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    begun: list[str] = []

    def train(training: Training, _: Any) -> Outcome:
        begun.append(training.folder.path.name)
        return training.attempt.finish("ok", "trained")

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(job, "train", train)
    job.run_task(str(path))
    first, second, third = (folder.path.name for folder in folders)
    assert begun == [second, third, first]


# --- signals


RUNNING = "JobId=17 JobState=RUNNING EndTime=2030-01-01T00:00:00 PreemptTime="


@pytest.mark.parametrize(
    ("answer", "asked_to_stop", "preempted"),
    [
        (f"{RUNNING}2029-12-31T23:59:00", True, True),
        (f"{RUNNING}None", False, False),  # srun ends a step whose task has failed
        ("JobId=17 JobState=CANCELLED PreemptTime=None", False, False),
        (scheduler.SchedulerError("busy"), True, False),  # to be on the safe side
    ],
)
def test_what_a_step_was_told_stops_a_run_only_where_slurm_takes_the_nodes(
    answer: str | Exception, asked_to_stop: bool, preempted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (folder,) = submitted(tmp_path)
    attempt = folder.claim(job="17.0")
    assert attempt is not None

    def ask(*_: object, **__: object) -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(scheduler, "ask", ask)
    monkeypatch.setattr(job, "ANSWER_S", 0.05)
    monkeypatch.setattr(job, "_PAUSE_S", 0.01)
    mine = job.Job(record.read(path))
    with stoppable(), job.handling_signals(mine), mine.leads(attempt):
        os.kill(os.getpid(), STEP_TERMINATED)
        heed()
    assert (attempt.stop_requested(), mine.preempted) == (asked_to_stop, preempted)


def test_a_cancelled_job_interrupts_its_run_and_a_preempted_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = submitted(tmp_path)
    for state, interrupted in ((f"{RUNNING}2029-12-31T23:59:00", False), (f"{RUNNING}None", True)):
        monkeypatch.setattr(scheduler, "ask", lambda *_, state=state, **__: state)
        mine = job.Job(record.read(path))
        with stoppable(), job.handling_signals(mine):
            os.kill(os.getpid(), signal.SIGTERM)
            if interrupted:
                with pytest.raises(Interrupted):
                    heed()
            else:
                heed()
        assert mine.preempted is not interrupted


def test_a_run_on_nodes_that_can_not_reach_each_other_says_what_to_set(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ("strategy=ddp", "devices=2", "nodes=2", "site.network_interface=nowhere0")
    monkeypatch.setattr("launch.attempt.supervisor.require_interface", lambda *_: None)
    path, (folder,) = submitted(tmp_path, *two)
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    outcome = folder.attempts()[0].outcome()
    assert outcome is not None
    assert outcome.outcome == "error"
    assert outcome.reason.startswith("the nodes can't meet: site.network_interface=nowhere0 has no address on ")
