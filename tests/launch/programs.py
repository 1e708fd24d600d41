"""The program as its users start it: in processes of its own, watched through what it writes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from parallelbench.processes import die_with_parent
from parallelbench.results.attempt import Attempt
from parallelbench.results.folder import RunFolder, find_runs
from parallelbench.results.journal import read_entries, read_tables

PATIENCE_S = 600
"""How long anything may take before a test gives up; far more than it does take."""
DYING_S = 60
"""How long what is killed may take to be gone on a busy machine; less than ranks wait for each other by default."""


class Program:
    """One start of `parallelbench`; nothing that it started outlives the `with`."""

    def __init__(self, *arguments: str, results: Path, preexec: Callable[[], object] | None = None) -> None:
        self.results = results
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (not beside the results: their disk may be full)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parallelbench.cli", *arguments, f"results={results}"],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=functools.partial(_begin, preexec),
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.others():
            process.kill()
        self.output.close()

    @property
    def text(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), size, 0).decode()

    def end(self) -> int:
        """Wait for the end; the exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def others(self) -> list[psutil.Process]:
        """All processes that work on these results, torchrun and ranks, whoever their parent is now."""
        return [process for process in working_on(self.results) if process.pid != self.process.pid]

    def survivors(self) -> list[psutil.Process]:
        """Processes that go on when the program has ended."""
        _, alive = psutil.wait_procs(self.others(), timeout=DYING_S)
        return alive

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`, which looks at what the program writes."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert self.process.poll() is None, f"the program ended early: {self.text}"
            assert time.monotonic() < deadline, f"nothing happened: {self.text}"
            time.sleep(0.01)
        return found

    def attempt(self, number: int = 1) -> Attempt:
        """The attempt of the only run, once ranks work on it."""

        def started() -> Attempt | None:
            attempts = [a for run in find_runs(self.results) for a in run.attempts() if a.number == number]
            return attempts[0] if attempts and attempts[0].info() else None

        found: Attempt = self.wait_for(started)
        return found

    def entries(self, attempt: Attempt, rank: int, *, at_least: int) -> list[dict[str, Any]]:
        """The journal of a rank, once it has so many lines."""
        path = attempt.path / f"journal-rank{rank}.jsonl"
        self.wait_for(lambda: _count(path, b"\n") >= at_least)
        return read_entries(path)

    def epochs(self, attempt: Attempt, *, at_least: int) -> list[int]:
        """The finished epochs, once there are so many."""

        def enough() -> list[int] | None:
            if _count(attempt.path / "journal-rank0.jsonl", b'{"table":"epochs"') < at_least:
                return None
            found = finished_epochs(attempt)
            return found if len(found) >= at_least else None

        found: list[int] = self.wait_for(enough)
        return found

    def pid_of(self, victim: str, attempt: Attempt) -> int:
        """The process id of `supervisor`, `torchrun`, or `rank N`."""
        if victim == "supervisor":
            return self.process.pid
        if victim == "torchrun":
            (torchrun,) = psutil.Process(self.process.pid).children()
            return torchrun.pid
        rank = int(victim.removeprefix("rank "))
        pid: int = self.entries(attempt, rank, at_least=1)[0]["pid"]
        return pid


def working_on(results: Path) -> list[psutil.Process]:
    """All processes but this one whose arguments name these results."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        named = any(str(results) in word for word in process.info["cmdline"] or [])
        if named and process.pid != os.getpid():
            found.append(process)
    return found


def _begin(preexec: Callable[[], object] | None) -> None:
    die_with_parent()  # a test run that is killed leaves nothing running
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup, or in the background
    if preexec is not None:
        preexec()


def _count(path: Path, text: bytes) -> int:
    """How often a file holds a text: far cheaper than to read the rows, for those who wait on the ranks' own cores."""
    return path.read_bytes().count(text) if path.exists() else 0


def finished_epochs(attempt: Attempt) -> list[int]:
    return [row["epoch"] for row in read_tables(attempt.path)[0]["epochs"]]


def the_run(results: Path) -> RunFolder:
    (folder,) = find_runs(results)
    return folder


def completed(*arguments: str, results: Path, preexec: Callable[[], object] | None = None) -> tuple[int, str]:
    """Start the program and wait for its end: exit code and everything it printed."""
    with Program(*arguments, results=results, preexec=preexec) as program:
        code = program.end()
        assert program.survivors() == []
        return code, program.text


def program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start the program in a user's folder, and wait for its end."""
    command = [sys.executable, "-P", "-m", "parallelbench.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def own_strategy(folder: Path, code: str, *, like: str, more: str = "") -> tuple[str, ...]:
    """The words that choose a user's own strategy: the class `Mine` of this code, with the options of a shipped one."""
    (folder / "conf" / "strategy").mkdir(parents=True)
    text = f"defaults: [{like}, _self_]\n_target_: own.Mine\nname: mine\n{more}"
    (folder / "conf" / "strategy" / "mine.yaml").write_text(text)
    (folder / "own.py").write_text(code)
    return ("--conf", str(folder / "conf"), "--plugin", str(folder / "own.py"), "strategy=mine")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
