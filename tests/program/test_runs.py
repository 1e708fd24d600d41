"""Programs that are really started, measured and ended."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow.parquet as pq
import pytest

from analysis import load, summary
from analysis.report.programs import times_of_programs
from parallelbench.results.folder import find_runs
from tests.launch.programs import DYING_S, Program, completed

if TYPE_CHECKING:
    from parallelbench.results.folder import RunFolder

QUICK = ("measure.probe=false", "measure.telemetry_hz=0", "launcher.oversubscribe=true", "sweep.order=listed")
TRAIN = '''
"""Plain torch: a loader whose dataset waits for a while, DDP where there are several ranks, its own stopwatch."""
import json, os, sys, time
import torch
import torch.distributed as dist

several = int(os.environ.get("WORLD_SIZE", "1")) > 1
if several and "alone" not in sys.argv:
    dist.init_process_group("gloo")
model = torch.nn.Linear(16, 4)
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if "idle" in sys.argv else 0.1)
rows = [(torch.randn(16), torch.tensor(i % 4)) for i in range(64)]
ends = []
while len(ends) < 20_000:
    for x, y in torch.utils.data.DataLoader(rows, batch_size=8, num_workers=2 * ("workers" in sys.argv)):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.time())
        time.sleep(0.005)
        print(f"loss {loss.item():.4f}", flush=True)
        path = os.path.join(sys.argv[1], f"ends-{os.environ.get('RANK', 0)}.json")
        with open(f"{path}.tmp", "w") as file:
            json.dump(ends, file)
        os.replace(f"{path}.tmp", path)
'''


def rows(folder: RunFolder, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder.result / f"{table}.parquet").to_pylist()
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path / "program")
    return tmp_path / "program"


TORCHRUN = (
    f"program={Path(sys.executable).parent / 'torchrun'} --nproc-per-node={{devices_per_node}} train.py {{attempt}}"
)
SMALL = ("program.warmup_steps=4", "program.steps=16", "program.samples_per_step='8 * {devices}'")


@pytest.mark.slow
def test_two_ranks_are_measured_to_the_step_and_ended(tmp_path: Path) -> None:
    more = ("devices=2", "program.loss_pattern='loss ([0-9.]+)'")
    code, text = completed("submit", TORCHRUN, *SMALL, *QUICK, *more, results=tmp_path / "results")
    assert code == 0, text
    (run,) = find_runs(tmp_path / "results")
    assert run.state().label == "ok"
    epochs, ranks = rows(run, "epochs"), rows(run, "ranks")
    assert [row["steps"] for row in epochs] == [3, 4, 4, 4, 4]
    assert [row["train_samples"] for row in epochs] == [3 * 16, *[4 * 16] * 4]
    assert [(row["epoch"], row["rank"]) for row in ranks] == [(e, r) for e in range(1, 6) for r in range(2)]
    assert all(row["epoch_time_s"] >= row["data_wait_s"] > 0 for row in ranks)
    for rank in range(2):
        stopwatch = json.loads((run.path / "attempts" / "1" / "own" / f"ends-{rank}.json").read_text())
        edges = [4, 8, 12, 16, 20]
        own = [row["epoch_time_s"] for row in ranks if row["rank"] == rank]
        taken = [stopwatch[last - 1] - stopwatch[first - 1] for first, last in itertools.pairwise([1, *edges])]
        # A process may lose its core between a hook and the program's own look at the clock.
        assert statistics.median(a / b for a, b in zip(own, taken, strict=True)) == pytest.approx(1, abs=0.01)
    (facts,) = rows(run, "run")
    assert (facts["processes"], facts["framework"], facts["model"], facts["data"]) == (2, "program", "train", None)
    assert facts["global_batch_size"] == 16
    assert facts["loader_samples_per_step"] == 16
    assert rows(run, "losses")
    environment = json.loads(facts["environment_json"])
    assert environment["packages"]["torch"]
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if str(run.path) in " ".join(each.info["cmdline"] or [])
    ]
    assert any(line.startswith("Waiting for data:") for line in times_of_programs(load(tmp_path / "results")))
    (row,) = summary(load(tmp_path / "results")).to_dicts()
    assert row["throughput_samples_per_s"] > 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_that_never_met_are_refused_by_name(tmp_path: Path) -> None:
    code, text = completed("submit", f"{TORCHRUN} alone", *SMALL, *QUICK, "devices=2", results=tmp_path / "results")
    assert code == 1
    assert "2 ranks never called torch.distributed.init_process_group" in " ".join(text.split())


@pytest.mark.slow
def test_steps_that_train_nothing_are_refused(tmp_path: Path) -> None:
    code, text = completed("submit", f"{TORCHRUN} idle", *SMALL, *QUICK, "devices=2", results=tmp_path / "results")
    assert code == 1
    assert "steps 4 to 20 changed no parameter of its optimizers" in " ".join(text.split())


@pytest.mark.slow
def test_the_memory_of_a_loaders_workers_is_theirs(tmp_path: Path) -> None:
    more = (TORCHRUN + " workers", *SMALL, *QUICK, "devices=1")
    code, text = completed("submit", *more, results=tmp_path / "results")
    assert code == 0, text
    (run,) = find_runs(tmp_path / "results")
    workers = [row["loader_memory_bytes"] for row in rows(run, "ranks") if row["loader_cpu_time_s"] is not None]
    assert workers
    assert all(each is None or each > 2**16 for each in workers)


COUNTING = "for i in $(seq 1 24); do echo it $i loss 0.$i; sleep 0.02; done"
MARKING = "for i in $(seq 1 24); do echo $i > /dev/null; echo 0 > $PARALLELBENCH_MARK; sleep 0.02; done"


@pytest.mark.cases("pattern")
@pytest.mark.parametrize(
    ("command", "options", "steps"),
    [
        (COUNTING, ["program.steps_by=pattern", "program.step_pattern=^it", "program.loss_pattern='s ([0-9.]+)'"], 5),
        (MARKING, ["program.steps_by=mark"], 5),
        (f"date +%s.%N > times; {COUNTING}; date +%s.%N >> times", ["program.steps_by=command"], 1),
        (COUNTING, ["program.steps_by=pattern", "program.step_pattern='^it'", "program.steps=null"], 5),
    ],
    ids=["pattern", "mark", "command", "to its end"],
)  # fmt: skip
def test_steps_without_torch(command: str, options: list[str], steps: int, tmp_path: Path) -> None:
    small = ("program.warmup_steps=4", "program.steps=20")
    code, text = completed("submit", f"program={command}", *small, *QUICK, *options, results=tmp_path / "results")
    assert code == 0, text
    (run,) = find_runs(tmp_path / "results")
    taken = [row["steps"] for row in rows(run, "epochs")]
    assert taken == ([0, 1] if steps == 1 else [3, 5, 5, 5, 5])
    (facts,) = rows(run, "run")
    assert (facts["processes"], facts["train_samples"]) == (None, None)
    (row,) = summary(load(tmp_path / "results")).to_dicts()
    assert row["steady_epoch_time_s"] > 24 * 0.02 * (1 if steps == 1 else 5 / 24)
    if steps == 1:  # to the command's own start and end, not to when somebody looked
        (window,) = (each for each in rows(run, "ranks") if each["epoch"] == 2)
        began, ended = (float(text) for text in (tmp_path / "program" / "times").read_text().split())
        assert window["epoch_time_s"] == pytest.approx(ended - began, abs=0.1)
    assert f"program.steps_by={run.config().model.steps_by}" in facts["warnings"]  # type: ignore[attr-defined]


@pytest.mark.cases("true; nothing_of_this*", "(sleep*")
@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("true; nothing_of_this_name --x", [], "the command could not be started (exit code 127)"),
        ("echo wrong data; exit 3", [], "ended with exit code 3 after 0 steps; its last words: wrong data"),
        ("echo hello", [], "ended with exit code 0 before its first step: no optimizer of torch's took one"),
        ("sleep 600", ["program.start_timeout_s=1"], "no step of 1 rank within program.start_timeout_s=1 s"),
        ("(sleep 600 &) ; exit 0", [], "left 1 process behind"),
        ("(sleep 600 &) ; true", ["program.steps_by=command"], "left 1 process behind"),
        (COUNTING, ["program.steps_by=pattern", "program.step_pattern=^it", "program.steps=40"], "after 24 steps, but"),
        ("read line; echo got $line; exit 1", [], "ended with exit code 1 after 0 steps; its last words: got"),
    ],
)  # fmt: skip
def test_a_program_that_can_not_be_measured_is_told_why(
    command: str, options: list[str], said: str, tmp_path: Path
) -> None:
    before = {process.pid for process in psutil.process_iter()}
    code, text = completed("submit", f"program={command}", *SMALL[:2], *QUICK, *options, results=tmp_path / "results")
    assert code == 1
    (run,) = find_runs(tmp_path / "results")
    outcome = run.state().outcome
    assert outcome is not None
    assert (outcome.outcome, said in outcome.reason) == ("error", True), (outcome, text)
    left = [
        each
        for each in psutil.process_iter(["cmdline"])
        if each.pid not in before and "600" in (each.info["cmdline"] or [])
    ]
    assert psutil.wait_procs(left, timeout=DYING_S)[1] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_of_a_program_outlives_its_run(number: signal.Signals, tmp_path: Path) -> None:
    seconds = f"4711.{os.getpid()}"
    command = f"program=bash -c 'sleep {seconds} & setsid sleep {seconds}'"
    with Program("submit", command, *SMALL[:2], *QUICK, results=tmp_path / "results") as submitted:

        def sleeping() -> list[psutil.Process]:
            return [each for each in psutil.process_iter(["cmdline"]) if seconds in (each.info["cmdline"] or [])]

        submitted.wait_for(lambda: len(sleeping()) == 2)
        left = sleeping()
        submitted.process.send_signal(number)
        submitted.end()
    assert psutil.wait_procs(left, timeout=DYING_S)[1] == []
