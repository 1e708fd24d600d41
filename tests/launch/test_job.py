"""What a Slurm job does at its start and after a warning, without Slurm: nothing trains here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from launch.attempt import processes
from launch.attempt.outcome import interrupted
from launch.attempt.processes import Training, WarmWorkers
from launch.slurm import job, record, rendezvous
from launch.slurm.sbatch import slurm
from launch.sweep import one_run
from parallelbench.results.attempt import Attempt, Outcome
from parallelbench.results.folder import RunFolder
from tests.helpers import TINY
from tests.launch.fake_slurm import submission

if TYPE_CHECKING:
    from collections.abc import Callable


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

    def start(self, training: Training, _: Any) -> subprocess.Popen[bytes]:
        """As `WarmWorkers.start`."""
        if self.saves:
            leave_checkpoint(training.folder)
        os.kill(os.getpid(), signal.SIGUSR2)
        return subprocess.Popen(["sleep", "20"], start_new_session=True)


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


# --- another node than the first


@dataclass
class Head:
    """Node 0 of two, which ends its attempt a while after the processes of node 1, this shell command, have begun."""

    attempt: Attempt
    command: str
    signals: bool
    looks: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, *_: object) -> subprocess.Popen[bytes]:
        """As `processes.start`."""
        self.process = subprocess.Popen(self.command, shell=True, start_new_session=True)
        if self.signals:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.command.startswith("exit"):
            self.process.wait()
        return self.process

    def goes_on(self, _: float) -> None:
        """In the place of `time.sleep` between two looks of node 1."""
        self.looks += 1
        if self.looks == 5:
            self.attempt.finish("timeout", "stopped after epoch 1")


def on_node_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Attempt]:
    """The record of a job on two nodes, and the attempt that node 0 has begun."""
    path, (folder,) = submitted(tmp_path, "strategy=ddp", "devices=2", "nodes=2")
    start = f"{record.read(path).token}.17.0"
    attempt = folder.claim(job=start)
    assert attempt is not None
    attempt.describe(processes=2, device_type="cpu", oversubscribed=False)
    rendezvous.offer(attempt.path, start, nodes=2, interface="lo")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    return path, attempt


def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, *, signals: bool = False) -> Head:
    """What node 1 has seen of the head when it has done its share of a run."""
    path, attempt = on_node_1(tmp_path, monkeypatch)
    head = Head(attempt, command, signals)
    monkeypatch.setattr(processes, "start", head.start)
    monkeypatch.setattr(job, "time", SimpleNamespace(sleep=head.goes_on, monotonic=time.monotonic, time=time.time))
    job.run_task(str(path))
    return head


def test_a_node_that_has_done_its_part_waits_for_the_head(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else srun would end the head a minute later, which may have more to do."""
    assert followed(tmp_path, monkeypatch, "exit 0").looks == 5


def test_a_node_whose_part_has_failed_does_not_wait(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert followed(tmp_path, monkeypatch, "exit 3").looks == 0


def test_a_node_leaves_what_a_sigterm_means_to_the_head(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a preemption, the head may yet save; whether it is one, Slurm may not tell all nodes."""
    head = followed(tmp_path, monkeypatch, "exec sleep 20", signals=True)
    assert head.looks == 5
    assert head.process is not None
    assert head.process.returncode == -signal.SIGTERM


def no_log(attempt: Attempt, _: pytest.MonkeyPatch) -> None:
    (attempt.path / "log-node1.txt").symlink_to("/nowhere/log")


def no_interpreter(_: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


def another_version(_: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "slug", lambda run: "another")


def ended_by_a_plugin(_: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "launched", lambda *_: sys.exit("no licence"))


@pytest.mark.parametrize(
    ("fault", "outcome", "said"),
    [
        (no_log, "storage", "can't write .*/log-node1.txt: No such file or directory"),
        (no_interpreter, "error", "No such file or directory: '/nowhere/python'"),
        (another_version, "error", "was submitted by another version of parallelbench"),
        (ended_by_a_plugin, "error", "no licence"),
    ],
)
def test_what_fails_on_another_node_is_why_its_attempt_ends(
    tmp_path: Path,
    told: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Attempt, pytest.MonkeyPatch], None],
    outcome: str,
    said: str,
) -> None:
    path, attempt = on_node_1(tmp_path, monkeypatch)
    fault(attempt, monkeypatch)
    with pytest.raises((SystemExit, OSError)):
        job.run_task(str(path))
    name, reason = interrupted(attempt, 2, "SIGTERM")  # by srun, as one of its tasks has failed
    assert name == outcome
    assert re.match(f"rank 1: on node 1: .*{said}", reason), reason
