"""Start the training processes of several runs, one after the other, by forking processes that have imported torch."""

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
from launch.attempt.command import environment, plugin_of
from parallelbench.rank.warm import MESSAGE_BYTES, Answer, Ended, Order, Started
from parallelbench.rank.worker import WATCHED_BY

if TYPE_CHECKING:
    from launch.attempt.command import Rendezvous
    from launch.attempt.processes import Process
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.attempt import Attempt
    from parallelbench.store.folder import RunFolder


class WarmWorkers:
    """One warm process for each environment that runs need: what a library reads when it is loaded holds for its forks.

    A context; at its end the warm processes are gone. `start` takes the place of `processes.start`, and leaves the
    runs to it that are not packed.
    """

    def __init__(self) -> None:
        self._parents: dict[tuple[tuple[str, str], ...], _Parent] = {}

    def __enter__(self) -> WarmWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()

    def start(
        self,
        folder: RunFolder,
        run: RunConfig,
        attempt: Attempt,
        *,
        device_type: str,
        log: Any,
        rendezvous: Rendezvous | None = None,
    ) -> Process:
        """Start the processes of a run; cold ones, too, where a warm process can't be forked."""
        refusal = self._fork(folder, run, attempt, device_type, log) if run.launcher.packed else None
        if isinstance(refusal, WarmProcess):
            return refusal
        if refusal is not None:
            print(f"parallelbench: {folder.path.name} is started cold: {refusal}", flush=True)
        return processes.start(folder, run, attempt, device_type=device_type, log=log, rendezvous=rendezvous)

    def _fork(
        self, folder: RunFolder, run: RunConfig, attempt: Attempt, device_type: str, log: Any
    ) -> WarmProcess | str:
        """The processes of one run, or why they can't be forked."""
        variables = environment(run, device_type, os.environ, cores=len(os.sched_getaffinity(0)))
        variables[WATCHED_BY] = str(os.getpid())
        key = tuple(sorted(variables.items()))
        if key not in self._parents or not self._parents[key].alive():
            self._parents[key] = _Parent(variables)
        order = Order(
            arguments=[str(folder.path.resolve()), str(attempt.number), *plugin_of(run)],
            processes=run.strategy.processes(run, device_type),
        )
        return self._parents[key].start(order, log)


class _Parent:
    """The warm process that ranks are forked from."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parallelbench.rank.warm", str(theirs.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=processes.before_the_program,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def start(self, order: Order, log: Any) -> WarmProcess | str:
        """The processes of one run, or why they can't be forked."""
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._orders, [msgspec.json.encode(order)], [log.fileno(), theirs.fileno()])
            except BrokenPipeError:
                return "the warm process has ended"
        answer = _decoded(answers.recv(MESSAGE_BYTES))
        if isinstance(answer, Started):
            return WarmProcess(answer.pid, answers, self.process)
        answers.close()
        return answer.reason if answer is not None and not isinstance(answer, Ended) else "the warm process has ended"

    def close(self) -> None:
        self._orders.close()
        processes.end(self.process)


class WarmProcess:
    """The processes of one run, as `subprocess.Popen` shows those that it starts."""

    def __init__(self, pid: int, answers: socket.socket, parent: subprocess.Popen[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers, self._parent = answers, parent

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            ready, _, _ = select.select([self._answers], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("parallelbench.rank.warm", timeout or 0.0)
            # Left in the socket: should a signal interrupt this line, the answer is still there for the next call.
            answer = _decoded(self._answers.recv(MESSAGE_BYTES, socket.MSG_PEEK))
            if isinstance(answer, Ended):
                self.returncode = answer.returncode
            else:  # the warm process is gone, and with it all that it had forked
                self.returncode = self._parent.wait() or 1
            self._answers.close()
        return self.returncode


def _decoded(content: bytes) -> Answer | None:
    """None where the socket was closed instead."""
    answer: Answer | None = msgspec.json.decode(content, type=Answer) if content else None
    return answer
