"""Columns of docs/results.md: known values are forced through the code that measures them.

Values that no experiment fixes (a time, a peak of memory) are forced by a clock that the test turns, and by tensors of
known size.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

from launch.attempt.outcome import _unlike
from parallelbench.config.build import to_mapping
from parallelbench.config.components import Shard
from parallelbench.config.identity import canonical_json, run_id, slug
from parallelbench.config.replica import Push
from parallelbench.config.run import RunConfig
from parallelbench.loaders import resident as loader_module
from parallelbench.loaders.order import generator
from parallelbench.loaders.resident import ResidentLoader
from parallelbench.measure import clock as clock_module
from parallelbench.measure import environment, memory
from parallelbench.measure.clock import StartUp
from parallelbench.measure.memory import MemoryProbe
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal, read_tables
from parallelbench.results.publish import publish
from parallelbench.results.tables import TABLES
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.strategies.single import Single
from parallelbench.training import loop, torch_session
from parallelbench.training import session as session_module
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.torch_session import Session, build_model
from parallelbench.world.machine import cpu_name, node_name
from parallelbench.world.numerics import Sums
from parallelbench.world.world import World
from tests.helpers import TINY, Clock, configured
from tests.strategies.training import shard_loader

# --- a real run of two ranks, whose every number follows from its configuration

WEAK = (
    *(option for option in TINY if not option.startswith(("batch_size", "data.train_samples"))),
    *("data.train_samples=70", "batch_size=10", "scaling=weak", "optimizer=sgd", "optimizer.lr=0.05"),
    "loader=tensor_dataset",
    *("optimizer.lr_rule=linear", "precision=fp64", "channels_last=true", "epochs=2", "seed=5", "repeat=3"),
    *("strategy=ddp", "devices=2", "measure.deterministic=true", "measure.detect_anomaly=true", "sweep.name=columns"),
    "launcher.oversubscribe=true",
)
GLOBAL_BATCH, STEPS, VALUES = 20, 3, 64 * 10 + 10


class Ran:
    """The published tables of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = {table: pq.read_table(folder / "result" / f"{table}.parquet").to_pylist() for table in TABLES}
        (self.run,) = self.tables["run"]

    def of(self, table: str, *columns: str) -> list[Any]:
        """Values of one column, or tuples of several."""
        return [row[columns[0]] if len(columns) == 1 else tuple(row[c] for c in columns) for row in self.tables[table]]


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    results = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "parallelbench.cli", "run", *WEAK, f"results={results}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ran(Path(done.stdout.splitlines()[-1]))


def expected_run(results: Path) -> RunConfig:
    return configured(*(option for option in WEAK if option != "sweep.name=columns"), f"results={results}")


@pytest.mark.exhaustive
def test_what_was_asked_for(weak: Ran) -> None:
    assert {name: weak.run[name] for name in ("devices", "nodes", "processes", "cores_per_device")} == {
        "devices": 2,
        "nodes": 1,
        "processes": 2,
        "cores_per_device": 1,
    }
    names = {"model": "logistic_regression", "data": "synthetic", "strategy": "ddp", "optimizer": "sgd"}
    names |= {"loader": "tensor_dataset", "launcher": "local", "framework": "torch"}
    numbers = {"epochs": 2, "batch_size": 10, "global_batch_size": 20, "seed": 8, "repeat": 3}
    samples = {"train_samples": 70, "test_samples": 30, "steps_per_epoch": 3, "dropped_samples": 10}
    kinds = {"device_type": "cpu", "scaling": "weak", "precision": "fp64", "learning_rate": 0.1, "sweep": "columns"}
    switches = {"channels_last": True, "deterministic": True, "detect_anomaly": True}
    expected = names | numbers | samples | kinds | switches
    assert {name: weak.run[name] for name in expected} == expected
    assert weak.run["oversubscribed"] is (len(psutil.Process().cpu_affinity() or []) < 2)
    run = expected_run(weak.folder.parents[1])
    assert (weak.run["run_id"], weak.run["slug"]) == (run_id(run), slug(run))
    assert weak.folder.name == weak.run["slug"]
    asked = json.loads(weak.run["config_json"])
    assert asked | {"sweep_name": "adhoc"} == json.loads(canonical_json(to_mapping(run)))


@pytest.mark.exhaustive
def test_what_was_trained_is_checked_and_a_finding_decides(weak: Ran) -> None:
    assert weak.run["rounding"] == 2**-53
    assert 0 < weak.run["closing_check_s"] < 100
    assert weak.run["gloo_bytes_per_step_sum"] >= 8 * VALUES * 2
    assert weak.run["least_flop_per_sample"] > 0
    assert [layer["name"] for layer in json.loads(weak.run["layers_json"])] == ["fc1"]
    steps = [("loss", 2), ("gradients", 2), ("update", 2)]
    after = [name for name, epoch in steps for _ in range(3) if epoch == 2]
    rest = ["evaluation loss", "evaluation accuracy", "rounding", "bytes", "samples", "settled", "exchanges"]
    rest += ["initial", "settings", "precision", "messages", "earlier evaluation loss", "earlier evaluation accuracy"]
    assert sorted(weak.of("checks", "check")) == sorted(["copies", "copies", *after, *rest])
    assert set(weak.of("checks", "run_id", "attempt")) == {(weak.run["run_id"], 1)}
    # Two epochs of three steps have been trained.
    assert [row["step"] for row in weak.tables["checks"] if row["check"] == "update"] == [7, 8, 9]
    copies = next(row for row in weak.tables["checks"] if row["check"] == "copies")
    for row in weak.tables["checks"]:
        assert row["epoch"] == (1 if row is copies or row["check"] == "initial" else 2)
        assert row["difference"] <= row["limit"] <= 1e-9 or row["check"] in (
            "evaluation accuracy",
            "earlier evaluation accuracy",
            "bytes",
            "messages",
        )
        assert row["passed"] is True
        assert row["detail"]
    (sent,) = [row["detail"] for row in weak.tables["checks"] if row["check"] == "bytes"]
    assert f"{8 * VALUES * 2} bytes per step reported" in sent  # of both ranks: 2(n - 1)/n of 8 bytes per value
    wrong = copies | {"passed": False, "difference": 1.0, "limit": 0.0}
    reason = _unlike("one device", {"outcome": "ok"}, {"checks": [wrong]})
    assert reason == f"copies after epoch 1: 1, limit 0 ({wrong['detail']})"
    assert _unlike("one device", {"outcome": "ok"}, weak.tables) is None


@pytest.mark.slow
def test_what_the_run_was(weak: Ran) -> None:
    assert (weak.run["outcome"], weak.run["reason"]) == ("ok", "trained 2 epochs")
    assert (weak.run["device_name"], weak.run["parameters"], weak.run["parity_passed"]) == (cpu_name(), VALUES, True)
    # fp64: 8 bytes each of a parameter, its gradient and its velocity, on every rank of ddp.
    assert weak.run["theoretical_state_bytes"] == 3 * 8 * VALUES


def by_hand() -> list[dict[str, Any]]:
    """The same training, written out: sums over each epoch, and over each rank's half of every batch."""
    run = expected_run(Path("nowhere"))
    arrays = run.data.load(Path("nowhere"))
    layer = build_model(run).double()
    sgd: Any = run.optimizer
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    both = (torch.from_numpy(stored).double() / 255 for stored in (arrays.train_images, arrays.test_images))
    images, tests = ((pixels - run.data.mean[0]) / run.data.std[0] for pixels in both)
    labels, test_labels = torch.from_numpy(arrays.train_labels), torch.from_numpy(arrays.test_labels)
    found = []
    for epoch in (1, 2):
        order = torch.randperm(70, generator=generator(seed=8, epoch=epoch, purpose="order"))
        halves = np.zeros((2, 2))
        for index in order.split(GLOBAL_BATCH)[:STEPS]:
            optimizer.zero_grad()
            logits = layer(images[index])
            losses = F.cross_entropy(logits, labels[index], reduction="none")
            losses.mean().backward()
            optimizer.step()
            correct = logits.argmax(1) == labels[index]
            for rank in range(2):
                mine = slice(10 * rank, 10 * rank + 10)
                halves[rank] += [losses[mine].sum().item(), correct[mine].sum().item()]
        with torch.no_grad():
            logits = layer(tests)
            test_losses = F.cross_entropy(logits, test_labels, reduction="none")
            right = logits.argmax(1) == test_labels
        found.append({"halves": halves, "test": test_losses, "right": right})
    return found


@pytest.mark.slow
def test_losses_are_those_of_a_loop_by_hand(weak: Ran) -> None:
    expected = by_hand()
    assert weak.of("epochs", "epoch", "train_samples", "test_samples", "steps") == [(1, 60, 30, 3), (2, 60, 30, 3)]
    assert set(weak.of("epochs", "run_id") + weak.of("ranks", "run_id")) == {weak.run["run_id"]}
    for epoch, ours in zip(weak.tables["epochs"], expected, strict=True):
        loss, correct = ours["halves"].sum(0)
        assert (epoch["train_loss"], epoch["train_accuracy"]) == pytest.approx((loss / 60, correct / 60), rel=1e-9)
        assert epoch["test_loss"] == pytest.approx(ours["test"].mean().item(), rel=1e-9)
        assert epoch["test_accuracy"] == pytest.approx(ours["right"].double().mean().item())
    for row in weak.tables["ranks"]:
        ours, rank = expected[row["epoch"] - 1], row["rank"]
        half = slice(15 * rank, 15 * rank + 15)
        assert (row["train_samples"], row["test_samples"]) == (30, 15)
        assert (row["train_loss_sum"], row["train_correct"]) == pytest.approx(tuple(ours["halves"][rank]), rel=1e-9)
        assert row["test_loss_sum"] == pytest.approx(ours["test"][half].sum().item(), rel=1e-9)
        assert row["test_correct"] == ours["right"][half].sum().item()


@pytest.mark.slow
def test_where_the_ranks_were(weak: Ran) -> None:
    assert sorted(weak.of("ranks", "rank", "local_rank")) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert set(weak.of("ranks", "node")) == {node_name()}
    uuids = dict(weak.of("ranks", "rank", "device_uuid"))
    assert all(uuid.removeprefix("cores ").isdigit() for uuid in uuids.values())
    if not weak.run["oversubscribed"]:
        assert uuids[0] != uuids[1]
    assert set(weak.of("ranks", "gradient_bytes_sent")) == {STEPS * VALUES * 8}, "2 (n − 1) / n = 1 for two ranks"


# --- a session in this process, by a clock that only what is timed turns


class SessionClock(Clock):
    def __init__(self) -> None:
        self.now_s, self.cpu_s = 995.0, 50.0
        self.first_steps: list[float] = []
        """The moment before the first step of each epoch."""
        self.resident_bytes = 0
        """Of this process, while the known tensor was there."""


BLOCK_BYTES = 64 * 2**20
SESSION = (*TINY, "compile=true", "epochs=2", "measure.steps_sampled=5", "optimizer=sgd")


def plant(monkeypatch: pytest.MonkeyPatch, clock: SessionClock, run: RunConfig) -> None:
    """What everything takes, and what it finds."""
    monkeypatch.setattr(clock_module, "time", clock)
    monkeypatch.setattr(loop, "time", clock)
    takes = {"configure_torch": 2.0, "join": 3.0, "build_model": 7.0, "check_parity": 6.0}
    for name, seconds in takes.items():
        monkeypatch.setattr(torch_session, name, clock.taking(seconds, getattr(torch_session, name)))
    monkeypatch.setattr(torch_session, "check_parity", clock.taking(6.0, lambda *_, **__: [dict(PARITY_ROW)]))
    monkeypatch.setattr(torch_session, "checks_parity", lambda _: True)
    monkeypatch.setattr(environment, "capture", clock.taking(100.0, lambda *_, **__: {"known": 1}))
    monkeypatch.setattr(type(run.data), "load", clock.taking(4.0, type(run.data).load))
    monkeypatch.setattr(loader_module, "ResidentLoader", clock.taking(0.5, ResidentLoader))
    monkeypatch.setattr(Single, "prepare", clock.taking(8.0, Single.prepare))
    monkeypatch.setattr(torch, "compile", lambda module: module)
    graphs = itertools.count()
    monkeypatch.setattr(torch_session, "compiled_graphs", lambda: next(graphs))
    monkeypatch.setattr(ModuleReplica, "compile_warmup", clock.taking(9.0, ModuleReplica.compile_warmup))
    monkeypatch.setattr(ModuleReplica, "evaluate", clock.taking(0.5, ModuleReplica.evaluate))
    monkeypatch.setattr(session_module, "Trainer", clock.taking(1.5, loop.Trainer))
    monkeypatch.setattr(ModuleReplica, "take_pushes", lambda _: [Push(step=2, staleness=3)])
    step, steps = ModuleReplica.step, iter(range(100))

    def timed_step(replica: Any, batch: Any) -> Any:
        if next(steps) % run.steps_per_epoch == 0:
            clock.first_steps.append(clock.now_s)
        clock.now_s += 0.25
        clock.cpu_s += 0.125
        block = torch.ones(BLOCK_BYTES, dtype=torch.uint8)
        clock.resident_bytes = max(clock.resident_bytes, psutil.Process().memory_info().rss)
        del block
        return step(replica, batch)

    monkeypatch.setattr(ModuleReplica, "step", timed_step)


PARITY_ROW = {"step": 1, "loss": 1.0, "loss_reference": 1.0, "tolerance": 1e-9, "passed": True} | dict.fromkeys(
    (f"{what}_difference" for what in ("loss", "gradient", "parameter", "evaluation")), 0.0
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, SessionClock]:
    run = configured(*SESSION, f"results={tmp_path_factory.mktemp('results')}")
    folder, clock = RunFolder.of(run), SessionClock()
    folder.write_intent(run, [])
    first = folder.claim()
    assert first is not None
    first.describe(processes=1, device_type="cpu", oversubscribed=False)
    first.finish("killed", "so that the next attempt is the second")
    attempt = folder.claim(after=1)
    assert attempt is not None
    warnings = ["a known warning"]
    attempt.describe(
        processes=1, device_type="cpu", oversubscribed=False, warnings=warnings, submit="a command", waited_s=90.0
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, clock, run)
        keys = {"run_id": run_id(run), "attempt": attempt.number}
        journal = Journal(attempt.path / "journal-rank0.jsonl", keys=keys)
        startup = StartUp(990.0, 995.0)
        whole = Session(run, attempt, device_type="cpu", journal=journal, startup=startup)
        whole.train()
        whole.leave()
    publish(folder, run, attempt, attempt.finish("ok", "trained"), read_tables(attempt.path))
    return Ran(folder.path), clock


def test_a_closing_check_that_fails_takes_nothing_else_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the device has no room for a second model: what needs no second one is recorded before."""
    run = configured(*TINY, "model=mlp", "measure.attribution_steps=2", "measure.trace=true", f"results={tmp_path}")
    attempt = RunFolder.of(run).claim()
    assert attempt is not None
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
    keys = {"run_id": run_id(run), "attempt": attempt.number}
    journal = Journal(attempt.path / "journal-rank0.jsonl", keys=keys)
    failing = mock.Mock(side_effect=RuntimeError("no room"))
    monkeypatch.setattr(torch_session.ClosingCheck, "findings", failing)
    session = Session(run, attempt, device_type="cpu", journal=journal, startup=StartUp(0.0, 0.0))
    with pytest.raises(RuntimeError, match="no room"):
        session.train()
    session.leave()
    tables, events = read_tables(attempt.path)
    facts = set().union(*(event for event in events if event["event"] == "facts"))
    assert facts >= {"least_flop_per_sample", "layers_json"}
    assert len(tables["phases"]) == 2
    assert attempt.trace_file(0).exists()


@pytest.mark.exhaustive
def test_facts_of_a_session(planted: tuple[Ran, SessionClock]) -> None:
    ran, _ = planted
    assert (ran.run["attempt"], ran.run["compile"]) == (2, True)
    assert "a known warning" in ran.run["warnings"]
    assert ran.run["environment_json"] == '{"known":1}'
    info = RunFolder(ran.folder).attempts()[-1].info()
    assert info is not None
    assert (ran.run["submit"], ran.run["launched_at"]) == ("a command", info.launched_at)
    assert ran.run["waited_s"] == 90.0
    assert ran.run["data_sha256"] == configured(*SESSION).data.fingerprint(Path("nowhere"))
    assert ran.of("parity", "run_id", "attempt") == [(ran.run["run_id"], 2)]


@pytest.mark.exhaustive
def test_the_parts_of_the_start(planted: tuple[Ran, SessionClock]) -> None:
    """The capture of the environment took 100 s and is in none of them."""
    ran, _ = planted
    parts = {
        "startup_launch_s": 5.0,
        "startup_imports_s": 2.0,
        "startup_process_group_s": 3.0,
        "startup_data_s": 4.0 + 0.5,
        "startup_parity_s": 7.0 + 6.0,
        "startup_model_s": 7.0 + 8.0 + 1.5,
        "startup_compile_s": 9.0,
        "startup_first_step_s": 0.25,
    }
    assert {name: ran.run[name] for name in parts} == parts
    assert ran.run["startup_s"] == sum(parts.values())


def test_times_are_those_of_the_clock(planted: tuple[Ran, SessionClock]) -> None:
    ran, clock = planted
    starts = clock.first_steps[:2]  # those after them are the closing check's
    assert ran.of("ranks", "attempt", "epoch_time_s", "cpu_time_s", "evaluation_time_s") == [(2, 0.5, 0.25, 0.5)] * 2
    assert ran.of("ranks", "training_started_at") == starts
    assert ran.of("ranks", "training_ended_at") == [start + 0.5 for start in starts]
    assert ran.of("epochs", "attempt", "finished_at") == [(2, start + 1.0) for start in starts]
    keys = ("run_id", "attempt", "epoch", "step", "rank", "step_time_s")
    found = ran.run["run_id"]
    expected = [(found, 2, epoch, step, 0, 0.25) for epoch in (1, 2) for step in (1, 2)]
    assert ran.of("steps", *keys) == expected


def test_pushes_of_a_worker(planted: tuple[Ran, SessionClock]) -> None:
    ran, _ = planted
    keys = ("run_id", "attempt", "epoch", "rank", "step", "staleness")
    assert ran.of("pushes", *keys) == [(ran.run["run_id"], 2, epoch, 0, 2, 3) for epoch in (1, 2)]


def test_a_known_tensor_is_in_the_hosts_peak(planted: tuple[Ran, SessionClock]) -> None:
    ran, clock = planted
    for peak in ran.of("ranks", "host_peak_rss_bytes"):
        assert peak is None or clock.resident_bytes - BLOCK_BYTES / 2 < peak < clock.resident_bytes + BLOCK_BYTES / 2


@pytest.mark.slow
def test_a_ranks_peak_has_its_own_layers_only(tmp_path: Path) -> None:
    """Of 80 MB of parameters all but 0.2 are on rank 0, and their gradients; rank 1 has built all of the model, too."""
    model = ["model=mlp", "model.hidden=[4096,4096]", "strategy=model_parallel", "devices=2"]
    model += [
        "strategy.device_map={fc1:0,fc2:0,fc3:1}",
        "optimizer=sgd",
        "optimizer.momentum=0",
        "measure.parity=false",
    ]
    data = ["data=synthetic", "data.channels=1", "data.image_size=28", "data.train_samples=64", "data.test_samples=64"]
    own = ["batch_size=32", "epochs=2", "launcher.oversubscribe=true", f"results={tmp_path}"]
    command = [sys.executable, "-m", "parallelbench.cli", "run", *model, *data, *own]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = Ran(Path(done.stdout.splitlines()[-1])).of("ranks", "epoch", "rank", "host_peak_rss_bytes")
    peaks = {rank: peak for epoch, rank, peak in rows if epoch == 2}
    if None in peaks.values():
        pytest.skip("the kernel lets nobody reset a peak here")
    assert peaks[0] - peaks[1] > 1.5 * 4 * (784 + 4096) * 4096


# --- what no machine without a GPU can measure, and what only a wrong strategy shows


@pytest.mark.parametrize(("device_type", "grown_mib", "given_back"), [("cpu", 5, 1), ("cpu", 3, 0), ("cuda", 500, 0)])
def test_memory_of_an_evaluation_is_given_back_without_touching_a_gpus_cache(
    device_type: str, grown_mib: int, given_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_bytes, trimmed = [100 * 2**20], []
    monkeypatch.setattr(memory, "_status_bytes", lambda field: held_bytes[0] if field == "VmRSS" else None)
    monkeypatch.setattr(memory, "_trim", lambda: trimmed.append(True))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the next window would ask for it again"))
    devices = (torch.device("cuda", 0),) if device_type == "cuda" else (torch.device("cpu"),)
    probe = MemoryProbe(World(device_type=device_type, devices=devices))
    before = probe.held_bytes()
    held_bytes[0] += grown_mib * 2**20
    probe.give_back(before)
    assert len(trimmed) == given_back


class Off(Single, frozen=True, kw_only=True):
    """One device, but for known errors."""

    def prepare(self, model: Any, run: RunConfig, world: World) -> Any:
        replica: Any = super().prepare(model, run, world)
        step, gradients, state, evaluate = (
            replica.step,
            replica.full_gradients,
            replica.full_state_dict,
            replica.evaluate,
        )
        samples = run.global_batch_size
        replica.step = lambda batch: Sums([], step(batch).tensor() + torch.tensor([0.5 * samples, 0.0]).double())
        replica.full_gradients = lambda: {name: 1.25 * value for name, value in gradients().items()}
        replica.full_state_dict = lambda: {name: value + 0.125 for name, value in state().items()}
        replica.evaluate = lambda batches: evaluate(batches) + torch.tensor([10.0 * 30, 0.0], dtype=torch.float64)
        return replica


def test_planted_differences_are_those_of_the_check() -> None:
    run = configured(*TINY, "precision=fp64", "optimizer=sgd", "measure.parity_steps=2")
    off = type(run)(**{name: getattr(run, name) for name in run.__struct_fields__} | {"strategy": Off(name="off")})

    rows = check_parity(build_model(off), off, World(), shard_loader)
    assert rows is not None
    assert [row["step"] for row in rows] == [1, 2]
    batch = next(iter(shard_loader(run, Shard()).train(epoch=1)))
    first = F.cross_entropy(build_model(run).double()(batch.images), batch.labels).item()
    assert rows[0]["loss_reference"] == pytest.approx(first, rel=1e-12)
    assert rows[0]["loss"] == pytest.approx(first + 0.5, rel=1e-12)
    for row in rows:
        scale = max(1.0, row["loss_reference"])
        assert row["loss_difference"] == pytest.approx(0.5 / scale, rel=1e-9)
        assert row["gradient_difference"] == pytest.approx(0.25, rel=1e-9)
    # Each step is judged from the state that the strategy says it has reached, so what is off stays where it began.
    first_off, then_off = (row["parameter_difference"] for row in rows)
    assert first_off == pytest.approx(0.125, rel=1e-9), "no parameter is larger than 1"
    assert then_off == pytest.approx(0.0, abs=1e-12)
    for row in rows:
        assert 10 / 3 < row["evaluation_difference"] <= 10, "of a mean loss between 1 and 3"
        assert (row["tolerance"], row["passed"]) == (1e-9, False)
