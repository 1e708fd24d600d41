"""Packed jobs on real Slurm: many runs in one allocation, which is warned, or ended, somewhere in the middle."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from parallelbench.results.folder import RunFolder
from tests.helpers import TINY
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Sweep, learned

PACKED = "launcher.pack=true"
ENDLESS = 1_000_000
QUICK = (*TINY, "measure.parity=false", "measure.telemetry_hz=0", "launcher.memory_gib_per_device=2.5")
"""Slurm counts the memory that forks share once for each of them."""
PAIR = (*QUICK, "strategy=ddp", "devices=2", "launcher.oversubscribe=true", "sweep.order=listed")


@pytest.fixture
def fresh(no_accounting: Cluster) -> Cluster:
    no_accounting.restore()
    return no_accounting


def labels(sweep: Sweep) -> dict[int, str]:
    """State by the number of epochs, which tells the runs of these tests apart."""
    return {run.config().epochs: run.state().label for run in sweep.runs}


def by_epochs(sweep: Sweep, epochs: int) -> RunFolder:
    (run,) = (run for run in sweep.runs if run.config().epochs == epochs)
    return run


def in_the_middle(sweep: Sweep) -> None:
    """Submit three runs in one job, and wait until the second, which has no end of its own, trains."""
    assert "1 task of" in sweep.submit(PACKED, f"epochs=1,{ENDLESS},2")
    endless = by_epochs(sweep, ENDLESS)
    sweep.wait(endless.attempts, "the second run")
    sweep.epochs(endless.attempts()[0], at_least=1)


def stop_the_second_attempt(sweep: Sweep) -> None:
    """End the run that has no end of its own where it goes on, so that its job goes on to the next."""
    attempts = by_epochs(sweep, ENDLESS).attempts
    sweep.wait(lambda: len(attempts()) == 2, "the second attempt")
    attempts()[1].ask_to_stop()


def all_learned(sweep: Sweep) -> dict[str, object]:
    return {run.path.name.rpartition("-")[0]: learned(run) for run in sweep.runs}


def test_a_packed_job_trains_bit_for_bit_like_separate_ones(fresh: Cluster, tmp_path: Path) -> None:
    pairs = "sweep.blocks=[{zip:{strategy:[single,ddp],devices:[1,2]}}]"
    options = (*QUICK, pairs, "epochs=2", "sweep.repeats=2", "launcher.oversubscribe=true")
    sweeps = {
        packed: Sweep(fresh, tmp_path / packed, (*options, f"launcher.pack={packed}")) for packed in ("true", "false")
    }
    for packed, sweep in sweeps.items():
        said = sweep.submit()
        jobs = 2 if packed == "true" else 4
        assert (len(sweep.jobs), len(sweep.runs)) == (jobs, 4), "one for each shape, and for each of its turns"
        assert said.count("1 task of") == jobs
        sweep.wait(lambda: all(run.state().state == "done" for run in sweep.runs), "four results")  # noqa: B023
        assert "started cold" not in sweep.log()
        for run in sweep.runs:
            assert pl.read_parquet(run.result / "run.parquet")["packed"].to_list() == [packed == "true"]
    assert all_learned(sweeps["true"]) == all_learned(sweeps["false"])


def test_a_warned_job_stops_its_run_and_does_the_rest_when_it_starts_again(fresh: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(fresh, tmp_path, (*PAIR, "launcher.attempts=2"))
    in_the_middle(sweep)
    fresh.run("scancel", "--batch", "--signal=USR2", sweep.job)
    stop_the_second_attempt(sweep)
    sweep.wait(lambda: labels(sweep)[ENDLESS] == "timeout", "its end")
    assert labels(sweep) == {1: "ok", ENDLESS: "timeout", 2: "ok"}, sweep.story()
    assert {run.config().epochs: len(run.attempts()) for run in sweep.runs} == {1: 1, ENDLESS: 2, 2: 1}
    first = by_epochs(sweep, ENDLESS).attempts()[0].outcome()
    assert first is not None
    assert first.reason.startswith("stopped after epoch"), "in order, not by force"


def test_a_cancelled_job_leaves_what_is_finished_and_the_rest_is_submitted_again(
    fresh: Cluster, tmp_path: Path
) -> None:
    sweep = Sweep(fresh, tmp_path, PAIR)
    in_the_middle(sweep)
    fresh.run("scancel", sweep.job)
    sweep.wait(lambda: not sweep.queued(), "the end of the job")
    assert labels(sweep) == {1: "ok", ENDLESS: "killed", 2: "missing"}, sweep.story()

    assert "not submitted: 1 done; 2 runs" in sweep.submit(PACKED, f"epochs=1,{ENDLESS},2")
    stop_the_second_attempt(sweep)
    sweep.wait(lambda: labels(sweep)[2] == "ok", "the last run")
    assert labels(sweep) == {1: "ok", ENDLESS: "timeout", 2: "ok"}, sweep.story()
    assert {run.config().epochs: len(run.attempts()) for run in sweep.runs} == {1: 1, ENDLESS: 2, 2: 1}
