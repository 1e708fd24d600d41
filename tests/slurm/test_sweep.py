"""The main story: a sweep goes to Slurm and comes back as a report, whatever is killed meanwhile."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import polars as pl
import psutil
import pytest

from tests.faults import fault
from tests.slurm.cluster import Cluster
from tests.slurm.runs import QUICK, WITHOUT_TORCH, Sweep, times_finished


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

RUNS = 40
VICTIMS = ("rank", "n1", "slurmctld", "rank", "slurmctld, while submitting", "n2")
"""Killed one after the other while the runs go on; the launcher was killed before."""


@fault(
    "lifecycle",
    "Everything at once",
    injection="a sweep of 40 single runs: SIGKILL to the launcher between sbatch and its record, to ranks, and to the "
    "controller, also before a submit; both nodes die, one after the other; with accounting and without",
    outcome="submitting again ends with a valid result of every run, and none was trained to its end twice",
)
@pytest.mark.early
@pytest.mark.timeout(1800)  # minutes on two cores, and more on two that others use, too
@pytest.mark.parametrize("variant", ["accounting", "no_accounting"])
def test_a_sweep_under_fire(variant: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cluster: Cluster = request.getfixturevalue(variant)
    cluster.restore()
    fast = ("epochs=1", "strategy.step_s=1", "measure.telemetry_hz=0", "launcher.attempts=10")
    few_at_once = "launcher.array_parallelism=5"  # so that runs are left for the last one that is killed
    sweep = Sweep(cluster, tmp_path / "results", (*WITHOUT_TORCH, *QUICK, *fast, few_at_once, f"sweep.repeats={RUNS}"))
    _kill_the_launcher(sweep, tmp_path)
    sweep.submit()
    assert len(sweep.jobs) == 1, "adopted"
    for number, victim in enumerate(VICTIMS):
        done = sweep.settle(at_least=number * RUNS // (len(VICTIMS) + 1))
        assert done < RUNS, f"nothing was left for the {victim}"
        _kill(sweep, victim)
        with sweep.nothing_starts():  # else a submission on busy cores lasts as long as what the next victim is to end
            sweep.submit()
    while sweep.settle(at_least=RUNS) < RUNS:
        sweep.submit()
    assert {run.state().label for run in sweep.runs} == {"ok"}
    assert [times_finished(run) for run in sweep.runs] == [1] * RUNS


def _kill_the_launcher(sweep: Sweep, tmp_path: Path) -> None:
    """An sbatch that submits, and kills whoever called it before that learns the job's id."""
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "sbatch"
    real = shutil.which("sbatch", path=sweep.cluster.env["PATH"])
    asks = f'[[ $1 == --test-only ]] && exec {real} "$@"'
    wrapper.write_text(f'#!/bin/bash\n{asks}\n{real} "$@" > /dev/null\nkill -KILL $PPID\n')
    wrapper.chmod(0o755)
    assert sweep.submission(path=wrapper.parent).returncode == -signal.SIGKILL
    assert sweep.jobs == []


def _kill(sweep: Sweep, victim: str) -> None:
    """And start it again where it is a daemon."""
    if victim == "rank":
        # Of a run that trains: one that has just ended gives its place to the next.
        sweep.wait(lambda: any(map(_killed, sweep.processes())), "a rank to kill")
        return
    daemon = victim.partition(",")[0]
    if daemon == "slurmctld":
        sweep.cluster.wait_saved()
        sweep.cluster.kill(daemon)
    else:
        sweep.cluster.crash_node(daemon, noticed=True)
    if victim != daemon:
        refused = sweep.submission(patient=False)
        assert refused.returncode == 2, refused.stderr
        assert "is slurmctld up? Nothing is lost" in refused.stderr
    sweep.cluster.start(daemon)


def _killed(process: psutil.Process) -> bool:
    """Whether this is a rank; it is killed."""
    with suppress(psutil.NoSuchProcess):
        if "parallelbench.training.worker" in process.cmdline():
            process.kill()
            return True
    return False
