"""Sweeps of tiny runs on a throwaway cluster, as a user asks for them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.slurm import record
from launch.slurm.record import Submission
from parallelbench.cli import main
from parallelbench.errors import count_of
from parallelbench.results.folder import RunFolder, find_runs
from tests.helpers import TINY, quoted
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import DaemonError, until
from tests.slurm.runs import PATIENCE_S

SMALL = (*TINY, "launcher=slurm", "site=local_cluster", "epochs=1", "measure.parity=false", "measure.probe=false")
PARTITIONS = ("normal", "preemptible")


@dataclass
class Sweeps:
    """One results folder and one cluster; verbs of the program run in this process."""

    cluster: Cluster
    results: Path
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        for name in set(os.environ) - set(self.cluster.env):
            self.monkeypatch.delenv(name)
        self.path = self.cluster.env["PATH"]
        self.monkeypatch.setenv("SLURM_CONF", self.cluster.env["SLURM_CONF"])
        self.real_sbatch()

    @property
    def adhoc(self) -> Path:
        """The folder of the only sweep, in most tests."""
        return self.results / "adhoc"

    def asked(self, verb: str, *overrides: str) -> list[str]:
        """The arguments of a verb about runs."""
        return [verb, *SMALL, f"results={quoted(self.results)}", *overrides]

    def submit(self, *overrides: str, verb: str = "submit") -> tuple[int, str]:
        """Exit code, and all that was printed."""
        return self.run(*self.asked(verb, *overrides))

    def run(self, *arguments: str) -> tuple[int, str]:
        """A verb with nothing added."""
        self.capsys.readouterr()
        code = main(arguments)
        printed = self.capsys.readouterr()
        return code, printed.out + printed.err

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        """Submit from a process of its own, which may be killed."""
        command = [sys.executable, "-m", "parallelbench.cli", *self.asked("submit", *overrides)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def sbatch(self, script: str) -> None:
        """Put a script in the place of sbatch, where it submits; in it, `$REAL` is the real one."""
        self.replace("sbatch", f'[[ $1 == --test-only ]] && exec $REAL "$@"\n{script}')

    def questions(self, *programs: str) -> Callable[[], list[str]]:
        """From now on, what these programs of Slurm are called with, one line each; a call empties the list."""
        log = self.results.parent / "questions.txt"
        for program in programs:
            self.replace(program, f'echo "{program} $*" >> {log}; exec $REAL "$@"')

        def asked() -> list[str]:
            lines = log.read_text().splitlines() if log.exists() else []
            log.unlink(missing_ok=True)
            return lines

        return asked

    def replace(self, program: str, script: str) -> None:
        """Put a script in the place of a program of Slurm's; in it, `$REAL` is the real one."""
        folder = self.results.parent / "bin"
        folder.mkdir(exist_ok=True)
        wrapper = folder / program
        real = shutil.which(program, path=self.path)
        wrapper.write_text(f"#!/bin/bash\nREAL={real}\n{script}\n")
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        self.monkeypatch.setenv("PATH", f"{folder}:{self.path}")

    def real_sbatch(self) -> None:
        """Take the script away again."""
        self.monkeypatch.setenv("PATH", self.path)

    def queue(self) -> list[tuple[str, str]]:
        """(name, id) of each job in the queue, array tasks one by one, without those that have ended."""
        lines = self.cluster.run(
            *("squeue", "--array", "--noheader", "--format=%j|%i|%T", "--states=PENDING,RUNNING,CONFIGURING")
        ).splitlines()
        return [(name, job) for name, job, _ in (line.split("|") for line in lines)]

    def until_queue_is_empty(self) -> None:
        """Until nothing waits, runs or ends."""
        until(lambda: not self.cluster.run("squeue", "-h"), what="an empty queue", timeout_s=PATIENCE_S)

    def until_done(self, count: int = 1) -> list[RunFolder]:
        """The runs, once so many are done; all have been started exactly once."""

        def done() -> bool:
            return sum(run.state().state == "done" for run in find_runs(self.results)) == count

        try:
            until(done, what=f"{count_of(count, 'run')} being done", timeout_s=PATIENCE_S, interval_s=0.2)
        except DaemonError as error:
            raise DaemonError(f"{error}:\n{self.run('status', str(self.results))[1]}\n{self.logs()}") from None
        runs = find_runs(self.results)
        assert [len(run.attempts()) for run in runs] == [1] * count, "each run once"
        return runs

    def logs(self) -> str:
        """What all jobs have printed."""
        return "\n".join(file.read_text(errors="replace") for file in self.results.glob("*/submissions/*/*_log.out"))

    def submissions(self) -> list[Submission]:
        """The records of the only sweep."""
        return record.submissions(self.adhoc)

    def pickles(self) -> list[Path]:
        """What the jobs will execute."""
        return sorted(self.adhoc.glob("submissions/*/*_submitted.pkl"))


@contextmanager
def closed(cluster: Cluster) -> Iterator[None]:
    """Jobs may be submitted, and wait until the end of the `with`."""

    def all_become(state: str) -> None:
        for name in PARTITIONS:
            cluster.run("scontrol", "update", f"PartitionName={name}", f"State={state}")

    all_become("DOWN")
    try:
        yield
    finally:
        all_become("UP")


@contextmanager
def limited(cluster: Cluster, jobs: int) -> Iterator[None]:
    """A user may have so many jobs in the queue. The controller may learn a little later that the limit is gone."""

    def refused() -> bool:
        probe = cluster.run("sbatch", "--parsable", "--hold", f"--array=0-{jobs}", "--wrap", "true", check=False)
        if probe:
            cluster.run("scancel", probe.strip())
        return not probe

    try:
        cluster.limit_submissions(jobs)
        until(refused, what="the controller knowing the limit", timeout_s=60)
        yield
    finally:
        cluster.limit_submissions(None)


@contextmanager
def deaf(cluster: Cluster) -> Iterator[None]:
    """Accounting answers, but learns nothing: its database takes no writes, and what the controller tells it waits."""
    socket = f"--socket={cluster.folder}/mariadbd.socket"
    held = subprocess.Popen(
        [
            "mariadb",
            socket,
            "--user=root",
            "--unbuffered",
            "-e",
            "FLUSH TABLES WITH READ LOCK; SELECT 1; DO SLEEP(3600)",
        ],
        env=cluster.env,
        stdout=subprocess.PIPE,
    )
    try:
        assert held.stdout is not None
        assert held.stdout.readline(), "the lock is held once this is printed"
        yield
    finally:
        held.kill()
        held.wait()
