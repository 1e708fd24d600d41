"""Ranks that were stopped, really, and a watch that was stopped or frozen along with them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from parallelbench.telemetry import suspension
from parallelbench.telemetry.suspension import BEAT_S, Watch
from tests.helpers import Clock


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that do nothing."""
    started = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def told(process: subprocess.Popen[bytes], number: signal.Signals, until: int) -> None:
    """Signal a process, and wait until it has happened."""
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, until)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_a_signal_stops_is_seen(stopped: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    watch = Watch(ranks[0].pid, len(ranks), wait=lambda _: None)
    watch.beat()
    assert not [*watch.taken()]
    for _ in range(2):
        told(ranks[stopped], signal.SIGSTOP, os.WSTOPPED)
        for _ in range(3):
            watch.beat()
        assert not [*watch.taken()], "it lasts"
        told(ranks[stopped], signal.SIGCONT, os.WCONTINUED)
        watch.beat()
        ((start, end),) = watch.taken()
        assert start <= end
    ranks[stopped].kill()
    watch.beat()
    assert not [*watch.taken()], "one that ends was not stopped"


def test_of_several_ranks_only_those_of_the_run_are_watched(ranks: list[subprocess.Popen[bytes]]) -> None:
    watch = Watch(ranks[0].pid, 1, wait=lambda _: None)
    told(ranks[1], signal.SIGSTOP, os.WSTOPPED)
    watch.beat()
    told(ranks[1], signal.SIGCONT, os.WCONTINUED)
    watch.beat()
    assert not [*watch.taken()]


def test_a_rank_that_a_users_program_has_started_is_seen_and_forgotten_with_it() -> None:
    """The shell stands for a launcher, its child for a rank that begins late."""
    command = ["bash", "-c", "read; sleep 3600 & echo $!; wait; read"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        watch = Watch(launcher.pid, 1, below=True, wait=lambda _: None)
        watch.beat()
        print(file=launcher.stdin, flush=True)
        rank = psutil.Process(int(launcher.stdout.readline()))
        for act in (rank.suspend, rank.resume):
            act()
            for _ in range(10):
                watch.beat()
        assert len([*watch.taken()]) == 1
        rank.kill()
        launcher.kill()


@pytest.mark.parametrize(
    ("wait_s", "delays_s", "found_s"),
    [
        (BEAT_S, [0.0, 0.0], None),
        (BEAT_S + 0.45, [0.0, 0.0], None),
        (60.0, [0.0, 0.0], 60.0 - BEAT_S),  # nobody else had the core: it was stopped, or frozen
        (60.0, [59.9, 0.0], None),  # others had the core
        (60.0, [0.0, 59.9], None),  # likewise, of the thread that held Python's lock meanwhile
        (60.0, [20.0, 0.0], 40.0 - BEAT_S),
        (60.0, None, None),  # a kernel that does not say
    ],
)
def test_a_watch_that_wakes_up_late_was_stopped_unless_it_waited_for_a_core(
    wait_s: float,
    delays_s: list[float] | None,
    found_s: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(suspension, "time", clock)
    files = [tmp_path / "self" / "task" / str(thread) / "schedstat" for thread in range(2)]

    def say(delays_s: list[float]) -> None:
        for file, delay_s in zip(files, delays_s, strict=False):
            file.write_text(f"5 {delay_s * 1e9:.0f} 3\n")

    def wait(_: float) -> None:
        clock.now_s += wait_s
        say(delays_s or [])

    for file in files:
        file.parent.mkdir(parents=True)
    say([0.0] * len(delays_s or []))
    watch = Watch(os.getpid(), 1, wait=wait, proc=tmp_path)
    watch.beat()
    found = [*watch.taken()]
    assert [end - start for start, end in found] == ([] if found_s is None else [pytest.approx(found_s)])
