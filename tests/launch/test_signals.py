"""Signals that come at the worst moment: within `subprocess`, while it holds its lock."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch import local
from launch.attempt import supervisor
from launch.attempt.processes import Here, Spawned, Training, _Parent, before_the_program
from launch.attempt.signals import heed, rest
from launch.attempt.supervisor import Interrupted, carry_out, stoppable, supervise
from launch.launcher import SubmitOptions
from launch.sweep import expand, one_run
from parallelbench.results.folder import RunFolder
from tests.faults import fault
from tests.helpers import TINY


class SignallingLock:
    """A lock that gets this process another Ctrl-C each time that it is taken, and does not wait for itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        taken = self._lock.acquire(blocking=False)
        assert taken or not blocking, "whoever holds this lock waits for it"
        os.kill(os.getpid(), signal.SIGINT)
        return taken

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@fault(
    "lifecycle",
    "A second Ctrl-C right after the first",
    injection="SIGINT each time that subprocess takes the lock with which it waits for a process",
    outcome="killed, recorded in order: handlers only note signals",
)
def test_each_interruption_finds_the_supervisor_able_to_end_its_run(tmp_path: Path) -> None:
    run = one_run([*TINY, f"results={tmp_path}"]).run
    folder, started = RunFolder.of(run), list[Spawned]()

    def begin(training: Training, log: Any) -> Spawned:
        process = Spawned(["sleep", "3600"], os.environ)
        process._waitpid_lock = SignallingLock()  # type: ignore[attr-defined]
        started.append(process)
        return process

    def train(training: Training) -> Any:
        return supervise(training, begin=begin)

    folder.write_intent(run, [])
    with pytest.raises(Interrupted, match="SIGINT"), stoppable():
        carry_out(folder, run, device_type="cpu", skip=lambda *_: "", train=train)
    assert folder.state().label == "killed"
    assert started[0].returncode == -signal.SIGTERM


class Cat(subprocess.Popen[bytes]):
    """In the place of a run's processes: ends once its input does."""

    end = Spawned.end

    def __init__(self) -> None:
        super().__init__(["cat"], stdin=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(None, "the process ended without a record (exit code 0)"), (signal.SIGTERM, "interrupted by SIGTERM")],
)
def test_a_supervisor_wakes_when_its_processes_end_and_at_signals(
    number: signal.Signals | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at the journal, which never come here."""
    run = one_run([*TINY, f"results={tmp_path}", "launcher.timeout_s=60"]).run
    folder, started = RunFolder.of(run), list[Cat]()

    def begin(training: Training, log: Any) -> Cat:
        started.append(Cat())
        return started[0]

    def happens_just_before(timeout_s: float | None, *files: Any) -> None:
        (stdin := started[0].stdin) and stdin.close() if number is None else os.kill(os.getpid(), number)
        rest(timeout_s, *files)

    def train(training: Training) -> Any:
        return supervise(training, begin=begin)

    monkeypatch.setattr(supervisor, "_READ_S", 3600.0)
    monkeypatch.setattr(supervisor, "rest", happens_just_before)
    folder.write_intent(run, [])
    with suppress(Interrupted), stoppable():
        carry_out(folder, run, device_type="cpu", skip=lambda *_: "", train=train)
    outcome = folder.state().outcome
    assert outcome is not None
    assert outcome.reason == reason


def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[signal.Signals], *words: str) -> Any:
    """What became of one local run whose supervisor heeds these signals one by one, and then ends as usual."""
    requests = list[bool]()

    def supervise(training: Training, **_: Any) -> Any:
        try:
            for number in signals:
                os.kill(os.getpid(), number)
                heed()
                requests.append(training.attempt.stop_requested())
        except Interrupted as interruption:
            training.attempt.finish("killed", str(interruption))
            raise
        return training.attempt.finish("timeout", "stopped")

    monkeypatch.setattr(local, "supervise", supervise)
    launcher = local.OnThisMachine()
    plan = expand([*TINY, f"results={tmp_path}", "sweep.repeats=2", *words])
    code = launcher.submit([launcher.prepare(each) for each in plan], SubmitOptions(), Console(file=io.StringIO()))
    first, second = (RunFolder.of(each.run).state().label for each in plan)
    return code, requests, first, second


TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize(
    ("signals", "words", "requests", "first"),
    [
        ([], [], [], "timeout"),
        ([TERM], [], [True], "timeout"),
        ([HUP], ["launcher.checkpoint=always"], [True], "timeout"),
        ([TERM, TERM], [], [True], "killed"),
        ([TERM, INT], [], [True], "killed"),
        ([INT], ["launcher.checkpoint=always"], [], "killed"),
        ([TERM], ["launcher.checkpoint=never"], [], "killed"),
    ],
)
def test_a_first_signal_asks_a_run_that_saves_to_stop_and_a_second_one_ends_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signals: list[signal.Signals],
    words: list[str],
    requests: list[bool],
    first: str,
) -> None:
    found = submitted(tmp_path, monkeypatch, signals, *words)
    assert found == (130 if signals else 1, requests if signals else [], first, "missing" if signals else "timeout")


def test_a_warm_process_that_still_imports_keeps_nobody_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 3600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started: list[Spawned] = []

    class Noted(Here):
        def spawn(self, *arguments: Any) -> Spawned:
            started.append(super().spawn(*arguments))
            return started[0]

    training: Any = SimpleNamespace(run=SimpleNamespace(repeat=0))
    with stoppable():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            _Parent(Noted(), training, {}, key=0)
    assert started[0].poll() is not None, "it is ended"


@pytest.mark.parametrize("in_job", [True, False])
def test_ranks_of_a_job_outlive_what_slurm_sends_to_all_its_processes(
    in_job: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it knows them by their parents: they still have to save. Their supervisor ends them all the same."""
    if in_job:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    else:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code = "print(flush=True)\ninput()\nprint('saved', flush=True)\ninput()"
    rank = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before_the_program,
    )
    with rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdout.readline()
        rank.send_signal(signal.SIGTERM)
        rank.send_signal(signal.SIGUSR2)  # Slurm's warning
        if in_job:
            rank.stdin.write("\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "saved\n"
        Spawned.end(rank)  # type: ignore[arg-type]
        assert rank.returncode == (-signal.SIGKILL if in_job else -signal.SIGTERM)


ENDS_WORKERS = """
import multiprocessing, pathlib, signal, time
from parallelbench.processes import withstand_sigterm
withstand_sigterm()
for how in ("fork", "spawn"):
    worker = multiprocessing.get_context(how).Process(target=time.sleep, args=(1000,), daemon=True)
    worker.start()
    while how == "spawn" and b"spawn_main" not in pathlib.Path(f"/proc/{worker.pid}/cmdline").read_bytes():
        pass  # still a copy of this process
    worker.terminate()
    worker.join()
    assert worker.exitcode == -signal.SIGTERM, (how, worker.exitcode)
signal.raise_signal(signal.SIGTERM)
print("still here")
"""


def test_a_rank_withstands_the_sigterm_of_its_job_and_ends_its_own_workers_by_it(tmp_path: Path) -> None:
    """multiprocessing sends it, and waits for ever for who has it blocked."""
    program = tmp_path / "rank.py"
    program.write_text(f"if __name__ == '__main__':{textwrap.indent(ENDS_WORKERS, '    ')}")
    done = subprocess.run(
        [sys.executable, str(program)],
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "still here"), done.stderr


def test_what_nobody_reads_ends_nothing() -> None:
    """/dev/full refuses what is flushed, as a closed pipe and a lost terminal do."""
    program = """
import sys
from parallelbench.processes import unread_output
sys.stdout = open("/dev/full", "w")
with unread_output():
    print("a line", flush=True)
    print("another", flush=True)
sys.stderr.write("went on")
sys.stdout = None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "went on")
