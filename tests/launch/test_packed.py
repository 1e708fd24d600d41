"""Packed runs: what warm processes train is what cold ones do, and no run harms the next."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from analysis import excluded, load
from analysis.comparison.exclusions import Exclusion
from analysis.report.warnings import warnings
from launch.attempt import processes
from launch.attempt.processes import Training, WarmWorkers, _Parent
from launch.sweep import one_run
from parallelbench.results.folder import RunFolder, find_runs
from parallelbench.training.warm import forked, unforkable
from tests.helpers import TINY
from tests.launch.programs import DYING_S, Program, completed, own_strategy

PACKED = "launcher.pack=true"
QUICK = (*TINY, "measure.parity=false", "sweep.order=listed")
LEARNED = re.compile("epoch|step|rank|.*(loss|accuracy|correct|samples|difference|bytes_sent).*")
"""Columns that are the same in two runs of the same thing."""


def by_name(results: Path) -> dict[str, RunFolder]:
    """The runs by the name of their folder, less the run id."""
    return {run.path.name.rpartition("-")[0]: run for run in find_runs(results)}


def learned(run: RunFolder) -> list[dict[str, Any]]:
    """Every number of the tables `epochs`, `ranks` and `parity` that follows from the training, exactly."""
    assert run.state().label == "ok", run.state()
    tables = [pq.read_table(run.result / f"{table}.parquet").to_pylist() for table in ("epochs", "ranks", "parity")]
    return [{k: v for k, v in row.items() if LEARNED.fullmatch(k)} for rows in tables for row in rows]


def row_of(run: RunFolder) -> dict[str, Any]:
    (row,) = pq.read_table(run.result / "run.parquet").to_pylist()
    return dict(row)


# --- the same training


@pytest.mark.exhaustive
@pytest.mark.slow
def test_packed_runs_train_bit_for_bit_like_separate_ones_and_have_no_start_up(tmp_path: Path) -> None:
    model = ("model=mlp", "model.hidden=[32,16]", "optimizer=adam", "epochs=2")
    pairs = "sweep.blocks=[{zip:{strategy:[single,ddp],devices:[1,2]}}]"
    arguments = ("submit", *TINY, *model, pairs, "launcher.oversubscribe=true")
    for results, more in ((tmp_path / "packed", [PACKED]), (tmp_path / "separate", [])):
        code, text = completed(*arguments, *more, results=results)
        assert code == 0, text
        assert "started cold" not in text
    packed, separate = by_name(tmp_path / "packed"), by_name(tmp_path / "separate")
    assert len(packed) == 2
    assert packed.keys() == separate.keys()
    for name, run in packed.items():
        assert learned(run) == learned(separate[name]), name
        assert (row_of(run)["packed"], row_of(separate[name])["packed"]) == (True, False)
        assert row_of(run)["run_id"] != row_of(separate[name])["run_id"], "a packed run is no substitute"
        assert row_of(run)["startup_s"] is None
        assert row_of(separate[name])["startup_s"] > 0

    runs = load(tmp_path / "packed" / "adhoc")
    assert Exclusion.PACKED.value not in set(excluded(runs)["exclusion"])
    assert any(note.startswith("No start-up from 2 packed runs") for note in warnings(runs))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_libraries_read_when_they_are_loaded_is_that_of_each_run(tmp_path: Path) -> None:
    arguments = ("submit", *QUICK, PACKED, "epochs=1", "cores_per_device=1,2", "launcher.oversubscribe=true")
    code, text = completed(*arguments, results=tmp_path)
    assert code == 0, text
    assert "started cold" not in text
    found = set()
    for run in find_runs(tmp_path):
        environment = json.loads(row_of(run)["environment_json"])
        assert environment["variables"]["MALLOC_TRIM_THRESHOLD_"] == "4294967296"
        found.add((run.config().cores_per_device, environment["threads"], environment["variables"]["OMP_NUM_THREADS"]))
    assert found == {(1, 1, "1"), (2, 2, "2")}


# --- runs that go wrong

CODE = '''
"""A strategy of which rank 1 does something odd in the second epoch."""
import os
import re
import signal
import time

from parallelbench.strategies.data_parallel import Ddp


def fails():
    raise RuntimeError("on purpose")


DEEDS = {
    "fail": fails,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda: os._exit(3),
    "hang": lambda: time.sleep(3600),
    "nothing": lambda: None,
}


class Mine(Ddp, frozen=True, kw_only=True):
    """DDP with a fault."""

    deed: str

    def prepare(self, model, run, world):
        replica = super().prepare(model, run, world)
        evaluate = replica.evaluate

        def then(batches):
            found = evaluate(batches)
            if world.rank == 1:
                DEEDS[self.deed]()
            return found

        replica.evaluate = then
        return replica
'''
OUTCOMES = {
    "fail": ("error", "rank 1: ODD:12: RuntimeError: on purpose"),
    "kill": ("killed", "rank 1 was killed by SIGKILL, by hand or by the kernel for lack of memory"),
    "leave": ("error", "rank 1: ODD:18: this code ended the program (SystemExit: os._exit(3))"),
    "hang": ("timeout", "rank 1 hangs: rank 0 waited for it longer than launcher.collective_timeout_s"),
    "nothing": ("ok", "trained 2 epochs"),
}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_goes_wrong_has_its_own_outcome_and_the_next_is_fine(tmp_path: Path) -> None:
    own = own_strategy(tmp_path, CODE, like="ddp", more="deed: nothing\n")
    options = [f"strategy.deed={','.join(OUTCOMES)}", "devices=2", "epochs=2"]
    limits = ["launcher.oversubscribe=true", "launcher.collective_timeout_s=20"]
    code, text = completed("submit", *own, *QUICK, PACKED, *options, *limits, results=tmp_path / "results")
    assert code == 1, text
    assert "started cold" not in text
    found = {
        yaml.safe_load((run.path / "config.yaml").read_text())["strategy"]["deed"]: (
            outcome.outcome,
            outcome.reason.partition(": let it raise")[0],
        )
        for run in find_runs(tmp_path / "results")
        if (outcome := run.state().outcome)
    }
    place = str(tmp_path / "own.py")
    assert found == {deed: (name, reason.replace("ODD", place)) for deed, (name, reason) in OUTCOMES.items()}
    assert f", or parallelbench logs {tmp_path / 'results'}" in " ".join(text.split())


def test_a_fork_that_fails_on_a_full_disk_ends_there() -> None:
    reading, writing = os.pipe()

    def fail() -> int:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.dup2(full, 2)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        raise OSError("no space left")

    me = os.getpid()
    try:
        child = forked(fail)
    finally:
        if os.getpid() != me:
            os.write(writing, b"went on")
            os._exit(9)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status), os.read(reading, 10)) == (1, b"")
    os.close(reading)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_warm_process_that_is_killed_ends_one_run_only(tmp_path: Path) -> None:
    arguments = ("submit", *QUICK, PACKED, "strategy=ddp", "devices=2", "epochs=1000000,1")
    with Program(*arguments, "launcher.oversubscribe=true", results=tmp_path) as program:
        program.epochs(program.attempt(), at_least=1)
        before = psutil.Process(program.process.pid).children(recursive=True)
        (warm,) = psutil.Process(program.process.pid).children()
        warm.kill()
        assert program.end() == 1, program.text
    assert psutil.wait_procs(before, timeout=DYING_S)[1] == []
    assert {run.config().epochs: run.state().label for run in find_runs(tmp_path)} == {1000000: "killed", 1: "ok"}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.cases("9")
def test_finished_runs_stay_when_all_is_ended_midway(number: signal.Signals, tmp_path: Path) -> None:
    arguments = ("submit", *QUICK, PACKED, "strategy=ddp", "devices=2", "launcher.oversubscribe=true")
    epochs = "epochs=1,1000000,2"
    with Program(*arguments, epochs, results=tmp_path) as program:
        endless = program.wait_for(
            lambda: [run for run in find_runs(tmp_path) if run.attempts() and run.config().epochs == 1000000]
        )[0]
        program.epochs(endless.attempts()[0], at_least=1)
        before = psutil.Process(program.process.pid).children(recursive=True)
        assert len(before) >= 4, "the warm process, the group's leader, two ranks"
        program.process.send_signal(number)
        program.end()
    assert psutil.wait_procs(before, timeout=DYING_S)[1] == []
    labels = {run.config().epochs: run.state().label for run in find_runs(tmp_path)}
    stopped = "timeout" if number == signal.SIGTERM else "killed"  # SIGTERM lets it save after its epoch
    assert labels == {1: "ok", 1000000: stopped, 2: "missing"}

    if number == signal.SIGTERM:
        return
    completed(*arguments, epochs, "launcher.timeout_s=3", results=tmp_path)
    again = {run.config().epochs: (run.state().label, len(run.attempts())) for run in find_runs(tmp_path)}
    assert again[1] == ("ok", 1)
    assert again[1000000] == ("timeout", 2)
    assert again[2][1] == 1


# --- what can't be forked, or packed


FORKED = """
import os
import numpy.linalg, scipy.linalg, scipy.sparse
from parallelbench.training.warm import resident, touch

def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

pages = resident()
own = held()
if not os.fork():
    touch(pages)
    print(own, held(), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_fork_holds_as_much_memory_as_a_process_that_has_imported_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    own, fork = map(int, done.stdout.split())
    assert fork == pytest.approx(own, rel=0.02)


def test_a_process_with_threads_is_not_forked() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert "threads, and a fork copies one" in str(unforkable())
    finally:
        over.set()
        thread.join()


def test_each_repeat_has_a_warm_process_of_its_own_and_a_run_that_can_not_be_forked_starts_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forks of one share its addresses, which make a process faster or slower for its whole life."""
    events: list[str] = []

    def begin(parent: Any, _: object, training: Training, __: object, key: object) -> None:
        parent.key, parent.repeat = key, training.run.repeat
        events.append(f"begin {parent.repeat}")

    monkeypatch.setattr(_Parent, "__init__", begin)
    monkeypatch.setattr(_Parent, "alive", lambda _: True)
    monkeypatch.setattr(_Parent, "start", lambda *_: "it has threads")
    monkeypatch.setattr(_Parent, "close", lambda parent: events.append(f"end {parent.repeat}"))
    monkeypatch.setattr(processes.Here, "start", lambda *_, **__: "cold")
    attempt: Any = SimpleNamespace(number=1, log=tmp_path / "log.txt")
    with WarmWorkers() as workers:
        for repeat in (0, 0, 1, 1):
            run = one_run([*TINY, PACKED, f"repeat={repeat}"]).run
            started: Any = workers.start(Training(RunFolder(tmp_path / "a-run"), run, attempt, "cpu"), log=None)
            assert started == "cold"
            assert "a-run is started cold: it has threads" in capsys.readouterr().out
    # A run that is started cold needs the cores.
    assert events == ["begin 0", "end 0"] * 2 + ["begin 1", "end 1"] * 2
