"""Forks the ranks of runs, one run after the other, from a process with all imports done:
`python -m parallelbench.training.warm DOOR [MODULE …]`, which also imports these modules.

A fork copies one thread only, so this process never computes: no thread pool, no autograd engine, no CUDA. Each rank
begins as a cold one is after its imports, and does the same from there. Through the socket that it opens at the
supervisor's `WarmDoor`, it gets one `ForkRequest` per run, with the descriptor of its log. The answers are the process
id of the run's leader (or the reason why nothing was forked, as text), and, once the run is over, its exit code.
Closing the socket ends this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.processes import FORKED, die_with_parent
from parallelbench.results.exits import Exits, exits_file, write_exits
from parallelbench.training import worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


PRELOADED = "parallelbench.training.torch_session"
"""What every run imports. The rest is left to the runs that need it, or all runs' host memory would hold it."""
MESSAGE_BYTES = 65_536
"""Largest message; it holds paths."""
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_PAGES = Path("/proc/self/pagemap")
_PRESENT = 63
"""The bit of a page that is there (proc_pid_pagemap(5))."""
_DOOR_POLL_S = 0.2
_CREDENTIALS = struct.calcsize("3i")
"""Bytes of a peer's process id, user id and group id (unix(7))."""
_TOGETHER_S = 0.1
"""Ranks that fail within this time of the first one can still report it, as under torchrun."""


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks of several nodes meet: on the first of these, at a port that is free there."""

    host: str
    port: int
    nodes: int
    node: int = 0


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run to start."""

    arguments: list[str]
    """Those of `parallelbench.training.worker`."""
    processes: int
    """Over all nodes."""
    meeting: Meeting | None = None
    """None: all ranks are forked here."""


class WarmDoor:
    """Where a warm process of this machine and user reports, also from a container or a job step, which inherit no
    descriptors: at a name that the kernel keeps. A context, to be left once it is there.
    """

    def __init__(self) -> None:
        self._name = f"parallelbench-warm-{secrets.token_hex(8)}"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(f"\0{self._name}")
        self._listening.listen(1)

    def __enter__(self) -> WarmDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def arguments(self, *modules: str) -> list[str]:
        """What Python starts the process with."""
        return ["-m", "parallelbench.training.warm", self._name, *modules]

    def opened(self, begins: Callable[[], bool]) -> socket.socket:
        """Its socket; one that is closed at the other end, where it ends first: `begins`, asked again and again."""
        while begins():
            if not select.select([self._listening], [], [], _DOOR_POLL_S)[0]:
                continue
            opened, _ = self._listening.accept()
            *_, user, _ = struct.unpack("3i", opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS))
            if user == os.getuid():
                return opened
            opened.close()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        return mine


def main(door: str, further: Sequence[str] = ()) -> int:
    """Serve one request after the other until the socket is closed; `further`: modules for who measures no memory."""
    die_with_parent()
    supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor.connect(f"\0{door}")
    os.environ[FORKED] = "1"  # of the forks, that is
    for module in (PRELOADED, *further):
        importlib.import_module(module)
    # Otherwise the first garbage collection of each child would copy all pages with objects.
    gc.collect()
    gc.freeze()
    libraries = resident() if _PAGES.exists() or not further else []
    with supervisor:
        while (received := socket.recv_fds(supervisor, MESSAGE_BYTES, 1))[0]:
            content, (log,), *_ = received
            _serve(msgspec.json.decode(content, type=ForkRequest), log, supervisor, libraries)
            os.close(log)
    return 0


def resident() -> list[range]:
    """The addresses of files' pages, libraries' most of all, that are in this process's memory, in ranges of pages."""
    import numpy as np  # not where runs are planned: `launch` takes `ForkRequest` from here

    found = []
    with open("/proc/self/maps") as maps, _PAGES.open("rb") as pagemap:
        for line in maps:
            addresses, access, *_, name = line.split(maxsplit=5)
            if not (access.startswith("r") and name.startswith("/")):
                continue
            first, last = (int(address, 16) // _PAGE_BYTES for address in addresses.split("-"))
            pagemap.seek(8 * first)
            there = np.frombuffer(pagemap.read(8 * (last - first)), np.uint64) >> np.uint64(_PRESENT)
            edges = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0, append=0)) + first
            found += [range(begin, end) for begin, end in edges.reshape(-1, 2).tolist()]
    return found


def touch(pages: Iterable[range]) -> None:
    """Read a byte of each page. A fork gets files' pages when it reads them, and they count as its memory then only."""
    for each in pages:
        (ctypes.c_char * (len(each) * _PAGE_BYTES)).from_address(each.start * _PAGE_BYTES)[::_PAGE_BYTES]


def _serve(request: ForkRequest, log: int, supervisor: socket.socket, libraries: list[range]) -> None:
    """Start one run, with all its output to the descriptor `log`, and wait for its end."""

    def begin() -> int:
        os.setsid()
        die_with_parent()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        supervisor.close()
        return lead(request, libraries)

    if (reason := unforkable()) is not None:
        _send(supervisor, reason)
        return
    leader = forked(begin)
    _send(supervisor, leader)
    os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
    # Until it is reaped, no other process can have its number.
    os.killpg(leader, signal.SIGKILL)
    _, status = os.waitpid(leader, 0)
    _send(supervisor, os.waitstatus_to_exitcode(status))


def _send(supervisor: socket.socket, answer: int | str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor may be gone
        supervisor.send(msgspec.json.encode(answer))


def unforkable() -> str | None:
    """Why a fork of this process would be unsafe; None if it is safe."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the warm process has {threads} threads, and a fork copies one"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the warm process uses CUDA, which does not survive a fork"
    return None


def forked(work: Callable[[], int]) -> int:
    """Fork a child that ends with the exit code that `work` returns; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = work()
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may be full
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)  # the child must not go on in the parent's frames, nor run its exit handlers


def lead(request: ForkRequest, libraries: list[range]) -> int:
    """Be the only rank, or do what torchrun does for several; returns the exit code."""
    if request.processes == 1:
        touch(libraries)
        return worker.main(request.arguments)
    listening, meeting = None, request.meeting
    if meeting is None:
        listening = socket.create_server(("127.0.0.1", 0))
        meeting = Meeting("127.0.0.1", listening.getsockname()[1], nodes=1)
    ranks = {}
    for local_rank in range(request.processes // meeting.nodes):
        names = variables(local_rank, request.processes, meeting)
        ranks[forked(partial(_rank, request, names, listening, libraries))] = int(names["RANK"])
    store = None if listening is None else _store(meeting.port, listening)
    codes = _first_to_fail(ranks)
    del store  # it must last as long as the ranks
    if not codes:
        return 0
    attempt = Path(request.arguments[0], "attempts", request.arguments[1])
    write_exits(exits_file(attempt, meeting.node), Exits(codes=codes))
    return 1


def _rank(request: ForkRequest, names: dict[str, str], listening: socket.socket | None, libraries: list[range]) -> int:
    touch(libraries)
    os.environ |= names
    if listening is not None:
        listening.close()
    return worker.main(request.arguments)


def variables(local_rank: int, processes: int, meeting: Meeting) -> dict[str, str]:
    """The environment variables that torchrun gives a rank."""
    here = processes // meeting.nodes
    return {
        "RANK": str(meeting.node * here + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        # On one node the ranks meet at the leader's store, so they keep it if rank 0 dies; on several, at rank 0's.
        "TORCHELASTIC_USE_AGENT_STORE": str(meeting.nodes == 1),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _store(port: int, meeting: socket.socket) -> object:
    """The store that the ranks meet at. It has threads, so it comes after the forks."""
    import torch.distributed as dist

    listening = meeting.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening)  # type: ignore[attr-defined]


def _first_to_fail(ranks: dict[int, int]) -> dict[int, int]:
    """Wait until all ranks have ended or one has failed; rank → exit code of those that failed first."""
    failed: dict[int, int] = {}
    running = dict(ranks)
    while running and not failed:
        pid, status = os.wait()
        failed |= _failure(running.pop(pid), status)
    if failed:
        time.sleep(_TOGETHER_S)
    for pid, rank in running.items():
        ended, status = os.waitpid(pid, os.WNOHANG)
        failed |= _failure(rank, status) if ended else {}
    return failed


def _failure(rank: int, status: int) -> dict[int, int]:
    code = os.waitstatus_to_exitcode(status)
    return {rank: code} if code else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
