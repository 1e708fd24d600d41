"""In tests, the suite's programs are started by forking a process that has loaded the libraries already.

`server.py` says what such a process is, and what it is not. `subprocess` works as ever: what it gives back are children
of this process. `cold` starts genuine ones.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.attempt.processes import MALLOC
from parallelbench.processes import die_with_parent
from tests.warm.server import MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

_SERVER = Path(__file__).with_name("server.py")
_ROOT = Path(__file__).parents[2]
_ROOM = "-" * 8192
"""For the command lines of forks."""
_HEAVY = (
    "parallelbench.cli",
    "parallelbench.gpu_check",
    "parallelbench.measure.",
    "parallelbench.training.",
    "tests.advisor.rank_memory",
    "tests.fake_ranks",
    "tests.large_ranks",
    "torch.distributed.run",
)
"""Modules that load torch, or start what does."""
_PR_SET_CHILD_SUBREAPER = 36
_exec = subprocess._fork_exec  # type: ignore[attr-defined]


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Fork what can be forked."""
    with _with(_fork_or_exec):
        yield


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Start everything by exec."""
    with _with(_exec):
        yield


@contextlib.contextmanager
def _with(start: Any) -> Iterator[None]:
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


def _fork_or_exec(*arguments: Any) -> int:
    """In the place of `_posixsubprocess.fork_exec`, with its arguments."""
    heavy = any(os.fsdecode(word).startswith(_HEAVY) for word in arguments[0])
    asked = _request(*arguments) if heavy else None
    pid = _ask(*asked) if asked is not None else None
    return int(_exec(*arguments)) if pid is None else pid


def _request(
    command: Any, _paths: Any, _close: Any, keep: Any, cwd: Any, environment: Any, *rest: Any
) -> tuple[dict[str, Any], list[int]] | None:
    """What the server is asked for, and the three streams; None if only exec can do it."""
    # Before Python 3.14 it is said at the end whether vfork may be used.
    (stdin, _, _, stdout, _, stderr, _, _, _, session, group, group_id, groups, user, umask, before, *_) = rest
    ids = (group_id, groups, user)
    inline = any("launcher=inline" in os.fsdecode(word) for word in command)  # torch would count the cores too early
    if inline or len(keep) > 1 or group >= 0 or umask >= 0 or any(each is not None for each in ids):
        return None
    try:
        function = pickle.dumps(before) if before is not None else b""
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    pairs = [os.fsdecode(pair).partition("=") for pair in environment or ()]
    request = {
        "command": [os.fsdecode(word) for word in command],
        "environment": dict(os.environ) if environment is None else {name: value for name, _, value in pairs},
        "cwd": os.getcwd() if cwd is None else os.fsdecode(cwd),
        "cores": sorted(os.sched_getaffinity(0)),
        "session": session,
        "before": base64.b64encode(function).decode(),
        "root": str(_ROOT),
    }
    return request, [number if own == -1 else own for number, own in enumerate((stdin, stdout, stderr))]


def _ask(request: dict[str, Any], streams: list[int]) -> int | None:
    server = _server()
    with _adopting():
        socket.send_fds(server, [json.dumps(request).encode()], streams)
        answer = server.recv(MESSAGE_BYTES)
    assert answer, "the server of forks has ended"
    pid: int | None = json.loads(answer)
    return pid


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Let what the server forks become a child of this process; other orphans are for init, before and after."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _server() -> socket.socket:
    """The socket of this process's server, which is started."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, cold():
        subprocess.Popen(
            [sys.executable, "-P", str(_SERVER), str(theirs.fileno()), _ROOM],
            # numpy's thread pool would not survive a fork.
            env=os.environ | MALLOC | {"OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    assert ours.recv(MESSAGE_BYTES) == b"ready", "the server of forks did not start"
    return ours
