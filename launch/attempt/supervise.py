"""Start the processes of one run, watch them, end them where necessary, and record the outcome."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from launch.attempt.outcome import interrupted, judge, publish_if_finished, stopped
from launch.attempt.processes import Process, Start, Training, end, redacted_log, start
from launch.attempt.signals import heed, heeding_at_once, noting
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import StorageError, SupersededError
from parallelbench.processes import without_foreign
from parallelbench.results.attempt import HEARTBEAT_S
from parallelbench.results.journal import read_entries_from

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.results.attempt import Attempt, Outcome

POLL_S = 0.1


class Watcher(Protocol):
    """Shows a run's progress."""

    def event(self, event: dict[str, Any]) -> None:
        """A journal entry of rank 0: an event, or a row of `epochs`."""


class Interrupted(KeyboardInterrupt):
    """The user or the system has sent this process a signal to stop."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise `Interrupted` at the next `heed`, so that ranks are ended and recorded."""

    def interrupt(number: signal.Signals) -> None:
        raise Interrupted(number.name)

    # An ignored signal stays ignored, as nohup requires.
    heeded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    with noting(heeded, interrupt):
        yield


def supervise(training: Training, *, watcher: Watcher, begin: Start = start) -> Outcome:
    """Run one described attempt to its end; returns its outcome, which is also on disk.

    `begin` starts this node's processes; those of other nodes are started there.

    Raises `Interrupted` after the ranks have been ended and the outcome `killed` has been recorded.
    """
    folder, run, attempt = training.folder, training.run, training.attempt
    try:
        with redacted_log(attempt.log) as log:
            process = begin(training, log)
            try:
                timed_out = _watch(process, training, watcher)
            finally:
                end(process)
    except Interrupted as interruption:
        if publish_if_finished(folder, run, attempt) is None:
            attempt.finish(*interrupted(attempt, training.processes, str(interruption), nodes=run.nodes))
        raise
    except SupersededError as error:
        return attempt.finish("killed", str(error))
    except StorageError as error:
        return attempt.finish("storage", str(error))
    if published := publish_if_finished(folder, run, attempt):
        return published
    if timed_out and stopped(attempt) is None:
        return attempt.finish("timeout", f"not done after launcher.timeout_s={run.launcher.timeout_s:g}")
    return attempt.finish(*judge(attempt, training.processes, process.wait(), nodes=run.nodes))


def in_this_process(training: Training) -> Outcome:
    """The same in this process, for debuggers. Its threads, cores and seeds stay changed."""
    from parallelbench.training.worker import work

    folder, run, attempt = training.folder, training.run, training.attempt
    try:
        with heeding_at_once(), without_foreign():
            code = work(attempt, time.time(), *plugin_of(run)[:1])
    except Interrupted as interruption:
        attempt.finish("killed", f"interrupted by {interruption}")
        raise
    return publish_if_finished(folder, run, attempt) or attempt.finish(*judge(attempt, 1, code))


def _watch(process: Process, training: Training, watcher: Watcher) -> bool:
    """Wait for the process; returns whether it exceeds its time limit.

    Raises `SupersededError` if another supervisor considered this one dead and began the next attempt, and
    `Interrupted`.
    """
    tail = _Tail(training.attempt)
    deadline = time.monotonic() + (training.run.launcher.timeout_s or float("inf"))
    next_look = 0.0
    while True:
        try:
            process.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            ended = False
        else:
            ended = True
        heed()
        for event in tail.new():
            watcher.event(event)
        if ended:
            return False
        if time.monotonic() > deadline:
            return True
        if time.monotonic() > next_look:
            if training.folder.superseded(training.attempt):
                raise SupersededError
            next_look = time.monotonic() + HEARTBEAT_S


class _Tail:
    """Follows the journal of rank 0."""

    def __init__(self, attempt: Attempt) -> None:
        self._path = attempt.path / "journal-rank0.jsonl"
        self._size = -1
        self._next_byte = 0

    def new(self) -> list[dict[str, Any]]:
        """Entries about progress since the last call."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._size:
            return []
        self._size = size
        fresh, self._next_byte = read_entries_from(self._path, self._next_byte)
        return [entry for entry in fresh if "event" in entry or entry["table"] == "epochs"]
