"""Signals are noted when they arrive, which ends `rest`, and dealt with at `heed`, where this process holds nothing.

A handler runs between any two instructions, also within `subprocess` while it holds a lock: what raises there leaves
the lock taken, and what waits there may wait for itself. What a job does at Slurm's warning: `launch/slurm/job.py`.
"""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from _typeshed import FileDescriptorLike

    Action = Callable[[signal.Signals], object]

_noted: deque[signal.Signals] = deque()
_actions: dict[signal.Signals, Action] = {}
_at_once = False
_bells: list[int] = []
"""Self-pipes, the present one last: a signal that arrives just before `select` still wakes it. One is open within
`noting` only, so that forks do not inherit it."""


@contextmanager
def noting(numbers: Iterable[signal.Signals], action: Action) -> Iterator[None]:
    """Note these signals meanwhile; `heed` calls `action` with each that has come."""
    actions = dict(_actions)
    bell, rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _bells.append(bell)
    outer = signal.set_wakeup_fd(rope, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _note) for number in numbers}
    _actions.update(dict.fromkeys(before, action))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
        _bells.remove(bell)
        os.close(bell)
        os.close(rope)
        _actions.clear()
        _actions.update(actions)
        if not _actions:
            _noted.clear()


def heed() -> None:
    """Deal with the signals that have come; raises what their actions raise."""
    while _noted:
        number = _noted.popleft()
        if action := _actions.get(number):
            action(number)


def rest(timeout_s: float | None, *files: FileDescriptorLike) -> None:
    """Wait until a noted signal comes, one of these files can be read, or the time is over; None: however long."""
    if _noted:
        return
    select.select([*_bells[-1:], *files], [], [], timeout_s)
    for bell in _bells[-1:]:
        with suppress(BlockingIOError):
            os.read(bell, select.PIPE_BUF)


def action_of(number: signal.Signals) -> Action | None:
    """What `heed` does about a signal; None where it is not noted."""
    return _actions.get(number)


@contextmanager
def heeding_at_once() -> Iterator[None]:
    """Deal with the first signal in its handler: for code that trains in this process, and never calls `heed`."""
    global _at_once
    heed()
    _at_once = True
    try:
        yield
    finally:
        _at_once = False


def _note(number: int, _frame: object) -> None:
    global _at_once
    _noted.append(signal.Signals(number))
    if _at_once:
        _at_once = False
        heed()
