"""What a Slurm job does at its start and after a warning, without Slurm: nothing trains here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from launch.attempt import processes
from launch.attempt.outcome import interrupted
from launch.attempt.processes import Rendezvous, Training, WarmWorkers
from launch.attempt.signals import heed
from launch.slurm import job, record, rendezvous
from launch.slurm.sbatch import slurm
from launch.sweep import one_run
from parallelbench.errors import ConfigError
from parallelbench.frameworks.control_group import host_group, join_group
from parallelbench.results.attempt import Attempt, Outcome
from parallelbench.results.folder import RunFolder
from parallelbench.training.failure import record as record_error
from tests.faults import fault
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


@pytest.fixture
def waiting() -> Iterator[list[socket.socket]]:
    """The sockets on which a node 0 waits for the other in a thread; closed at the end, which ends the thread."""
    listening: list[socket.socket] = []
    yield listening
    for each in listening:
        each.close()


def on_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, node: int
) -> tuple[Path, RunFolder, str]:
    """The record of a job, its run, and its start, seen by one of its nodes."""
    two = ("strategy=ddp", "devices=2", "nodes=2", "site.network_interface=lo")
    path, (folder,) = submitted(tmp_path, *two, *overrides)
    monkeypatch.setenv("SLURM_NODEID", str(node))
    monkeypatch.setenv("SLURM_NTASKS", "2")
    return path, folder, f"{record.read(path).token}.17.0"


def on_node_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: list[socket.socket], *, comes: bool = True
) -> tuple[Path, Attempt]:
    """The record of a job, and the attempt that node 0 has begun; it waits for node 1 unless it never `comes`."""
    path, folder, start = on_two_nodes(tmp_path, monkeypatch, node=1)
    attempt = folder.claim(job=start)
    assert attempt is not None
    attempt.describe(processes=2, device_type="cpu", oversubscribed=False)
    waiting.append(socket.create_server(("127.0.0.1", 0)))
    offer = rendezvous.Offer(start=start, host="127.0.0.1", port=waiting[0].getsockname()[1], secret="known")
    (attempt.path / "rendezvous.json").write_bytes(msgspec.json.encode(offer))

    def meet() -> None:
        with suppress(OSError):  # no test waits for one that is left alone
            offer.agreed(host_group(waiting[0], 2, secret="known", timeout_s=60), "lo")

    if comes:
        threading.Thread(target=meet, daemon=True).start()
    return path, attempt


def followed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waiting: list[socket.socket],
    command: str,
    *,
    signals: bool = False,
) -> Head:
    """What node 1 has seen of the head when it has done its share of a run."""
    path, attempt = on_node_1(tmp_path, monkeypatch, waiting)
    head = Head(attempt, command, signals)
    monkeypatch.setattr(processes, "start", head.start)
    monkeypatch.setattr(job, "time", SimpleNamespace(sleep=head.goes_on, monotonic=time.monotonic, time=time.time))
    job.run_task(str(path))
    return head


@fault(
    "workers",
    "A node sees the head's files late",
    injection="the other of two nodes comes only while the head waits, as where a file server's caches hide new files",
    outcome="no rank starts before both are there: the wait is no part of the start-up",
)
def test_no_rank_starts_before_all_nodes_have_met(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder, start = on_two_nodes(tmp_path, monkeypatch, node=0)
    happened: list[str] = []
    late = threading.Event()
    met: list[Rendezvous] = []

    def start_ranks(_: WarmWorkers, training: Training, __: object) -> subprocess.Popen[bytes]:
        happened.append("ranks")
        assert training.rendezvous is not None
        met.append(training.rendezvous)
        late.set()
        return subprocess.Popen(["true"], start_new_session=True)

    def come() -> None:
        assert late.wait(60)
        happened.append("node 1")
        found = rendezvous.join(folder, start, node=1, nodes=2, interface="lo")
        assert found is not None
        met.append(found[1])

    monkeypatch.setattr(WarmWorkers, "start", start_ranks)
    monkeypatch.setattr(rendezvous, "heed", late.set)  # the head calls it while it waits
    node_1 = threading.Thread(target=come)
    node_1.start()
    with pytest.raises(SystemExit):
        job.run_task(str(path))  # these ranks train nothing
    node_1.join()
    assert happened == ["node 1", "ranks"]
    assert sorted((each.node, each.nodes, each.host, each.port, each.id) for each in met) == [
        (node, 2, "127.0.0.1", met[0].port, start) for node in (0, 1)
    ]


def nothing_comes(_: RunFolder) -> None:
    pass


def node_1_fails(folder: RunFolder) -> None:
    record_error(folder.attempts()[0], 1, ConfigError("no cable"), where="on node 1: ")


def interrupt(_: RunFolder) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def warn(_: RunFolder) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize(
    ("comes", "patience_s", "outcome", "reason", "requeued"),
    [
        (nothing_comes, 0, "killed", "not all nodes have met: node 1 did not join within 0 s", False),
        (node_1_fails, 0, "error", "rank 1: on node 1: no cable", False),
        (interrupt, 60, "killed", "interrupted by SIGTERM", False),
        (warn, 60, "timeout", "not all nodes had met when the time of the job was nearly up", True),
    ],
)
def test_a_head_that_is_left_alone_says_so(
    comes: Callable[[RunFolder], None],
    patience_s: float,
    outcome: str,
    reason: str,
    requeued: bool,
    tmp_path: Path,
    told: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, folder, _ = on_two_nodes(tmp_path, monkeypatch, "launcher.signal_delay_s=1", node=0)
    leave_checkpoint(folder)
    monkeypatch.setattr(rendezvous, "PATIENCE_S", patience_s)

    def look() -> None:
        comes(folder)
        heed()

    monkeypatch.setattr(rendezvous, "heed", look)
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    found = folder.attempts()[0].outcome()
    assert found is not None
    assert (found.outcome, found.reason) == (outcome, reason)
    assert told == ([["scontrol", "requeue", "17"]] if requeued else [])


@pytest.mark.parametrize("ends", ["unreached", "silent", "hangs up"])
def test_a_node_whose_head_has_ended_starts_nothing(
    ends: str,
    tmp_path: Path,
    told: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    waiting: list[socket.socket],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, attempt = on_node_1(tmp_path, monkeypatch, waiting, comes=False)
    connected = threading.Event()

    def answer() -> None:
        connection, _ = waiting[0].accept()
        if ends == "hangs up":
            connection.close()
        connected.set()

    if ends == "unreached":
        waiting[0].close()
        connected.set()
    else:
        threading.Thread(target=answer, daemon=True).start()

    def look() -> None:
        if connected.is_set():
            attempt.finish("killed", "not all nodes have met")
        heed()

    monkeypatch.setattr(rendezvous, "heed", look)
    job.run_task(str(path))
    assert "node 0 has ended it" in capsys.readouterr().out


def test_a_node_that_has_reached_the_head_still_heeds_signals(
    tmp_path: Path,
    told: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    waiting: list[socket.socket],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = on_node_1(tmp_path, monkeypatch, waiting, comes=False)

    def interrupt_it() -> None:
        waiting.append(connection := waiting[0].accept()[0])
        connection.sendall(bytes(32))  # the challenge
        connection.recv(1)  # its answer
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt_it, daemon=True).start()
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    assert "interrupted by SIGTERM" in capsys.readouterr().out


def makes_no_offer(attempt: Attempt, *_: object) -> None:
    (attempt.path / "rendezvous.json").unlink()


def can_not_be_reached(_: Attempt, waiting: list[socket.socket], __: object) -> None:
    waiting[0].close()


def is_silent(*_: object) -> None:
    """The kernel accepts for it."""


def is_a_stranger(_: Attempt, waiting: list[socket.socket], __: object) -> None:
    threading.Thread(target=lambda: waiting[0].accept()[0].sendall(bytes(64)), daemon=True).start()


def hangs_up(_: Attempt, waiting: list[socket.socket], __: object) -> None:
    threading.Thread(target=lambda: waiting[0].accept()[0].close(), daemon=True).start()


def stops_after_it_began(_: Attempt, waiting: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = join_group

    def let_begin() -> None:
        waiting.extend(host_group(waiting[0], 2, secret="known", timeout_s=60)._connections)

    monkeypatch.setattr(rendezvous, "join_group", lambda *each, **named: genuine(*each, **named | {"timeout_s": 0.01}))
    threading.Thread(target=let_begin, daemon=True).start()


SET = r": node 0 has died, or other nodes can't reach it there \(if so, set site\.network_interface"
NOT_MET = {
    makes_no_offer: ("storage", "/.* showed no address of node 0 within 0 s: do all nodes see that folder"),
    can_not_be_reached: ("error", rf"node 0 did not listen at 127\.0\.0\.1:\d+ within 0 s{SET}"),
    is_silent: ("error", rf"node 0 at 127\.0\.0\.1:\d+ did not begin within 0 s{SET}"),
    is_a_stranger: ("error", rf"who listens at 127\.0\.0\.1:\d+ is not node 0 of this attempt{SET}"),
    hangs_up: ("error", rf"127\.0\.0\.1:\d+ has hung up{SET}"),
    stops_after_it_began: ("error", rf"node 0 did not arrive within 0\.01 s{SET}"),
}


@pytest.mark.parametrize("head", NOT_MET)
def test_a_head_that_is_not_met_is_an_error_that_says_what_to_look_at(
    head: Callable[[Attempt, list[socket.socket], pytest.MonkeyPatch], None],
    tmp_path: Path,
    told: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    waiting: list[socket.socket],
) -> None:
    path, attempt = on_node_1(tmp_path, monkeypatch, waiting, comes=False)
    monkeypatch.setattr(rendezvous, "_REACH_S", 60.0 if head is is_a_stranger else 0.0)
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.0 if head in (makes_no_offer, is_silent) else 60.0)
    head(attempt, waiting, monkeypatch)
    with pytest.raises(SystemExit):
        job.run_task(str(path))
    outcome, said = NOT_MET[head]
    name, reason = interrupted(attempt, 2, "interrupted by SIGTERM")
    assert name == outcome
    assert re.match(f"rank 1: on node 1: {said}", reason), reason


def test_a_node_that_has_done_its_part_waits_for_the_head(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch, waiting: list[socket.socket]
) -> None:
    """Else srun would end the head a minute later, which may have more to do."""
    assert followed(tmp_path, monkeypatch, waiting, "exit 0").looks == 5


def test_a_node_whose_part_has_failed_does_not_wait(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch, waiting: list[socket.socket]
) -> None:
    assert followed(tmp_path, monkeypatch, waiting, "exit 3").looks == 0


def test_a_node_leaves_what_a_sigterm_means_to_the_head(
    tmp_path: Path, told: list[list[str]], monkeypatch: pytest.MonkeyPatch, waiting: list[socket.socket]
) -> None:
    """At a preemption, the head may yet save; whether it is one, Slurm may not tell all nodes."""
    head = followed(tmp_path, monkeypatch, waiting, "exec sleep 20", signals=True)
    assert head.looks == 5
    assert head.process is not None
    assert head.process.returncode == -signal.SIGKILL


def no_log(attempt: Attempt, _: pytest.MonkeyPatch) -> None:
    (attempt.path / "log-node1.txt").symlink_to("/nowhere/log")


def no_interpreter(_: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


def another_version(_: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "slug", lambda run: "another")


def ended_by_a_plugin(_: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "launched", lambda *_: sys.exit("no licence"))


@pytest.mark.parametrize(
    ("break_it", "outcome", "said"),
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
    waiting: list[socket.socket],
    break_it: Callable[[Attempt, pytest.MonkeyPatch], None],
    outcome: str,
    said: str,
) -> None:
    path, attempt = on_node_1(tmp_path, monkeypatch, waiting)
    break_it(attempt, monkeypatch)
    with pytest.raises((SystemExit, OSError)):
        job.run_task(str(path))
    name, reason = interrupted(attempt, 2, "interrupted by SIGTERM")  # by srun, as one of its tasks has failed
    assert name == outcome
    assert re.match(f"rank 1: on node 1: .*{said}", reason), reason
