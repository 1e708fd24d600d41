"""`python guardian.py ALIVE TOLD COMMAND…`: starts a program, and sees to it that nothing outlives who asked for it.

ALIVE is the reading end of a pipe: when it closes, since the suite's process has ended, however it did, all that the
program has started is killed, also what has left its group or session (setsid, torchrun's ranks) or lost its parent.
TOLD takes a line when the command has ended: how many of its processes were left then, and the Unix times of its start
and end. What was left is killed, too.

Only the standard library: it starts in hundredths of a second, and has nothing that could fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PATIENCE_S = 60.0
"""How long the kernel may take to end killed processes: one that waits for a file server may take for ever."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: who loses its parent becomes this process's child


def main(alive: int, told: int, command: list[str]) -> int:
    """Run the command; its exit code, as a shell tells it."""
    os.setsid()  # who kills the suite's processes by their group leaves this one to do its work
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started_at = time.time()
    program = subprocess.Popen(command, preexec_fn=_as_usual)
    while program.poll() is None and alive not in select.select([alive, woken], [], [])[0]:
        os.read(woken, 4096)
        _reap(program.pid)
    ended_at = time.time()
    left = _descendants() if program.poll() is not None else []
    with contextlib.suppress(BrokenPipeError):  # who asked has ended
        os.write(told, f"{len(left)} {started_at!r} {ended_at!r}\n".encode())
    ends_at = time.monotonic() + _PATIENCE_S
    while (pids := _descendants()) and time.monotonic() < ends_at:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
        program.poll()
        _reap(program.pid)
    code = program.poll()
    return 1 if code is None else code if code >= 0 else 128 - code


def _as_usual() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _reap(but: int) -> None:
    """Take in who has ended, but for the program itself, whose code is asked for later."""
    for pid in _children(os.getpid()):
        if pid != but:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _descendants() -> list[int]:
    """All that is alive of the program."""
    found = _children(os.getpid())
    for pid in found:  # which grows meanwhile
        found += _children(pid)
    return [pid for pid in found if not _has_ended(pid)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def _has_ended(pid: int) -> bool:
    """Whether only its exit code is left."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
