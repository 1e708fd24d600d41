"""Start the training processes of several runs, one after the other, by forking processes that have imported torch.

multiprocessing's forkserver would not do: it has one environment for all runs, a child of it outlives a supervisor
that is killed, and it starts a third process.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from launch.attempt import processes
from launch.attempt.command import environment
from launch.attempt.signals import heed
from parallelbench.training.warm import MESSAGE_BYTES, ForkRequest
from parallelbench.training.worker import WATCHED_BY
from parallelbench.world.machine import threads_here

if TYPE_CHECKING:
    from launch.attempt.processes import Process, Training

POLL_S = 0.1
"""Between two looks at what has come while a warm process begins, which takes seconds."""
_GONE = "the warm process has ended"


class WarmWorkers:
    """One warm process per environment and cores: a library reads its variables when it is loaded, before the forks.

    A context; at its end the warm processes are gone. `start` replaces `processes.start`, and calls it for runs that
    are not packed.
    """

    def __init__(self) -> None:
        self._parents: dict[object, _Parent] = {}

    def __enter__(self) -> WarmWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()

    def start(self, training: Training, log: Any) -> Process:
        """Start the processes of a run; cold ones where a warm process can't be forked."""
        refusal = self._fork(training, log) if training.run.launcher.packed else None
        if isinstance(refusal, WarmProcess):
            return refusal
        if refusal is not None:
            print(f"parallelbench: {training.folder.path.name} is started cold: {refusal}", flush=True)
        return processes.start(training, log)

    def _fork(self, training: Training, log: Any) -> WarmProcess | str:
        """The processes of one run, or why they can't be forked."""
        variables = environment(training.run, training.device_type, os.environ, cores=threads_here())
        variables[WATCHED_BY] = str(os.getpid())
        key = (frozenset(variables.items()), frozenset(os.sched_getaffinity(0)))
        if key not in self._parents or not self._parents[key].alive():
            self._parents[key] = _Parent(variables)
        return self._parents[key].start(ForkRequest(arguments=training.arguments, processes=training.processes), log)


class _Parent:
    """The warm process that ranks are forked from."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parallelbench.training.warm", str(theirs.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=processes.before_the_program,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def start(self, request: ForkRequest, log: Any) -> WarmProcess | str:
        """The processes of one run, which print to the file `log`, or why they can't be forked."""
        try:
            socket.send_fds(self._socket, [msgspec.json.encode(request)], [log.fileno()])
        except ConnectionError:
            return _GONE
        while not self.answers_within(POLL_S):
            heed()
        answer = self.answer(0)
        return WarmProcess(answer, self) if isinstance(answer, int) else answer or _GONE

    def answer(self, flags: int) -> int | str | None:
        """Its next answer; None where the process has ended instead."""
        try:
            content = self._socket.recv(MESSAGE_BYTES, flags)
        except ConnectionError:
            content = b""
        answer: int | str | None = msgspec.json.decode(content, type=int | str) if content else None
        return answer

    def answers_within(self, timeout_s: float | None) -> bool:
        """Whether an answer comes, or the process ends, within `timeout_s` seconds (None: wait)."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def close(self) -> None:
        self._socket.close()
        processes.end(self.process)


class WarmProcess:
    """The processes of one run, with the methods of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, pid: int, parent: _Parent) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not self._parent.answers_within(timeout):
                raise subprocess.TimeoutExpired("parallelbench.training.warm", timeout or 0.0)
            # The answer is removed after it is stored: if a signal interrupts this line, the next call still gets it.
            code = self._parent.answer(socket.MSG_PEEK)
            # Without an answer the warm process has ended, and its forks with it.
            self.returncode = code if isinstance(code, int) else self._parent.process.wait() or 1
            self._parent.answer(0)
        return self.returncode
