"""The main story: a sweep goes to Slurm and comes back as a report, whatever is killed meanwhile."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import polars as pl
import psutil
import pytest

from tests.faults import fault
from tests.slurm.cluster import Cluster
from tests.slurm.runs import QUICK, Sweep, times_finished


@pytest.fixture
def accounted(accounting: Cluster) -> Cluster:
    accounting.restore()
    return accounting


def test_the_demo_runs_on_slurm_to_a_report(accounted: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(accounted, tmp_path, ("sweep=demo", "sweep.repeats=1"))
    sweep.submit()
    sweep.wait(lambda: all(run.state().state == "done" for run in sweep.runs), "three results")
    assert [run.state().label for run in sweep.runs] == ["ok"] * 3, sweep.story()
    reported = sweep.program("report", str(tmp_path / "demo"))
    assert reported.returncode == 0, reported.stderr
    table = pl.read_csv(tmp_path / "demo" / "report" / "tables" / "configurations.csv")
    assert table["outcomes"].to_list() == ["1 ok"] * 3
    assert "not a run" not in (tmp_path / "demo" / "report" / "index.html").read_text()
    assert "not submitted: 3 done; 0 run(s)" in sweep.submit()


def test_eight_ranks_on_two_nodes(accounted: Cluster, tmp_path: Path) -> None:
    options = ("strategy=ddp", "devices=8", "nodes=2", "epochs=2", "launcher.oversubscribe=true")
    sweep = Sweep(accounted, tmp_path, (*QUICK, *options))
    sweep.submit()
    run = sweep.done()
    ranks = pl.read_parquet(run.result / "ranks.parquet").filter(pl.col("epoch") == 2).sort("rank")
    assert ranks["rank"].to_list() == list(range(8))
    assert ranks["node"].to_list() == ["n1"] * 4 + ["n2"] * 4
    assert ranks["local_rank"].to_list() == [0, 1, 2, 3] * 2
    own = ranks.filter(pl.col("node") == "n1")["device_uuid"].to_list()
    assert own == ranks.filter(pl.col("node") == "n2")["device_uuid"].to_list(), "each node shares out its own cores"
    assert ranks["train_samples"].to_list() == [8] * 8


# --- under fire


@fault(
    "lifecycle",
    "Everything at once",
    injection="during a sweep of single runs: SIGKILL to random ranks, crashed nodes, a killed controller",
    outcome="submitting again ends with a valid result of every run, and none was trained to its end twice",
)
@pytest.mark.parametrize(("variant", "runs", "kills"), [("accounting", 40, 6), ("no_accounting", 6, 3)])
def test_a_sweep_under_fire(
    variant: str, runs: int, kills: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cluster: Cluster = request.getfixturevalue(variant)
    cluster.restore()
    chance = random.Random(variant)
    sweep = Sweep(cluster, tmp_path, (*QUICK, "epochs=2", f"sweep.repeats={runs}", "launcher.attempts=10"))
    sweep.submit()
    injected = []
    for kill in range(kills):
        sweep.settle(at_least=kill * runs // kills)
        injected.append(_kill_something(sweep, chance))
        sweep.submit()
    while sweep.settle(at_least=runs) < runs:
        sweep.submit()
    assert {run.state().label for run in sweep.runs} == {"ok"}
    assert len(sweep.runs) == runs
    assert [times_finished(run) for run in sweep.runs] == [1] * runs, injected


def _kill_something(sweep: Sweep, chance: random.Random) -> str:
    """A process of a run that trains, or a node, or the controller."""
    victim = chance.choice(["process", "process", "node", "slurmctld"])
    if victim == "slurmctld":
        sweep.cluster.kill("slurmctld")
        sweep.cluster.start("slurmctld")
    elif victim == "node":
        node = chance.choice(["n1", "n2"])
        sweep.cluster.crash_node(node)
        sweep.cluster.start(node)
    elif workers := [p for p in sweep.processes() if "parallelbench.worker" in p.cmdline()]:
        with suppress(psutil.NoSuchProcess):
            chance.choice(workers).kill()
    return victim
