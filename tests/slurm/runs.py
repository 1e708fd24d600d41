"""Runs on a throwaway cluster, and their processes, as a fault hits them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import psutil

from launch.slurm import record
from parallelbench.results.attempt import Attempt, Outcome
from parallelbench.results.folder import RunFolder, find_runs
from parallelbench.results.journal import read_entries
from tests.helpers import TINY
from tests.launch.programs import finished_epochs, working_on
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import is_alive, until

PATIENCE_S = 500.0
"""How long anything may take before a test gives up; far more than it does take."""
QUICK = (*TINY, "measure.parity=false", "measure.probe=false", "launcher.memory_gib_per_device=1.0")
"""The memory is enough for a process that trains, but not for torchrun beside it."""
ON_TWO_NODES = (*QUICK[:-1], "devices=2", "nodes=2")
TWO_NODES = (*ON_TWO_NODES, "strategy=ddp")
ENDLESS = "epochs=1000000"
LIGHT = Path(__file__).with_name("light")
"""The folder of a plugin that trains without torch."""
WITHOUT_TORCH = ("--conf", str(LIGHT / "conf"), "--plugin", str(LIGHT / "light_strategy.py"), "strategy=light")
"""Arguments of a run of one rank that begins to train at once, for tests of what is around the training."""

IMPATIENT = """
import sys
from launch.slurm import scheduler
from parallelbench.cli import main
scheduler.PAUSES_S = ()
sys.exit(main(sys.argv[1:]))
"""
"""The program, which asks Slurm once: each question takes Slurm's commands seconds where there is no controller."""


@dataclass
class Sweep:
    """One sweep; `arguments` are those of every `submit`."""

    cluster: Cluster
    results: Path
    arguments: tuple[str, ...]

    def submit(self, *more: str) -> str:
        """Submit what is missing; returns what the program said."""
        done = self.submission(*more)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def submission(
        self, *more: str, path: Path | None = None, patient: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """`submit`, however it ends; `path` goes before where Slurm is, and the `patient` ask it more than once."""
        env = self.cluster.env | ({"PATH": f"{path}:{self.cluster.env['PATH']}"} if path else {})
        program = ["-m", "parallelbench.cli"] if patient else ["-c", IMPATIENT]
        site = () if any(each.startswith("site=") for each in self.arguments) else ("site=local_cluster",)
        options = ("launcher=slurm", *site, f"results={self.results}", *more)
        command = [sys.executable, *program, "submit", *self.arguments, *options]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    # --- what folders and Slurm say

    @property
    def runs(self) -> list[RunFolder]:
        return find_runs(self.results)

    @property
    def run(self) -> RunFolder:
        (run,) = self.runs
        return run

    @property
    def jobs(self) -> list[str]:
        """Ids of all jobs, oldest first."""
        found = [s.job for s in record.submissions(self.runs[0].path.parent)]
        return [job for job in found if job]

    @property
    def job(self) -> str:
        """The latest one."""
        return self.jobs[-1]

    def log(self) -> str:
        """What the jobs printed."""
        logs = sorted(self.results.glob("*/submissions/*/*_log.out"))
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def story(self) -> str:
        """What a failed test should show."""
        parts = [self.log(), self.cluster.run("squeue", check=False)]
        for run in self.runs:
            parts += [f"{run.path.name}: {run.state()}"]
            parts += [f"{a.number}: {a.outcome()}, {a.log.read_text()}" for a in run.attempts() if a.log.exists()]
        return "\n".join(parts)

    def queued(self) -> list[str]:
        """The states of this sweep's jobs in the queue."""
        # Without `check`: it complains about jobs that are long over.
        return self.cluster.run("squeue", "-h", "--format=%T", f"--jobs={','.join(self.jobs)}", check=False).split()

    @contextmanager
    def nothing_starts(self) -> Iterator[None]:
        """Hold the jobs that wait in the queue; what runs goes on."""
        before = ",".join(self.jobs)
        self.cluster.run("scontrol", "hold", before, check=False)  # it complains about jobs that have started
        try:
            yield
        finally:
            self.cluster.run("scontrol", "release", before, check=False)

    # --- waiting

    def wait(self, condition: Callable[[], Any], what: str, *, interval_s: float | None = None) -> Any:
        """The first true value of `condition`."""
        found: list[Any] = []

        def holds() -> bool:
            found[:] = [condition()]
            return bool(found[0])

        try:
            until(holds, what=what, timeout_s=PATIENCE_S, interval_s=interval_s)
        except Exception as error:
            error.add_note(self.story())
            raise
        return found[0]

    def attempt(self, number: int = 1) -> Attempt:
        """The attempt of the only run, once its processes are about to start."""
        found: Attempt = self.wait(
            lambda: next((a for a in self.run.attempts() if a.number == number and a.info()), None), f"attempt {number}"
        )
        return found

    def epochs(self, attempt: Attempt, *, at_least: int) -> list[int]:
        """The finished epochs, once there are so many."""

        def enough() -> list[int] | None:
            found = finished_epochs(attempt)
            return found if len(found) >= at_least else None

        epochs: list[int] = self.wait(enough, f"epoch {at_least} of attempt {attempt.number}")
        return epochs

    def outcome(self, attempt: Attempt) -> tuple[str, str]:
        """How an attempt ended, and why, once it has."""
        found: Outcome = self.wait(attempt.outcome, f"the outcome of attempt {attempt.number}")
        return found.outcome, found.reason

    def done(self, label: str = "ok") -> RunFolder:
        """The only run, once it has a valid result."""
        run = self.run
        self.wait(lambda: run.state().state == "done", "a result")
        assert run.state().label == label
        return run

    def row(self) -> dict[str, Any]:
        """Its row in the table of runs."""
        return pl.read_parquet(self.done().result / "run.parquet").row(0, named=True)

    def settle(self, *, at_least: int) -> int:
        """Wait until so many runs are done, or no job is left; returns how many are."""

        def done() -> int:
            return sum(run.state().state == "done" for run in self.runs)

        self.wait(lambda: done() >= at_least or not self.queued(), f"{at_least} results", interval_s=0.5)
        return done()

    def over(self) -> None:
        """Wait until no job is in the queue, and no process works on these results any more."""
        self.wait(lambda: not self.queued() and not self.processes(), "the end of all jobs", interval_s=0.2)

    # --- processes

    def pid_of(self, victim: str, attempt: Attempt) -> int:
        """The process id of `supervisor`, `task` (of its step, on node 1), or `rank N`."""
        if victim.startswith("rank "):
            path = attempt.path / f"journal-rank{victim.removeprefix('rank ')}.jsonl"
            pid: int = self.wait(lambda: read_entries(path), f"the journal of {victim}")[0]["pid"]
            return pid
        if victim == "supervisor":
            supervisor = attempt.supervisor()
            assert supervisor is not None
            return supervisor.pid
        rank = psutil.Process(self.pid_of("rank 1", attempt))
        return int(next(p.pid for p in rank.parents() if "launch.slurm.step" in p.cmdline()))

    def signal(self, victim: str, attempt: Attempt, number: signal.Signals) -> None:
        os.kill(self.pid_of(victim, attempt), number)

    def processes(self) -> list[psutil.Process]:
        """All living processes that work on these results."""
        return [process for process in working_on(self.results) if is_alive(process)]


def stand_in(cluster: Cluster, folder: Path, name: str, script: str) -> Path:
    """Put a script of bash's into a folder that goes before PATH; in it, `$REAL` is the program of that name."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\nREAL={shutil.which(name, path=cluster.env['PATH'])}\n{script}\n")
    path.chmod(0o755)
    return path


def events(attempt: Attempt) -> Counter[str]:
    """How often rank 0 has said what."""
    entries = read_entries(attempt.path / "journal-rank0.jsonl")
    return Counter(entry["event"] for entry in entries if "event" in entry)


def times_finished(run: RunFolder) -> int:
    """How often training reached its end, over all attempts."""
    return sum(events(attempt)["finished"] for attempt in run.attempts())


def learned(run: RunFolder) -> list[tuple[object, ...]]:
    """Losses and accuracies of each epoch."""
    columns = ["epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy"]
    return pl.read_parquet(run.result / "epochs.parquet").select(columns).rows()
