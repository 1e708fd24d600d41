"""Daemons that are started, recorded and ended again, without ever touching a process that isn't ours."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

HELPERS = ("slurmd", "slurmstepd", "slurmscriptd")
"""What daemons start, and leave behind when they are killed. They overwrite their environment, so their working folder
must tell whose they are."""


class DaemonError(Exception):
    """A daemon did not do what it should; the message has the end of its log."""


def start(name: str, command: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> None:
    """Start a daemon that stays in the foreground, and record who it is."""
    _home(name, folder=folder).mkdir(parents=True, exist_ok=True)
    with (folder / "log" / f"{name}.txt").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=_home(name, folder=folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # control-C is for the tests, not for the cluster
        )
    # A process id alone may belong to somebody else by the time it is used.
    record = {"pid": process.pid, "started": psutil.Process(process.pid).create_time()}
    (folder / "daemons" / f"{name}.json").write_text(json.dumps(record))


def find(name: str, *, folder: Path) -> psutil.Process | None:
    """The living process that was recorded under this name."""
    try:
        record = json.loads((folder / "daemons" / f"{name}.json").read_text())
        return alive(record["pid"], started=record["started"])
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def alive(pid: int, *, started: float) -> psutil.Process | None:
    """The process of this id, if it is still the one that started then."""
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == started and is_alive(process) else None
    except psutil.NoSuchProcess:
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether it can still do something; the dead whose parent has not asked for them yet can't."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end(processes: Iterable[psutil.Process], *, patience_s: float = 0.0) -> None:
    """Ask the processes to end, wait for `patience_s`, then kill them; all are gone on return."""
    processes = list(processes)
    if patience_s:
        _each(processes, psutil.Process.terminate)
        with suppress(DaemonError):
            _wait_for_the_end(processes, timeout_s=patience_s)
    _each(processes, psutil.Process.kill)
    _wait_for_the_end(processes, timeout_s=10)


def _wait_for_the_end(processes: list[psutil.Process], *, timeout_s: float) -> None:
    until(lambda: not any(map(is_alive, processes)), what=f"the end of {processes}", timeout_s=timeout_s)


def _each(processes: Iterable[psutil.Process], action: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            action(process)
        except psutil.NoSuchProcess:
            continue


def end_jobs(folder: Path, *, node: str | None = None) -> None:
    """Kill everything that jobs of this cluster run, or only those on one node, and what dead daemons have left."""
    for _ in range(5):  # what is killed may just have started something
        found = list(_left_behind(folder, node=node))
        if not found:
            return
        end(found)


def of_node(folder: Path, *, node: str) -> list[psutil.Process]:
    """A node's daemon, and all that jobs run there."""
    return list(_left_behind(folder, node=node))


def _left_behind(folder: Path, *, node: str | None) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if not is_alive(process):
                continue
            if process.name() in HELPERS and _is_at_home(process, folder=folder, node=node):
                yield from (process, *process.children(recursive=True))
            elif _is_stray(process, folder=folder, node=node) and process.pid != os.getpid():
                yield process
        except psutil.Error:
            continue


def _home(name: str, *, folder: Path) -> Path:
    return folder / "home" / name


def _is_at_home(process: psutil.Process, *, folder: Path, node: str | None) -> bool:
    home = Path(process.cwd())
    return home == _home(node, folder=folder) if node else home.parent == folder / "home"


def _is_stray(process: psutil.Process, *, folder: Path, node: str | None) -> bool:
    """Whether a job started this, though no slurmstepd may be left above it."""
    variables = process.environ()
    if variables.get("SLURM_CONF") != str(folder / "slurm.conf") or "SLURM_JOB_ID" not in variables:
        return False
    return node in (None, variables.get("SLURMD_NODENAME"))


def until(condition: Callable[[], bool], *, what: str, timeout_s: float, interval_s: float | None = None) -> None:
    """Wait for something that another process does.

    By default, who waits long asks more seldom: most questions start a program of Slurm's, on cores that jobs need.

    Raises:
        DaemonError: it has not happened in time.
    """
    deadline = time.monotonic() + timeout_s
    pauses_s = itertools.repeat(interval_s) if interval_s is not None else _growing()
    while not condition():
        if time.monotonic() > deadline:
            raise DaemonError(f"waited for {timeout_s:g} s, but {what} has not happened")
        time.sleep(next(pauses_s))


def _growing() -> Iterator[float]:
    pause_s = 0.02
    while True:
        yield pause_s
        pause_s = min(1.25 * pause_s, 0.25)


def log_tail(name: str, *, folder: Path, lines: int = 12) -> str:
    """The last lines that a daemon has said."""
    path = folder / "log" / f"{name}.txt"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"
