"""What this user may have of the machine (`ulimit`, a home, loopback), asked before something fails for lack of it."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress
from pathlib import Path

from parallelbench.errors import ConfigError

MEETING_HERE = (
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "--rdzv-conf=is_host=1",
    "--rdzv-id=one-machine",
    "--local-addr=127.0.0.1",
)
"""torchrun's options where all ranks are on this machine, on a port that is free: `--standalone` stands for the name
localhost, which may be unknown."""
RUN_GIB, FIGURES_GIB = 4, 72
"""Address space that torch needs to be loaded at all, and that V8 reserves, which draws figures."""
FEW = 4096
"""A limit on processes is counted against only where it is lower: looking at all processes takes time."""
POOL, REST, V8_POOL = 4, 8, 16
"""Threads that are enough for a library's pool, what a command needs besides its pools, and V8's at most."""


def require_folder() -> None:
    """Refuse where the working folder was deleted: nothing can be looked for, or started, in it."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the folder that you are in is gone ({error.strerror}): cd into another one") from None


def require_home() -> None:
    """Refuse where nobody knows what `~` is; libraries get a name for a user who has none."""
    try:
        Path.home()
    except RuntimeError:
        raise ConfigError(
            f"the user id {os.getuid()} has no home on this machine: name a folder with `export HOME=/some/folder`"
        ) from None
    os.environ.setdefault("LOGNAME", f"user{os.getuid()}")


def limit_pools() -> None:
    """Let libraries start no more threads than are left to this user, and none that compute nothing here.

    Raises `ConfigError` where too few are left for any command.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    if (left := threads_left()) is None:
        return
    require_threads(REST, "a command")
    for name in ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS"):
        most = min(POOL, (left - REST) // 4 + 1)
        own = os.environ.get(name, "")
        os.environ[name] = str(min(int(own), most) if own.isdecimal() else most)


def require_threads(needed: int, what: str) -> None:
    """Refuse where fewer processes and threads are left to this user (`ulimit -u`)."""
    left = threads_left()
    if left is not None and left < needed:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        raise ConfigError(
            f"ulimit -u is {limit}, of which {max(0, left)} are left, but {what} needs {needed} processes and threads: "
            f"`ulimit -u {limit + needed - left}`, or end others of yours"
        )


def threads_left() -> int | None:
    """How many more processes and threads this user may start; None: many, or as many as there can be."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() == 0 or limit == resource.RLIM_INFINITY or limit >= FEW:
        return None
    used, me = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            used += len(os.listdir(process / "task")) if process.stat().st_uid == me else 0
    return limit - used


def end_in_words() -> None:
    """Let a limit on processor time (`ulimit -t`) end this process by SIGXCPU, not by the SIGKILL of anybody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft >= hard):
        resource.setrlimit(resource.RLIMIT_CPU, (max(1, hard - 1), hard))
        resource.setrlimit(
            resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
        )  # which it would dump


def processor_time_is_up() -> str:
    """What has happened to a process that SIGXCPU has ended, and what helps."""
    limits = [each for each in resource.getrlimit(resource.RLIMIT_CPU) if each != resource.RLIM_INFINITY]
    limit = f" of {min(limits)} s" if limits else ""
    return f"used up its processor time: raise the limit{limit} (`ulimit -t`), or run where there is none, as in a job"


def require_figures() -> None:
    """Refuse to draw figures where V8 could only end this process."""
    _require_address_space(FIGURES_GIB, "figures are drawn in")
    require_threads(POOL + min(os.cpu_count() or 1, V8_POOL), "drawing figures")


def require_run(*, processes: int, threads: int, cpu: bool, alone: bool) -> None:
    """Refuse so many ranks with so many threads each that could not begin; `alone`: they are all of their run."""
    if cpu:
        _require_address_space(RUN_GIB, "torch is loaded into")
    require_threads(REST + processes * (REST + threads), "this run")
    _require_files(64 + 4 * processes)
    if alone and processes > 1:
        require_loopback()


def require_loopback() -> None:
    """Refuse where ranks of one machine could not reach each other."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        raise ConfigError(
            f"ranks on one machine meet at 127.0.0.1, which can't be reached ({error.strerror or error}): bring the "
            "loopback interface up (`ip link set lo up`), or choose devices=1"
        ) from None


def _require_files(needed: int) -> None:
    """Raise the limit on open files as far as is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < needed:
        raise ConfigError(f"ulimit -n is {hard}, but this run needs {needed} open files: `ulimit -n {needed}`")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _require_address_space(needed_gib: int, what: str) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < needed_gib << 30:
        raise ConfigError(
            f"ulimit -v is {limit >> 10} KiB, but {what} {needed_gib} GiB of address space, which is no memory: "
            "`ulimit -v unlimited`"
        )
