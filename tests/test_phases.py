"""The pass after the last epoch: known times come through, the trace opens, and results stay the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis import load
from parallelbench.cli import main
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.measure import attribution
from parallelbench.measure.attribution import TRACED_STEPS, ring
from parallelbench.measure.bandwidth import Collective
from parallelbench.measure.clock import StartUp
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal, read_tables
from parallelbench.results.publish import publish
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.training.torch_session import Session
from parallelbench.world.spans import Phase, phase
from parallelbench.world.world import World
from tests.helpers import TINY, Clock, configured

pytestmark = pytest.mark.slow

KNOWN = {
    "data_wait_s": 0.25,
    "host_to_device_s": 0.5,
    "forward_s": 1.0,
    "backward_s": 2.0,
    "communication_s": 4.0,
    "bubble_s": 8.0,
    "optimizer_s": 16.0,
    "other_s": 32.0,
}
"""Powers of two: sums are exact, and each says what it consists of."""


def trained(folder: Path, *overrides: str) -> RunFolder:
    return published_here(configured(*TINY, "epochs=2", f"results={folder}", "measure.telemetry_hz=0", *overrides))


def published_here(run: RunConfig) -> RunFolder:
    """A run in this process."""
    home = RunFolder.of(run)
    home.write_intent(run, [])
    attempt = home.claim()
    assert attempt is not None
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
    keys = {"run_id": run_id(run), "attempt": attempt.number}
    journal = Journal(attempt.path / "journal-rank0.jsonl", keys=keys)
    whole = Session(run, attempt, device_type="cpu", journal=journal, startup=StartUp(time.time(), time.time()))
    whole.train()
    whole.leave()
    publish(home, run, attempt, attempt.finish("ok", "trained"), read_tables(attempt.path))
    return home


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Everything that a step consists of takes its known time, and other ranks seem to be there."""
    clock, step = Clock(), ModuleReplica.step
    monkeypatch.setattr(attribution, "time", clock)
    for method, name in {"_predict": "forward", "_backward": "backward", "_apply_gradients": "optimizer"}.items():
        monkeypatch.setattr(ModuleReplica, method, clock.taking(KNOWN[f"{name}_s"], getattr(ModuleReplica, method)))

    def whole_step(replica: Any, batch: Any) -> Any:
        extra: tuple[Phase, ...] = ("host_to_device", "communication", "bubble")
        for name in extra:
            with phase(name):
                clock.now_s += KNOWN[f"{name}_s"]
        return step(replica, batch)

    monkeypatch.setattr(ModuleReplica, "step", clock.taking(KNOWN["other_s"], whole_step))
    monkeypatch.setattr(attribution.AttributionPass, "_waits", lambda _: True)
    waited = clock.taking(KNOWN["data_wait_s"], attribution.AttributionPass._next)
    monkeypatch.setattr(attribution.AttributionPass, "_next", waited)
    return clock


@pytest.mark.exhaustive
def test_known_times_come_through_to_the_table(clock: Clock, tmp_path: Path) -> None:
    trained(tmp_path, "measure.attribution_steps=3")
    runs = load(tmp_path)
    assert runs.phases.select("run_id", "attempt", "rank", "step").rows() == [
        (runs.run["run_id"].item(), 1, 0, step) for step in (1, 2, 3)
    ]
    for row in runs.phases.select("step_time_s", *KNOWN).rows(named=True):
        assert row == {"step_time_s": sum(KNOWN.values()), **KNOWN}


def test_known_all_reduces_make_latency_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduces(_operation: str, _device: object, sizes_bytes: tuple[int, ...]) -> list[Collective]:
        return [Collective(size_bytes=size, time_s=times_s[size], ranks=4) for size in sizes_bytes]

    times_s = {2**10: 6.0, 2**24: 6.0 + 1.5 * (2**24 - 2**10)}  # latencies of 1 s, then a byte per second
    monkeypatch.setattr(attribution, "collectives", all_reduces)
    assert ring(World(size=4)) == {"probed_latency_s": 1.0, "probed_bandwidth_bytes_per_s": 1.0}
    times_s[2**24] = 5.0  # noise: no bandwidth, rather than a negative one
    assert ring(World(size=4))["probed_bandwidth_bytes_per_s"] is None
    assert ring(World()) == {}


@pytest.mark.exhaustive
def test_results_are_the_same_with_the_pass_and_without(tmp_path: Path) -> None:
    numbers = []
    for name, steps in (("without", 0), ("with", 3)):
        trained(tmp_path / name, f"measure.attribution_steps={steps}", f"measure.trace={str(steps > 0).lower()}")
        runs = load(tmp_path / name)
        assert runs.phases.height == steps
        losses = runs.epochs.sort("epoch").select("train_loss", "train_accuracy", "test_loss", "test_accuracy")
        numbers.append((losses.rows(), runs.steps.height, runs.ranks.height, runs.epochs["steps"].to_list()))
    assert numbers[0] == numbers[1]


@pytest.mark.exhaustive
def test_a_pass_that_fails_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_pass: object, _steps: int) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(attribution.AttributionPass, "attribute", fails)
    run = ["run", *TINY, f"results={tmp_path}", "launcher=inline", "measure.attribution_steps=3"]
    assert main(run) == 0
    (row,) = load(tmp_path).run.to_dicts()
    assert (row["state"], row["outcome"]) == ("done", "ok")
    assert "what steps are spent on was not measured on every rank" in row["warnings"]


@pytest.mark.exhaustive
def test_a_trace_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_profiler: object, path: str) -> None:
        Path(f"{path}.tmp").write_text("half a tr")  # and not a word

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fails)
    assert main(["run", *TINY, f"results={tmp_path}", "launcher=inline", "measure.trace=true"]) == 0
    (row,) = load(tmp_path).run.to_dicts()
    assert (row["state"], row["outcome"]) == ("done", "ok")
    assert "there is no trace of every rank" in row["warnings"]


@pytest.mark.exhaustive
def test_the_trace_of_a_rank_holds_its_phases(tmp_path: Path) -> None:
    home = trained(tmp_path, "measure.trace=true")
    assert load(tmp_path).run["warnings"].item() is None
    trace = json.loads(home.attempts()[-1].trace_file(0).read_text())
    names = [event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("parallelbench: ")]
    ranges = {name for name in names if "data" not in name}
    assert {f"parallelbench: {phase}" for phase in ("forward", "backward", "optimizer", "other")} <= ranges
    assert names.count("parallelbench: forward") >= TRACED_STEPS
    # Perfetto wants complete events with a start and a duration.
    spans = [event for event in trace["traceEvents"] if event.get("name") == "parallelbench: forward"]
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in spans if event["ph"] == "X")
    assert not load(tmp_path).phases.height  # a traced step takes longer: its time is in no table
