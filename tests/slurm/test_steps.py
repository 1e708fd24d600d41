"""The steps by which a job starts its processes: what ends them early, and the containers that they are in."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import psutil
import pytest

from parallelbench.results.attempt import Attempt
from parallelbench.results.folder import RunFolder
from tests.faults import fault
from tests.slurm.cluster import Cluster
from tests.slurm.containers import Runtime, container_site
from tests.slurm.jobs import show
from tests.slurm.runs import (
    ENDLESS,
    LIGHT,
    ON_TWO_NODES,
    QUICK,
    TWO_NODES,
    WITHOUT_TORCH,
    Sweep,
    stand_in,
    times_finished,
)
from tests.slurm.test_lifecycle import SAVING, give_back, preempt, warn

BRIEF = (*WITHOUT_TORCH, *QUICK, "epochs=2")
STALLS_OUTSIDE = 'exec -a "stalled $RESULTS" sleep 600'
"""srun itself, which has not asked for its step yet."""
STALLS_INSIDE = """
while [[ $1 == --* ]]; do flags+=("$1"); shift; done
exec $REAL "${flags[@]}" bash -c 'exec -a "stalled $RESULTS" sleep 600'
"""
"""The task of its step, which has not begun to handle signals yet."""


def stalled(sweep: Sweep, where: str) -> Attempt:
    """Submit a run whose first step stalls before it is ready; its attempt, once that is so."""
    folder = sweep.results.parent
    begun = f'RESULTS={sweep.results}; export RESULTS; mkdir {folder}/begun 2> /dev/null || exec $REAL "$@"\n'
    stand_in(sweep.cluster, folder / "bin", "srun", begun + where)
    assert sweep.submission(path=folder / "bin").returncode == 0
    attempt = sweep.attempt()
    sweep.wait(lambda: any("stalled" in process.cmdline()[0] for process in sweep.processes()), "a stalled step")
    return attempt


@fault(
    "lifecycle",
    "A job is cancelled, or warned, before its ranks begin",
    injection="scancel, or the time limit's warning, while srun, or the task that it starts, is not ready yet",
    outcome="the attempt ends with an outcome, no process is left, and submitting again trains",
)
@pytest.mark.parametrize("where", [STALLS_OUTSIDE, STALLS_INSIDE], ids=["srun", "task"])
@pytest.mark.parametrize("how", ["cancel", "warning"])
@pytest.mark.parametrize("variant", ["no_accounting", "cgroup"])
def test_a_step_that_is_not_ready_ends(
    variant: str, how: str, where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cluster: Cluster = request.getfixturevalue(variant)
    cluster.restore()
    sweep = Sweep(cluster, tmp_path / "results", (*BRIEF, "launcher.signal_delay_s=2"))
    attempt = stalled(sweep, where)
    if how == "cancel":
        cluster.run("scancel", sweep.job)
    else:
        warn(sweep)
    outcome, reason = sweep.outcome(attempt)
    assert outcome == ("killed" if how == "cancel" else "timeout"), reason
    sweep.over()
    assert sweep.run.state().to_run, sweep.story()
    sweep.submit("launcher.time_limit_min=61")
    assert times_finished(sweep.done()) == 1


@fault(
    "lifecycle",
    "Preemption before the ranks begin",
    injection="a preemption's grace begins, and its SIGTERM ends the task of a step that is not ready yet",
    outcome="the attempt ends as killed; the job queues itself again, and its next start trains",
)
@pytest.mark.parametrize(
    "special", [{"variant": variant, "grace_time_s": 60} for variant in ("cgroup", "no_accounting")], indirect=True
)
def test_a_job_that_is_preempted_before_its_ranks_begin_is_queued_again(special: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(special, tmp_path / "results", (*BRIEF, *SAVING, "site.partition=preemptible"))
    attempt = stalled(sweep, STALLS_INSIDE)
    urgent = preempt(sweep)
    assert sweep.outcome(attempt)[0] == "killed"
    give_back(sweep, urgent)
    assert times_finished(sweep.done()) == 1
    assert (len(sweep.jobs), show(special, sweep.job)["Restarts"]) == (1, "1")


@fault(
    "lifecycle",
    "srun fails at once",
    injection="Slurm refuses the step (a node that the job lacks, more memory), or srun does not know an option",
    outcome="the attempt ends with srun's own words in one line, and so does the job",
)
@pytest.mark.parametrize(
    ("option", "outcome", "word"),
    [
        ("--nodelist=n2", "killed", "Requested node configuration is not available"),
        ("--mem=9G", "killed", "Memory required by task is not available"),
        ("--nowhere", "error", "unrecognized option '--nowhere'"),
    ],
)
def test_a_step_that_slurm_refuses(option: str, outcome: str, word: str, ours: Cluster, tmp_path: Path) -> None:
    stand_in(ours, tmp_path / "bin", "srun", f'exec $REAL {option} "$@"')
    sweep = Sweep(ours, tmp_path / "results", (*BRIEF, "site.nodelist=n1"))
    assert sweep.submission(path=tmp_path / "bin").returncode == 0
    found, reason = sweep.outcome(sweep.attempt())
    assert (found, "no rank was started" in reason, word in reason) == (outcome, True, True), reason
    assert "\n" not in reason
    sweep.over()
    assert (sweep.run.state().to_run, len(sweep.run.attempts())) == (outcome == "killed", 1)


@fault(
    "lifecycle",
    "The controller is away as ranks are to begin",
    injection="a job runs, and no controller is there when its supervisor asks for the first step, but soon after",
    outcome="the supervisor waits for it, and the run is ok in its first attempt",
)
@pytest.mark.early  # srun waits for a minute or two until a controller that is back trusts its nodes
def test_a_step_waits_for_a_controller_that_is_away(ours: Cluster, tmp_path: Path) -> None:
    (tmp_path / "conf" / "site").mkdir(parents=True)
    (tmp_path / "conf" / "site" / "held.yaml").write_text(
        "defaults: [local_cluster, _self_]\nname: held\n"
        f"setup: ['touch {tmp_path}/here', 'while [ ! -e {tmp_path}/go ]; do sleep 0.1; done']\n"
    )
    shutil.copytree(LIGHT / "conf" / "strategy", tmp_path / "conf" / "strategy")
    own = ("--conf", str(tmp_path / "conf"), *BRIEF[2:], "site=held")
    stand_in(ours, tmp_path / "bin", "scontrol", f'$REAL "$@"; code=$?; echo $code >> {tmp_path}/asked; exit $code')
    sweep = Sweep(ours, tmp_path / "results", own)
    done = sweep.submission(path=tmp_path / "bin")
    assert done.returncode == 0, done.stderr + done.stdout
    sweep.wait((tmp_path / "here").exists, "the job's begin")
    (tmp_path / "asked").unlink(missing_ok=True)
    ours.run("scontrol", "update", f"JobId={sweep.job}", "Comment=begun")  # a change, which is saved together with that
    ours.wait_saved()
    ours.kill("slurmctld")
    (tmp_path / "go").touch()
    sweep.wait((tmp_path / "asked").exists, "a question to no controller")
    assert (tmp_path / "asked").read_text().startswith("1\n")
    ours.start("slurmctld")
    run = sweep.done()
    assert (len(run.attempts()), times_finished(run)) == (1, 1)


@fault(
    "workers",
    "A node hangs",
    injection="the second of two nodes is stopped whole, and Slurm waits for it; launcher.collective_timeout_s=15",
    outcome="timeout, naming the rank that hangs, though srun still waits for its task; the job ends",
)
@pytest.mark.early
@pytest.mark.parametrize("special", [{"slurmd_timeout_s": 600}], indirect=True)
def test_a_step_ends_where_one_of_its_nodes_answers_no_more(special: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(special, tmp_path, (*TWO_NODES, ENDLESS, "launcher.collective_timeout_s=15"))
    sweep.submit()
    attempt = sweep.attempt()
    sweep.epochs(attempt, at_least=1)
    with special.frozen_node("n2"):
        outcome, reason = sweep.outcome(attempt)
        assert (outcome, reason.partition(":")[0]) == ("timeout", "rank 1 hangs")
    sweep.over()


# --- packed runs

PACKED = (*QUICK, "launcher.memory_gib_per_device=2.5", "launcher.pack=true", "sweep.order=listed", "epochs=2")


def by_rate(sweep: Sweep) -> dict[tuple[float, bool], RunFolder]:
    """The runs of a sweep, by learning rate and whether they are deterministic."""
    found = {}
    for run in sweep.runs:
        config = run.config()
        found[config.optimizer.lr, config.measure.deterministic] = run
    return found


def test_packed_runs_of_two_environments_follow_one_that_fails(ours: Cluster, tmp_path: Path) -> None:
    """A warm process has one environment, and all of its job's cores: the next one begins when it is gone."""
    rates = ("optimizer=sgd", "model=mlp", "model.hidden=[16]", "optimizer.lr=1e30,0.1")
    sweep = Sweep(ours, tmp_path, (*PACKED, *rates, "measure.deterministic=false,true"))
    assert "1 task of" in sweep.submit()
    sweep.over()
    labels = {key: run.state().label for key, run in by_rate(sweep).items()}
    assert labels == {(1e30, False): "nan", (1e30, True): "nan", (0.1, False): "ok", (0.1, True): "ok"}, sweep.story()
    assert "started cold" not in sweep.log()
    assert [len(run.attempts()) for run in sweep.runs] == [1] * 4


@fault(
    "workers",
    "The warm process of a packed job is killed",
    injection="SIGKILL to the process that all runs of a job are forked from, while the first trains",
    outcome="the first is killed with it; the others are forked from the next one",
)
def test_a_packed_job_outlives_its_warm_process(ours: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(ours, tmp_path, (*PACKED[:-1], "epochs=1000000,1,2"))
    sweep.submit()
    first = next(run for run in sweep.runs if run.config().epochs == 1_000_000)
    sweep.wait(lambda: first.attempts() and first.attempts()[0].info(), "the first run")
    attempt = first.attempts()[0]
    sweep.epochs(attempt, at_least=1)
    warm = next(
        process
        for process in psutil.Process(sweep.pid_of("rank 0", attempt)).parents()
        if "parallelbench.training.warm" in process.cmdline()
    )
    warm.send_signal(signal.SIGKILL)
    sweep.over()
    labels = {run.config().epochs: run.state().label for run in sweep.runs}
    assert labels == {1_000_000: "killed", 1: "ok", 2: "ok"}, sweep.story()
    assert "started cold" not in sweep.log()


# --- containers


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_in_a_container_has_its_folders_also_where_results_are_a_link(
    runtime: Runtime, nodes: int, ours: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to("disk")
    programs, site = container_site(ours, tmp_path, runtime)
    shape = (*ON_TWO_NODES, "strategy=ddp") if nodes == 2 else QUICK
    sweep = Sweep(ours, tmp_path / "results", (*shape, "epochs=1", *site))
    done = sweep.submission(path=programs)
    assert done.returncode == 0, done.stderr + done.stdout
    run = sweep.done()
    assert (tmp_path / "asked.txt").read_text() == "/images/bench.sqsh\n" * (nodes if runtime == "apptainer" else 1)
    assert pl.read_parquet(run.result / "run.parquet")["nodes"].to_list() == [nodes]


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_packed_job_in_a_container_is_forked_there(runtime: Runtime, ours: Cluster, tmp_path: Path) -> None:
    programs, site = container_site(ours, tmp_path, runtime)
    sweep = Sweep(ours, tmp_path / "results", (*PACKED, "seed=1,2", *site))
    done = sweep.submission(path=programs)
    assert done.returncode == 0, done.stderr + done.stdout
    sweep.over()
    assert [run.state().label for run in sweep.runs] == ["ok"] * 2, sweep.story()
    assert "started cold" not in sweep.log()
    assert (tmp_path / "asked.txt").read_text() == "/images/bench.sqsh\n"


def run_on_two_nodes(command: list[str], runtime: Runtime, cluster: Cluster, folder: Path) -> str:
    """What a command prints whose job's steps are in a container."""
    programs, site = container_site(cluster, folder, runtime)
    env = cluster.env | {"PATH": f"{programs}:{cluster.env['PATH']}"}
    words = [sys.executable, "-m", *command, *site, "nodes=2", f"results={folder / 'results'}"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_calibration_on_two_nodes_works_in_a_container(ours: Cluster, tmp_path: Path) -> None:
    table = tmp_path / "table.parquet"
    command = ["parallelbench.cli", "calibrate", "launcher=slurm", "devices=2", f"--out={table}"]
    run_on_two_nodes(command, "apptainer", ours, tmp_path)
    assert pl.read_parquet(table).height > 0


def test_the_checks_of_gpus_on_two_nodes_work_in_a_container(ours: Cluster, tmp_path: Path) -> None:
    name = "strategy sandblaster_lbfgs"
    command = ["launch.slurm.errands", "gpu-check", "--rehearse", f"--only={name}"]
    assert f"{name} | ok" in run_on_two_nodes(command, "pyxis", ours, tmp_path)
