"""When a run's processes on a node stood still: stopped by a signal, or frozen with their job or their machine.

Nothing that a rank counts tells it: a stopped process neither runs nor waits for a core, as one does that waits for
another rank. So another process looks at the ranks' states; and where it is stopped as well, it wakes up late.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from parallelbench.world.machine import descendants, run_delay_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEAT_S = 0.1
"""From one look to the next."""
LATE_S = 0.5
"""Who wakes up so late, and did not wait for a core, was stopped or frozen. On busy virtual machines 0.15 s occur."""
_LOOKS_FOR_RANKS = 10
"""Beats from one search for ranks that have not begun yet to the next: a search reads all of /proc."""
_STOPPED = (b"T", b"t")
"""States of a process that a signal, or a debugger, has stopped (proc_pid_stat(5))."""


class Watch:
    """Watches the ranks of this node, and itself."""

    def __init__(
        self,
        first: int,
        ranks: int,
        *,
        below: bool = False,
        wait: Callable[[float], None] = time.sleep,
        proc: Path = Path("/proc"),
    ) -> None:
        """`first`: process id of the node's first rank; all `ranks` have the same parent. `below`: the ranks are of a
        program of the user's that `first` has started, with whatever else belongs to it.
        """
        self._first, self._ranks, self._below, self._wait, self._proc = first, ranks, below, wait, proc
        self._states: dict[int, int] = {}
        """Process id → descriptor of the file with its state."""
        self._beats = 0
        self._stopped_at: float | None = None
        self._found: deque[tuple[float, float]] = deque()

    def start(self) -> None:
        """Watch until this process ends, in a thread: drivers may take long to answer the other one."""
        threading.Thread(target=self._run, daemon=True).start()

    def taken(self) -> Iterator[tuple[float, float]]:
        """What was found since the last call: Unix times of the beginning and the end, s."""
        while self._found:
            yield self._found.popleft()

    def _run(self) -> None:
        while True:
            self.beat()

    def beat(self) -> None:
        """Wait, and look."""
        began, before = time.perf_counter(), self._delays_s()
        self._wait(BEAT_S)
        after = self._delays_s()
        if before is not None and after is not None and before.keys() <= after.keys():  # no thread has ended
            waited_s = sum(after.values()) - sum(before.values())
            late_s = time.perf_counter() - began - BEAT_S - waited_s
            if late_s > LATE_S:
                now = time.time()
                self._found.append((now - late_s, now))
        self._note(is_stopped=any(map(self._is_stopped, self._of_ranks())))

    def _delays_s(self) -> dict[str, float] | None:
        """How long each of this process's threads has waited for a core: also the one that keeps others waiting for
        Python's lock. None where the kernel does not say, and who wakes up late may have waited for a core.
        """
        delays = {task.name: run_delay_s(task / "schedstat") for task in (self._proc / "self/task").glob("*")}
        known = {name: delay for name, delay in delays.items() if delay is not None}
        return known if len(known) == len(delays) else None

    def _note(self, *, is_stopped: bool) -> None:
        if is_stopped and self._stopped_at is None:
            self._stopped_at = time.time()
        elif not is_stopped and self._stopped_at is not None:
            self._found.append((self._stopped_at, time.time()))
            self._stopped_at = None

    def _of_ranks(self) -> list[int]:
        """Descriptors of the ranks' states; ranks are looked for until all have begun, those of a program always."""
        if (self._below or len(self._states) < self._ranks) and self._beats % _LOOKS_FOR_RANKS == 0:
            found = self._beside()
            for process in self._states.keys() - found if self._below else ():
                os.close(self._states.pop(process))
            for process in found - self._states.keys():
                with suppress(OSError):  # it has ended
                    path = self._proc / str(process) / "task" / str(process) / "stat"
                    self._states[process] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._beats += 1
        return [*self._states.values()]

    def _beside(self) -> set[int]:
        if self._below:
            return {self._first, *descendants(self._first)} - {os.getpid()}
        if self._ranks == 1:
            return {self._first}
        with suppress(psutil.Error):
            parent = psutil.Process(self._first).parent()
            return set() if parent is None else {child.pid for child in parent.children()}
        return set()

    def _is_stopped(self, descriptor: int) -> bool:
        try:
            # Behind the name, which may hold anything.
            return os.pread(descriptor, 512, 0).rpartition(b") ")[2][:1] in _STOPPED
        except OSError:  # it has ended
            return False
