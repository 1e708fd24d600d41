"""What tests see of the machine: the same everywhere, whatever is installed, set or cached there.

Programs are those that every Debian has, git and make. A test that needs another one asks for it (`program`), and is
skipped with the reason where there is none.
"""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

KEPT = ("CI", "LD_LIBRARY_PATH", "LOGNAME", "OPENBLAS_", "PYTEST_", "PY_COLORS", "SHELL", "TMPDIR", "USER")
"""Of the environment, what begins so: it says where this Python and its libraries are, or steers pytest."""
PROGRAMS = [
    *("awk", "basename", "bash", "cat", "chmod", "chown", "cp", "cut", "date", "dd", "df", "dirname", "du", "echo"),
    *("env", "expr", "false", "find", "flock", "getconf", "getent", "getopt", "git", "grep", "gzip", "head"),
    *("hostname", "id", "install", "ldd", "ln", "ls", "make", "mkdir", "mkfifo", "mktemp", "mount", "mountpoint"),
    *("mv", "nice", "nohup", "nproc", "od", "paste", "printf", "prlimit", "pwd", "python3", "readlink", "realpath"),
    *("rm", "rmdir", "sed", "seq", "setsid", "sh", "sha256sum", "sleep", "sort", "split", "stat", "stdbuf", "stty"),
    *("sync", "tail", "tar", "taskset", "tee", "test", "timeout", "touch", "tr", "true", "truncate", "tty", "umount"),
    *("uname", "uniq", "unshare", "wc", "which", "xargs"),
]
DEBIANS = {"cc": "gcc", "c++": "g++", "ip": "iproute2"}
"""Program → its package, where that has another name."""
CORES = 2
OPEN_FILES = 1024
"""The usual limit."""
_SEEN = "PYTEST_MACHINE_PATH"


def hide_the_machine() -> None:
    """Leave of the environment, programs, cores and limits what every machine has; workers of pytest inherit it."""
    for name in ("COLUMNS", "LINES"):  # which readline, in the process that started a worker, has exported
        os.environ.pop(name, None)
    if _SEEN in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.environ.get("PATH", os.defpath)
    for name in ("bin", "home"):
        (folder / name).mkdir()
    for name in PROGRAMS:
        if found := shutil.which(name):
            (folder / "bin" / name).symlink_to(found)
    for name in set(os.environ):
        if not name.startswith(KEPT):
            del os.environ[name]
    os.environ |= {"PATH": str(folder / "bin"), "HOME": str(folder / "home"), "LC_ALL": "C.UTF-8", "TERM": "dumb"}
    os.environ[_SEEN] = path
    os.umask(0o022)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ignored in the background of a shell
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def machine_path() -> str:
    """The machine's own PATH."""
    return os.environ.get(_SEEN) or os.environ.get("PATH", os.defpath)


def program(name: str) -> str:
    """The path of a program that this machine may have; skips the test where it hasn't."""
    if found := shutil.which(name, path=machine_path()):
        return found
    return pytest.skip(f"{name} is not installed here; Debian's package is {DEBIANS.get(name, name)}")
