"""Whole runs in processes of their own: what they leave behind when all goes well, and when it doesn't."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pyarrow.parquet as pq
import pytest

from analysis import excluded, load, summary
from analysis.metrics.disturbance import WINDOWS, disturbances
from analysis.report.warnings import warnings
from parallelbench.cli import main
from parallelbench.results.attempt import Outcome
from parallelbench.results.folder import RunFolder, find_runs
from parallelbench.results.publish import NO_CLOSING
from parallelbench.results.tables import CLOSING, TABLES
from parallelbench.world.machine import this_machine
from tests.faults import fault
from tests.helpers import TINY, fill_disk
from tests.launch.programs import Program, completed, finished_epochs, kill, own_strategy, the_run
from tests.warm import cold

pytestmark = pytest.mark.slow

QUICK = (*TINY, "measure.parity=false", "measure.probe=false")
DDP = (*QUICK, "strategy=ddp", "devices=2", "launcher.oversubscribe=true")
ENDLESS = "epochs=1000000"


def two_cores() -> None:
    """Runs between fork and exec."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def tables(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    return {table: pq.read_table(folder.result / f"{table}.parquet").to_pylist() for table in TABLES}


def outcome_of(folder: RunFolder) -> Outcome:
    state = folder.state()
    assert state.state == "failed"
    assert state.outcome is not None
    assert state.outcome.reason.strip()
    return state.outcome


# --- runs that go well

STRATEGIES = {
    "single x1": ("single", 1),
    "ddp x2": ("ddp", 2),
    "model_parallel x2": ("model_parallel", 2),
    "ddp x4": ("ddp", 4),
    "model_parallel x3": ("model_parallel", 3),
}


def the_sweep() -> list[str]:
    strategies, devices = (",".join(str(value[part]) for value in STRATEGIES.values()) for part in (0, 1))
    options = ["model=mlp", "model.hidden=[32,16]", "epochs=3", "launcher.oversubscribe=true", "sweep.order=listed"]
    return ["submit", *TINY, *options, f"sweep.blocks=[{{zip:{{strategy:[{strategies}],devices:[{devices}]}}}}]"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """One sweep over the strategies on two cores, all finished: folder by name."""
    results = tmp_path_factory.mktemp("finished") / "results"
    code, text = completed(*the_sweep(), results=results, preexec=two_cores)
    assert code == 0, text
    runs = {(r.config().strategy.name, r.config().devices): r for r in find_runs(results)}
    return {name: runs[key] for name, key in STRATEGIES.items()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_leaves_all_tables_and_learns_what_one_device_learns(finished: dict[str, RunFolder], name: str) -> None:
    folder, run = finished[name], finished[name].config()
    assert (folder.state().state, folder.state().label) == ("done", "ok")
    content = tables(folder)
    for table, columns in TABLES.items():
        names = pq.read_schema(folder.result / f"{table}.parquet").names
        assert names == [column.name for column in columns]
    (row,) = content["run"]
    assert (row["processes"], row["steps_per_epoch"], row["dropped_samples"]) == (run.devices, 2, 0)
    assert row["parity_passed"] is (True if run.devices > 1 else None), "one device has nothing to be compared with"
    assert row["oversubscribed"] == (run.devices > len(os.sched_getaffinity(0)) or run.devices > 2)
    assert [e["epoch"] for e in content["epochs"]] == [1, 2, 3]
    for epoch in content["epochs"]:
        assert (epoch["train_samples"], epoch["test_samples"], epoch["steps"]) == (64, 30, 2)
        ranks = [r for r in content["ranks"] if r["epoch"] == epoch["epoch"]]
        assert sorted(r["rank"] for r in ranks) == list(range(run.devices))
        assert sum(r["train_samples"] for r in ranks) == 64
        assert sum(r["test_samples"] for r in ranks) == 30
        assert sum(r["test_loss_sum"] for r in ranks) / 30 == pytest.approx(epoch["test_loss"])
        assert sum(r["train_correct"] for r in ranks) / 64 == pytest.approx(epoch["train_accuracy"])
    one = tables(finished["single x1"])["epochs"]
    assert one[0]["train_loss"] != one[-1]["train_loss"], "it learned something"
    for expected, found in zip(one, content["epochs"], strict=True):
        for column in ("train_loss", "test_loss"):
            assert found[column] == pytest.approx(expected[column], abs=1e-4), "what one device learns"


@pytest.mark.exhaustive
def test_submitting_a_finished_sweep_again_starts_nothing(
    finished: dict[str, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    results = finished["single x1"].path.parents[1]
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    assert main([*the_sweep(), f"results={results}"]) == 0
    assert "5 runs are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before


def test_two_submits_at_once_execute_each_run_once(tmp_path: Path) -> None:
    results = tmp_path / "results"
    arguments = ("submit", *QUICK, "epochs=1,2")
    with Program(*arguments, results=results) as first, Program(*arguments, results=results) as second:
        assert (first.end(), second.end()) == (0, 0), first.text + second.text
    runs = find_runs(results)
    assert [len(run.attempts()) for run in runs] == [1, 1]
    assert [run.state().label for run in runs] == ["ok"] * 2


@pytest.mark.exhaustive
@fault(
    "workers",
    "torch.compile is switched off",
    injection="TORCHDYNAMO_DISABLE=1 in the shell, and compile=true",
    outcome="error, with the variables that do so in the reason: nothing is recorded as compiled that is not",
)
@pytest.mark.usefixtures("by_exec")
def test_a_run_that_compiles_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    code, text = completed("submit", *QUICK, "compile=true", results=tmp_path / "results")
    assert code == 1, text
    outcome = outcome_of(the_run(tmp_path / "results"))
    assert outcome.outcome == "error"
    assert outcome.reason.startswith("compile=true, but torch.compile compiled nothing: unset TORCHDYNAMO_DISABLE")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("by_exec", "compiler")
def test_the_second_run_of_one_process_is_compiled_too(tmp_path: Path) -> None:
    """What the first has compiled would serve it, and it would count as a run that compiles nothing."""
    inline = ("compile=true", "launcher=inline", "sweep.repeats=2")
    code, text = completed("submit", *QUICK, *inline, results=tmp_path / "results")
    assert code == 0, text


@pytest.mark.exhaustive
@fault(
    "workers",
    "torchrun fails by itself",
    injection="TORCH_LOGS=banana in the shell, for two ranks",
    outcome="error, with torch's own words in one line; submitting again does not try the run again",
)
@pytest.mark.usefixtures("by_exec")
def test_a_failure_of_torchruns_own_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "banana")
    for _ in range(2):
        code, text = completed("submit", *DDP, results=tmp_path / "results")
        assert code == 1, text
    folder = the_run(tmp_path / "results")
    assert len(folder.attempts()) == 1
    reason = outcome_of(folder).reason
    assert reason.startswith("no rank was started (exit code 1): ValueError: Invalid log settings: banana")
    assert "\n" not in reason


# --- kill -9

EPOCHS_UNDER_FIRE = 200
LAST_SHOT = 160
"""Lines of rank 0, which writes four in each epoch and goes on while a test waits for a core: far from the end."""


@fault(
    "workers",
    "Anything is killed at any time",
    injection="SIGKILL to supervisor, torchrun or a rank at instants chosen by the journals",
    outcome="finished epochs stay, no process is left, the next start is clean",
)
@pytest.mark.parametrize("victim", ["supervisor", "torchrun", "rank 0"])
@pytest.mark.cases("rank 0")
def test_kill_9_loses_no_finished_epoch_and_leaves_no_process(victim: str, tmp_path: Path) -> None:
    """Two kills of one process, at instants told by the journal: within its first lines, and deep in training."""
    chance = random.Random(victim)
    results = tmp_path / "results"
    arguments = ("run", *DDP, f"epochs={EPOCHS_UNDER_FIRE}")
    for number, lines in enumerate((chance.randint(1, 8), chance.randint(8, LAST_SHOT)), start=1):
        genuine = victim == "torchrun" and number == 2  # of genuine programs, Slurm's tests kill ranks and nodes
        with cold() if genuine else nullcontext(), Program(*arguments, results=results) as program:
            attempt = program.attempt(number)
            program.entries(attempt, 0, at_least=lines)
            pid = program.pid_of(victim, attempt)
            before = finished_epochs(attempt)
            kill(pid)
            assert program.end() == (-signal.SIGKILL if victim == "supervisor" else 1), program.text
            assert program.survivors() == []
        folder = the_run(results)
        assert folder.state().attempt == number
        outcome = outcome_of(folder)
        assert outcome.outcome == "killed", outcome
        assert folder.state().to_run
        if victim.startswith("rank"):
            assert f"{victim} was killed by SIGKILL" in outcome.reason
        after = finished_epochs(attempt)
        assert after[: len(before)] == before, f"killed after {lines} lines"
        assert after == list(range(1, len(after) + 1))
    code, text = completed(*arguments, results=results)
    assert code == 0, text
    assert (folder.state().state, folder.state().attempt) == ("done", number + 1)
    assert folder.published() is not None
    assert [row["epoch"] for row in tables(folder)["epochs"]] == list(range(1, EPOCHS_UNDER_FIRE + 1))


# --- interruptions


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "more"), [(signal.SIGINT, ""), (signal.SIGTERM, "launcher.checkpoint=never")], ids=["INT", "TERM"]
)
def test_an_interrupted_run_is_killed_in_order_and_can_be_repeated(
    number: signal.Signals, more: str, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    with Program("run", *DDP, "epochs=400", *more.split(), results=results) as program:
        attempt = program.attempt()
        before = program.epochs(attempt, at_least=2)
        os.killpg(program.process.pid, number)  # as a terminal does
        assert program.end() == 130
        assert program.survivors() == []
        assert "1 run starts over because nothing was saved" in program.text
        assert "Traceback" not in program.text
    folder = the_run(results)
    outcome = outcome_of(folder)
    assert (outcome.outcome, outcome.reason) == ("killed", f"interrupted by {number.name}")
    assert finished_epochs(attempt)[: len(before)] == before
    if number == signal.SIGINT:
        code, text = completed("run", *DDP, "epochs=400", results=results)
        assert (code, folder.state().state, folder.state().attempt) == (0, "done", 2), text


@fault(
    "lifecycle",
    "`kill` of a submit on this machine",
    injection="SIGTERM once two epochs of the first of two runs are done",
    outcome="the run saves after its epoch, no other begins, and submitting again goes on from there",
)
@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_by_a_signal_saves_first(tmp_path: Path) -> None:
    results, words = tmp_path / "results", ("submit", *QUICK, "epochs=2000", "repeat=0,1", "sweep.order=listed")
    with Program(*words, "launcher.checkpoint=always", results=results) as program:
        attempt = program.attempt()
        before = program.epochs(attempt, at_least=2)
        program.process.terminate()
        assert program.end() == 130, program.text
        assert program.survivors() == []
        assert "1 run resumes after the last saved epoch" in program.text
        assert "Traceback" not in program.text
    outcome, epochs = attempt.outcome(), finished_epochs(attempt)
    assert outcome is not None
    assert epochs[: len(before)] == before
    assert (outcome.outcome, f"stopped after epoch {epochs[-1]} of 2000" in outcome.reason) == ("timeout", True)
    assert "goes on from there" in outcome.reason
    assert sorted(run.state().label for run in find_runs(results)) == ["missing", "timeout"]


@pytest.mark.exhaustive
def test_impatient_interruptions_leave_no_process_and_no_running_run(tmp_path: Path) -> None:
    results = tmp_path / "results"
    with Program("submit", *DDP, ENDLESS, "repeat=0,1", results=results) as program:
        first = program.wait_for(lambda: [r for r in find_runs(results) if r.attempts()])[0]
        program.epochs(first.attempts()[0], at_least=1)
        while program.process.poll() is None:
            program.process.send_signal(signal.SIGINT)
        assert program.end() in (130, -signal.SIGINT), program.text
        assert program.survivors() == []
    assert sorted(run.state().label for run in find_runs(results)) == ["killed", "missing"]


@pytest.mark.exhaustive
def test_an_inline_run_is_interrupted_too(tmp_path: Path) -> None:
    results = tmp_path / "results"
    with Program("run", *QUICK, ENDLESS, "launcher=inline", results=results) as program:
        program.epochs(program.attempt(), at_least=1)
        program.process.send_signal(signal.SIGINT)
        assert program.end() == 130
    assert outcome_of(the_run(results)).reason == "interrupted by SIGINT"


@pytest.mark.exhaustive
def test_a_run_under_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    results = tmp_path / "results"
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with Program("run", *QUICK, "epochs=30", results=results, preexec=ignore) as program:
        program.epochs(program.attempt(), at_least=1)
        program.process.send_signal(signal.SIGHUP)
        assert program.end() == 0, program.text


# --- runs that end badly by themselves


@fault(
    "workers",
    "The loss is no number",
    injection="a learning rate that diverges",
    outcome="outcome nan, and the sweep goes on",
)
def test_a_diverging_run_is_nan_and_the_sweep_goes_on(tmp_path: Path) -> None:
    results = tmp_path / "results"
    model = ("model=mlp", "model.hidden=[16]", "optimizer=sgd")
    arguments = ("submit", *TINY, *model, "optimizer.lr=1e30,0.1", "epochs=2", "sweep.order=listed")
    code, text = completed(*arguments, results=results)
    assert code == 1
    runs = {run.config().optimizer.lr: run for run in find_runs(results)}
    assert runs[0.1].state().label == "ok"
    outcome = outcome_of(runs[1e30])
    assert outcome.outcome == "nan", text
    assert "lower optimizer.lr" in outcome.reason
    assert finished_epochs(runs[1e30].attempts()[0]) == [1]
    assert not runs[1e30].state().to_run, "trying again would give the same"


@fault(
    "workers",
    "Too little memory for a model",
    injection="a limit on the process's address space, in the place of a full GPU, which these machines don't have",
    outcome="outcome oom, not tried again unless asked for, and the sweep goes on",
)
@pytest.mark.exhaustive
def test_a_model_that_does_not_fit_is_oom(tmp_path: Path) -> None:
    results = tmp_path / "results"
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (60 << 30, 60 << 30))  # noqa: E731
    huge = ("run", *QUICK, "model=mlp", "model.hidden=[200000,200000]", "epochs=1")
    code, text = completed(*huge, results=results, preexec=limit)
    assert code == 1, text
    outcome = outcome_of(the_run(results))
    assert outcome.outcome == "oom", outcome
    assert outcome.reason.startswith("out of memory: ")


BROKEN = '''
from parallelbench.strategies.data_parallel import Ddp


class Mine(Ddp, frozen=True, kw_only=True):
    """Its second rank fails when it is about to train."""

    def prepare(self, model, run, world):
        if world.rank == 1:
            raise RuntimeError("the cable\\nis loose")
        return super().prepare(model, run, world)
'''


def test_a_rank_that_raises_is_named_and_the_others_do_not_hide_it(tmp_path: Path) -> None:
    results = tmp_path / "results"
    own = own_strategy(tmp_path, BROKEN, like="ddp")
    arguments = ("run", *own, *QUICK, "devices=2", "epochs=2", "launcher.oversubscribe=true")
    code, text = completed(*arguments, results=results)
    assert code == 1, text
    run = the_run(results)
    outcome = outcome_of(run)
    place = f"{tmp_path / 'own.py'}:10"
    assert (outcome.outcome, outcome.reason) == ("error", f"rank 1: {place}: RuntimeError: the cable is loose")
    assert f"next: parallelbench logs {run.path}" in text


# --- full disks


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "Disk full during training",
    injection="a tmpfs of 1 MiB fills up after the first epochs",
    outcome="outcome storage; the epochs before are kept",
)
@pytest.mark.parametrize("arguments", [QUICK, DDP], ids=["single", "ddp"])
@pytest.mark.cases("single")
def test_a_disk_that_fills_up_during_training_keeps_the_epochs_before(
    small_disk: Path, arguments: tuple[str, ...]
) -> None:
    results = small_disk / "results"
    with Program("run", *arguments, ENDLESS, results=results) as program:
        attempt = program.attempt()
        program.epochs(attempt, at_least=3)
        fill_disk(small_disk)
        assert program.end() == 1, program.text
        assert program.survivors() == []
    folder = the_run(results)
    outcome = outcome_of(folder)
    assert outcome.outcome == "storage", outcome
    assert "the disk is full: free some space, then run again" in outcome.reason
    assert folder.state().to_run
    after = finished_epochs(attempt)
    assert after[:3] == [1, 2, 3]
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)  # a second's epochs may fill 1 MiB
    _, text = completed("run", *arguments, ENDLESS, "launcher.timeout_s=1", results=results)
    assert outcome_of(folder).outcome == "timeout", text
    assert folder.state().attempt == 2


@pytest.mark.exhaustive
def test_a_full_disk_is_refused_and_no_run_looks_alive(small_disk: Path) -> None:
    results = small_disk / "results"
    ballast = fill_disk(small_disk)
    code, text = completed("run", *QUICK, "epochs=1", results=results)
    assert code == 2
    assert text.count("the disk is full") == 1
    assert "Traceback" not in text
    assert not [run for run in find_runs(results) if run.state().state == "running"]
    ballast.unlink()
    code, text = completed("run", *QUICK, "epochs=1", results=results)
    assert code == 0, text
    manifest = json.loads((the_run(results).result / "manifest.json").read_bytes())
    assert manifest["attempt"] == 1


# --- a rank that hangs

HANGS = '''
"""A strategy of which one rank stops to take part."""
import time

from parallelbench.strategies.servers import ParameterServer


class Mine(ParameterServer, frozen=True, kw_only=True):
    """In the second epoch, rank 1 trains no more, for longer than any test waits."""

    def prepare(self, model, run, world):
        replica = super().prepare(model, run, world)
        evaluate = replica.evaluate

        def last(batches):
            replica.step = lambda batch: time.sleep(3600)
            return evaluate(batches)

        if world.rank == 1:
            replica.evaluate = last
        return replica
'''


@pytest.mark.exhaustive
def test_the_rank_that_hangs_is_named_and_not_those_that_wait_for_it(tmp_path: Path) -> None:
    """A worker waits for the server, and that for anybody."""
    own = own_strategy(tmp_path, HANGS, like="parameter_server", more="mode: async\n")
    options = ["devices=3", "batch_size=24", "epochs=5", "measure.parity=false"]
    options += ["measure.probe=false", "measure.telemetry_hz=0"]
    limits = ["launcher.oversubscribe=true", "launcher.collective_timeout_s=20"]
    code, text = completed("run", *own, *TINY, *options, *limits, results=tmp_path / "results")
    assert code == 1, text
    folder = the_run(tmp_path / "results")
    hangs = "rank 1 hangs: rank 0 and rank 2 waited for it longer than launcher.collective_timeout_s"
    assert (outcome_of(folder).outcome, outcome_of(folder).reason) == ("timeout", hangs)
    assert folder.state().to_run, "it may go better next time"


# --- a rank that is really killed while it checks what was trained

KILLED_LATE = '''
"""One device, whose process the kernel ends as soon as somebody asks for its state after the last evaluation."""
import os, signal
from parallelbench.strategies.single import Single


class Mine(Single, frozen=True, kw_only=True):
    def prepare(self, model, run, world):
        replica = super().prepare(model, run, world)
        state, evaluate, evaluated = replica.full_state_dict, replica.evaluate, []

        def counted(batches):
            evaluated.append(evaluate(batches))
            return evaluated[-1]

        def ended_late():
            return state() if len(evaluated) < run.epochs else os.kill(os.getpid(), signal.SIGKILL)

        replica.evaluate, replica.full_state_dict = counted, ended_late
        return replica
'''


@pytest.mark.exhaustive
def test_a_run_killed_in_its_closing_check_says_that_it_was_not_checked(tmp_path: Path) -> None:
    small = ["model=logistic_regression", "data=digits", "epochs=2", "measure.telemetry_hz=0", "measure.probe=false"]
    _, text = completed(
        "run", *own_strategy(tmp_path, KILLED_LATE, like="single"), *small, results=tmp_path / "results"
    )
    runs = load(tmp_path / "results")
    assert runs.run["state"].item() == "done", text
    assert runs.run["reason"].item() == "trained 2 epochs; not checked: the closing check did not end"
    assert NO_CLOSING in runs.run["warnings"].item()
    (row,) = runs.checks.filter(check=CLOSING).rows(named=True)
    assert (row["epoch"], row["passed"], row["detail"]) == (2, None, "it did not end")
    assert "1 not checked after training" in summary(runs)["parity"].item()
    assert any(NO_CLOSING in line for line in warnings(runs))


# --- a run whose core another program kept busy

BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@pytest.mark.exhaustive
def test_a_run_beside_a_busy_program_does_not_count(tmp_path: Path) -> None:
    cores = this_machine().cores[:4]  # the rank has the first that no other run has taken
    with ExitStack() as stack:
        for core in (*cores, *cores):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=PIPE))
            stack.callback(program.kill)  # before it is waited for
            assert program.stdout is not None
            program.stdout.readline()
        code, text = completed("run", "data=digits", "model=cnn_small", "epochs=3", results=tmp_path)
    assert code == 0, text
    runs = load(tmp_path)
    found = disturbances(runs)
    shares, verdicts = (
        [found[f"{window}_{name}"].item() for window in WINDOWS] for name in ("lost_share", "disturbed")
    )
    if None in shares:
        pytest.skip("the kernel here does not account for cores")
    assert "Others disturbed 1 run of" in text
    # Of three programs that want one core, each gets a third of it; a rank that also waits for the disk loses less.
    assert min(shares) > 0.2
    assert all(verdicts)
    assert excluded(runs)["exclusion"].to_list() == ["disturbed"]
    assert "in its steady epochs" in excluded(runs)["exclusion_detail"].item()
