"""The main story: a sweep goes to Slurm and comes back as a report, whatever is killed meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from parallelbench.config.build import load_yaml
from parallelbench.results.folder import RunFolder, find_runs
from tests.faults import fault
from tests.launch.programs import completed
from tests.slurm.cluster import Cluster
from tests.slurm.config import NODES
from tests.slurm.daemons import is_alive
from tests.slurm.runs import QUICK, WITHOUT_TORCH, Sweep, learned, stand_in, times_finished


def test_the_demo_runs_on_slurm_to_a_report_as_the_readme_says(ours: Cluster, tmp_path: Path) -> None:
    """One repeat of it: every run is alike."""
    sweep = Sweep(ours, tmp_path, ("sweep=demo", "sweep.repeats=1"))
    on_slurm = ("LAUNCHER=slurm", "SITE=local_cluster", "ARGS=sweep.repeats=1")
    submitted = make(ours, "sweep", "SWEEP=demo", *on_slurm, f"RESULTS={tmp_path}")
    assert "submitted: " in submitted
    sweep.wait(lambda: all(run.state().state == "done" for run in sweep.runs), "three results")
    assert [run.state().label for run in sweep.runs] == ["ok"] * 3, sweep.story()
    assert "report/index.html" in make(ours, "report", "SWEEP=demo", f"RESULTS={tmp_path}").replace("\n", "")
    table = pl.read_csv(tmp_path / "demo" / "report" / "tables" / "configurations.csv")
    assert table["outcomes"].to_list() == ["1 ok"] * 3
    assert "not a run" not in (tmp_path / "demo" / "report" / "index.html").read_text()
    assert "not submitted: 3 done; 0 runs" in sweep.submit()


def make(cluster: Cluster, *arguments: str) -> str:
    """What a target of the Makefile prints."""
    root = Path(__file__).resolve().parents[2]
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=root, env=cluster.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_eight_ranks_on_two_nodes(ours: Cluster, tmp_path: Path) -> None:
    options = ("strategy=ddp", "devices=8", "nodes=2", "epochs=2", "launcher.oversubscribe=true")
    sweep = Sweep(ours, tmp_path, (*QUICK, *options))
    sweep.submit()
    run = sweep.done()
    ranks = pl.read_parquet(run.result / "ranks.parquet").filter(pl.col("epoch") == 2).sort("rank")
    assert ranks["rank"].to_list() == list(range(8))
    assert ranks["node"].to_list() == ["n1"] * 4 + ["n2"] * 4
    assert ranks["local_rank"].to_list() == [0, 1, 2, 3] * 2
    (environment,) = pl.read_parquet(run.result / "run.parquet")["environment_json"]
    assert json.loads(environment)["allocation"] == "shared", "it asked for no whole nodes"
    own = ranks.filter(pl.col("node") == "n1")["device_uuid"].to_list()
    assert own == ranks.filter(pl.col("node") == "n2")["device_uuid"].to_list(), "each node shares out its own cores"
    assert ranks["train_samples"].to_list() == [8] * 8


# --- under fire

INSTANTS = int(os.environ.get("PYTEST_FIRE_INSTANTS", "3"))
"""How often something is killed, each time in another way, of which there are eight."""
SEED = 1
LASTS_S = 12
"""How long a run without torch trains, most of which it waits."""
AT_LEAST = 8
"""Runs that are to be left when something is killed; where fewer are, the sweep is submitted with more repeats."""


@fault(
    "lifecycle",
    "Everything at once",
    injection="a sweep of three shapes, one of them on two nodes: SIGKILL to the launcher between sbatch and its "
    "record; then, at random instants, to ranks, to supervisors, to the controller, also before a submit, and to a "
    "node's slurmd, alone or with all of its jobs; steps are cancelled, and jobs requeued; with accounting and without",
    outcome="submitting again ends with a valid result of every run, whose losses are those of undisturbed ones, bit "
    "for bit; none was trained to its end twice; status never calls a run that trains missing, or a done one another",
)
@pytest.mark.early
@pytest.mark.timeout(3600)  # minutes on two cores, and more on two that others use, too
@pytest.mark.parametrize("variant", ["accounting", "no_accounting"])
def test_a_sweep_under_fire(variant: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cluster: Cluster = request.getfixturevalue(variant)
    cluster.restore()
    rng = random.Random(f"{SEED} {variant}")  # other kinds first
    fire = Fire(cluster, tmp_path, rng)
    sweep = fire.sweep
    fire.kill_the_launcher()
    sweep.submit()
    queue = cluster.run("squeue", "--array", "--noheader", "--format=%F_%K").split()
    assert len(set(queue)) == len(queue) == len(sweep.runs), "adopted: each run is in one job"
    for kind in itertools.islice(fire.kinds(), INSTANTS):
        fire.watch(rng.uniform(0, 3))
        fire.keep_up()
        fire.blow(kind)
        fire.look()
        if rng.random() < 0.5:
            with sweep.nothing_starts():  # else a submission on busy cores lasts as long as what is to be hit next
                sweep.submit()
    fire.end()
    assert {run.state().label for run in sweep.runs} == {"ok"}
    assert {run.path.name: times for run in sweep.runs if (times := times_finished(run)) != 1} == {}
    assert fire.learned() == fire.undisturbed()


@dataclass
class Fire:
    """A sweep of which something is killed again and again, while `status` is asked."""

    cluster: Cluster
    folder: Path
    rng: random.Random
    repeats: int = 6
    """Of the runs on one node; the first two also of those on two nodes."""
    done: set[str] = field(default_factory=set)
    """The runs that status has called ok."""

    def __post_init__(self) -> None:
        self.sweep = Sweep(self.cluster, self.folder / "results", self.arguments(steps_s=LASTS_S / 8, nodes=2))

    def arguments(self, *, steps_s: float, nodes: int) -> tuple[str, ...]:
        """Those of `submit`."""
        alone = (
            f"strategy:[light],strategy.step_s:[{steps_s}],cores_per_device:[1,2],repeat:{list(range(self.repeats))}"
        )
        pairs = f"strategy:[ddp],devices:[2],nodes:[{nodes}],repeat:[0,1]"
        blocks = f"sweep.blocks=[{{grid:{{{alone}}}}},{{grid:{{{pairs}}}}}]"
        own = ("epochs=4", "measure.telemetry_hz=0", "launcher.checkpoint=always", "launcher.checkpoint_every_s=1")
        return (*WITHOUT_TORCH[:-1], *QUICK[:-1], *own, blocks)

    def on_slurm(self) -> tuple[str, ...]:
        """Two jobs at once on a node, by their memory."""
        return ("launcher.memory_gib_per_device=5", "launcher.attempts=10")

    # --- what is true, and what status says

    def truth(self) -> dict[str, str]:
        """The runs that a supervisor is at work on: their names, and who it is."""
        found = {}
        for run in self.sweep.runs:
            attempts = run.attempts()
            supervisor = attempts[-1].supervisor() if attempts else None
            if supervisor is not None and attempts[-1].outcome() is None and _supervises(supervisor.pid):
                found[run.path.name] = f"{attempts[-1].number} {supervisor}"
        return found

    def look(self) -> None:
        """Ask for the states, which must be true."""
        before = self.truth()
        said = self.status()
        after = self.truth()
        for name, state in said.items():
            if name in self.done:
                assert state == "ok", f"{name} was done, and is {state}"
            if name in before and before[name] == after.get(name):
                assert state == "running", f"{name} trains, and is {state}: {before[name]}"
            if state == "ok":
                assert RunFolder(self.sweep.runs[0].path.parent / name).state().label == "ok", name
                self.done.add(name)

    def status(self) -> dict[str, str]:
        command = [sys.executable, "-m", "parallelbench.cli", "status", str(self.sweep.results), "--json"]
        done = subprocess.run(command, env=self.cluster.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
        return {Path(row["folder"]).name: row["state"] for row in json.loads(done.stdout)["runs"]}

    def watch(self, seconds: float) -> None:
        """Look again and again."""
        until = time.monotonic() + seconds
        self.look()
        while time.monotonic() < until:
            self.look()

    # --- what is killed

    def kinds(self) -> Iterator[str]:
        """All of them in any order, then all again."""
        while True:
            yield from self.rng.sample(list(self.blows()), len(self.blows()))

    def blows(self) -> dict[str, Callable[[], object]]:
        return {
            "rank": lambda: self._kill("parallelbench.training.worker"),
            "supervisor": lambda: self._kill("launch.slurm.start"),
            "controller": lambda: self._controller(submits=False),
            "controller before a submit": lambda: self._controller(submits=True),
            "step": lambda: self._scancel_a_step(),
            "requeue": lambda: self._requeue(),
            "slurmd": lambda: self._node(crashes=False),
            "node": lambda: self._node(crashes=True),
        }

    def blow(self, kind: str) -> None:
        print(f"{len(self.done)} of {len(self.sweep.runs)} done: {kind}", flush=True)
        self.blows()[kind]()

    def kill_the_launcher(self) -> None:
        """An sbatch that submits, and kills whoever called it before that learns the job's id."""
        asks = '[[ $1 == --test-only ]] && exec $REAL "$@"'
        programs = self.folder / "bin"
        stand_in(self.cluster, programs, "sbatch", f'{asks}\n$REAL "$@" > /dev/null\nkill -KILL $PPID')
        self.sweep.arguments += self.on_slurm()
        assert self.sweep.submission(path=programs).returncode == -signal.SIGKILL
        assert self.sweep.jobs == []

    def keep_up(self) -> None:
        """See to it that there is something to hit."""
        self.cluster.resume_drained()
        if len(self.sweep.runs) - len(self.done) < AT_LEAST:
            self.repeats += AT_LEAST // 2
            self.sweep.arguments = (*self.arguments(steps_s=LASTS_S / 8, nodes=2), *self.on_slurm())
        if not self.sweep.queued() or len(self.sweep.runs) - len(self.done) < AT_LEAST:
            self.sweep.submit()

    def _one_of(self, found: Callable[[], list[Any]], what: str) -> Any:
        return self.rng.choice(self.sweep.wait(found, what))

    def _kill(self, program: str) -> None:
        def killed() -> bool:
            found = [process for process in self.sweep.processes() if _executes(process, program)]
            try:
                if found:
                    self.rng.choice(found).kill()
            except psutil.NoSuchProcess:
                return False
            return bool(found)

        self.sweep.wait(killed, f"a process of {program}")

    def _scancel_a_step(self) -> None:
        def steps() -> list[str]:
            told = self.cluster.run("squeue", "--steps", "--noheader", "--format=%i").split()
            return [step for step in told if step.endswith(".0")]

        self.cluster.run("scancel", self._one_of(steps, "a step"), check=False)  # it may have just ended

    def _requeue(self) -> None:
        def jobs() -> list[str]:
            return self.cluster.run("squeue", "--noheader", "--array", "--states=R", "--format=%i").split()

        self.cluster.run("scontrol", "requeue", self._one_of(jobs, "a job"), check=False)

    def _controller(self, *, submits: bool) -> None:
        self.cluster.wait_saved()
        self.cluster.kill("slurmctld")
        if submits:
            refused = self.sweep.submission(patient=False)
            assert refused.returncode == 2, refused.stderr
            assert "is slurmctld up? Nothing is lost" in refused.stderr
        self.look()
        self.cluster.start("slurmctld")

    def _node(self, *, crashes: bool) -> None:
        node = self.rng.choice(NODES)
        if crashes:
            self.cluster.crash_node(node, noticed=True)
        else:
            self.cluster.kill(node)
        self.look()
        self.cluster.start(node)

    # --- the end

    def end(self) -> None:
        """Submit until all is done, which takes some submissions for what was killed."""

        def over() -> bool:
            self.cluster.resume_drained()
            return not self.sweep.queued()

        while self._left():
            self.sweep.wait(over, "the end of all jobs", interval_s=0.5)
            given_up = [run.state() for run in self.sweep.runs if run.state().state == "failed"]
            assert all(state.to_run for state in given_up), self.sweep.story()
            self.sweep.submit()
        self.sweep.over()
        self.look()
        assert len(self.done) == len(self.sweep.runs)

    def _left(self) -> bool:
        return any(run.state().state != "done" for run in self.sweep.runs)

    def learned(self) -> dict[tuple[object, ...], object]:
        return {_which(run): learned(run) for run in self.sweep.runs}

    def undisturbed(self) -> dict[tuple[object, ...], object]:
        """The same of runs on this machine, where a step does not wait, and two ranks are on one node."""
        results = self.folder / "undisturbed"
        arguments = self.arguments(steps_s=0.0, nodes=1)
        code, text = completed("submit", *arguments, "launcher.oversubscribe=true", results=results)
        assert code == 0, text
        return {_which(run): learned(run) for run in find_runs(results)}


def _which(run: RunFolder) -> tuple[object, ...]:
    plain = load_yaml((run.path / "config.yaml").read_bytes())
    return plain["strategy"]["name"], plain["cores_per_device"], plain["repeat"]


def _executes(process: psutil.Process, program: str) -> bool:
    try:
        words = process.cmdline()
        return program in words and "srun" not in words[0]
    except psutil.Error:
        return False


def _supervises(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return is_alive(process) and _executes(process, "launch.slurm.start")
    except psutil.Error:
        return False
