"""Whether the process that keeps a file is alive: it holds a lock on the file, and touches it every few seconds.

Neither process ids nor clocks decide. In another container on the same machine an id names another process; the clocks
of two machines differ, so a file's age is that by the clock of its own file system.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


CLOCKS_S = 3600.0
"""How far clocks may be apart that can't be compared; mostly in another user's folder, which is only looked at."""
_LOOK_S = 0.5


def boot() -> str:
    """Identifies this start of this machine, whatever it is called, also in its containers; empty: not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Lock:
    """A lock on a file that nobody else knows yet: until it is released, or forgotten, or this process ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.machine = boot()
            """Where it is held; empty where the file system has no locks."""
        except OSError:
            self.machine = ""

    def release(self) -> None:
        """Let it go; once is enough."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # else the file could not be opened
            self.release()


@contextmanager
def touched(path: Path, *, every_s: float) -> Iterator[None]:
    """Touch a file regularly, whatever the caller waits for meanwhile."""
    done = threading.Event()

    def touch() -> None:
        while not done.wait(every_s):
            with suppress(OSError):
                os.utime(path)

    keeper = threading.Thread(target=touch, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()


def alive(path: Path, machine: str, *, absence_s: float) -> bool:
    """Whether the process lives that keeps a file; `machine` is what its `Lock` said.

    A lock that can be seen proves life, on any machine. That none can be seen proves the end on the lock's own machine
    alone, since not every file system shows locks to others; there, a file untouched for `absence_s` seconds does.
    """
    try:
        locked = _locked(path)
        if locked or (locked is False and machine and machine == boot()):
            return locked
        return age_s(path) < absence_s
    except (FileNotFoundError, NotADirectoryError):
        return False


def _locked(path: Path) -> bool | None:
    """Whether somebody holds a file's lock; None where the file system has no locks."""
    descriptor = _opened(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def age_s(path: Path) -> float:
    """How long ago a file was touched, s, by the clock of its file system; raises `OSError` where there is none."""
    return file_system_time(path.parent) - _touched_at(path)


def file_system_time(folder: Path) -> float:
    """The time by the clock of a folder's file system, Unix time, s.

    Where nothing can be written there, it is this machine's less `CLOCKS_S`, so that nothing counts as too old.
    """
    try:  # a file that never has a name: who only looks leaves no trace, not even in the folder's own time
        return _time_of(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError:  # NFS has none
        pass
    probe = folder / f".clock.{uuid.uuid4().hex}.tmp"
    try:
        return _time_of(os.open(probe, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        return time.time() - CLOCKS_S
    finally:
        with suppress(OSError):
            probe.unlink()


def _time_of(descriptor: int) -> float:
    """The time that a file gets when it is touched; closes it."""
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def stirs(path: Path, *, within_s: float) -> bool:
    """Whether a file is touched within so many seconds from now, by this process's own clock."""
    deadline = time.monotonic() + within_s
    with suppress(OSError):  # a file that is gone is kept by nobody
        first = _touched_at(path)
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            if _touched_at(path) != first:
                return True
    return False


def _touched_at(path: Path) -> float:
    descriptor = _opened(path)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    """A descriptor, for which NFS asks its server for the file's times; a pipe keeps nobody waiting."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
