"""CUDA branches of what measures, driven by a scripted device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from parallelbench.config.components import Batch, Shard
from parallelbench.gpu_check import training, variants
from parallelbench.gpu_check.variants import as_attempt
from parallelbench.loaders.stream import StreamedLoader, _Fetched
from parallelbench.measure.clock import StepClock, TimedWindow
from parallelbench.measure.memory import MemoryProbe
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.training import tuning
from parallelbench.training.checks import before_training
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.parity import as_checked
from parallelbench.training.loop import Trainer, device_uuid
from parallelbench.training.observers import StepTimes
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World
from tests.helpers import TINY, Clock, configured
from tests.scripted_cuda import WORLD, ScriptedCuda


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ScriptedCuda:
    script = ScriptedCuda()
    script.install(monkeypatch)
    return script


def test_steps_are_timed_by_the_devices_clock(device: ScriptedCuda) -> None:
    clock = StepClock(WORLD, steps=4, sampled=4)
    for index, _ in enumerate(clock.timed(Batch(None, None, 0) for _ in range(4))):
        device.now_s += index + 1
    assert clock.durations() == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert device.calls == [], "no step waits"


def test_a_window_waits_for_the_device_at_both_ends(device: ScriptedCuda) -> None:
    window = TimedWindow(WORLD)
    with window:
        assert device.calls == ["synchronize"]
        device.now_s += 3.0
    assert device.calls == ["synchronize"] * 2


def test_a_window_in_which_something_fails_waits_for_no_device(device: ScriptedCuda) -> None:
    with pytest.raises(ZeroDivisionError), TimedWindow(WORLD):
        raise ZeroDivisionError
    assert device.calls == ["synchronize"], "devices may wait for the rank that has failed"


def test_peaks_are_those_of_the_window(device: ScriptedCuda) -> None:
    device.others_bytes = 7
    device.allocate(1000)
    device.allocate(-900)
    probe = MemoryProbe(WORLD)
    probe.start()
    device.allocate(200)
    device.allocate(-250)
    found = probe.stop()
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"], found["device_used_bytes"]) == (300, 600, 607)
    assert found["peak_allocated_bytes_by_device"] == "300"


def test_each_gpu_of_a_process_has_a_peak_of_its_own(device: ScriptedCuda) -> None:
    first, second = (torch.device("cuda", index) for index in (0, 1))
    probe = MemoryProbe(World(device_type="cuda", devices=(first, second)))
    device.allocate(5000, second)
    device.allocate(-4000, second)
    probe.start()
    device.allocate(200, first)
    device.allocate(-200, first)
    device.allocate(2000, second)  # the peaks are not of one moment: their sum is no device's
    found = probe.stop()
    assert (found["peak_allocated_bytes"], found["peak_allocated_bytes_by_device"]) == (3200, "200,3000")


def test_steps_on_a_gpu_that_give_no_events_are_not_timed(device: ScriptedCuda) -> None:
    """The host's clock would tell how long they take to launch."""
    times = StepTimes(WORLD, configured(*TINY, "strategy=tf_single"))
    times.epoch_starts(1)
    assert len(list(times.timed(Batch(None, None, 0) for _ in range(4)))) == 4
    assert list(times.rows()) == []


def test_a_rank_is_known_by_its_gpu(device: ScriptedCuda) -> None:
    assert device_uuid(WORLD) == "GPU-scripted"


def test_the_loaders_thread_chooses_its_ranks_device_first(device: ScriptedCuda) -> None:
    """A new thread's first CUDA call would open a context on GPU 0, whatever the rank's own device is."""
    run = configured(*TINY, "loader=streamed")
    arrays = run.data.load(Path("nowhere"))
    loader: Any = StreamedLoader(
        arrays, run.data, prefetch=2, device="cpu", dtype=torch.float32, seed=0, global_batch_size=32, shard=Shard(),
        channels_last=False, steps_per_epoch=2,
    )  # fmt: skip
    loader._device, loader._copies = torch.device("cuda", 3), object()
    threads = []

    def fetch(*_: Any) -> _Fetched:
        threads.append(threading.current_thread())
        device.calls.append("fetch")
        return _Fetched(None, None, None)

    loader._fetch = fetch
    assert len(list(loader._ahead([None, None], None, None))) == 2
    assert device.calls == ["choose cuda:3", "fetch", "fetch"]
    assert threading.current_thread() not in threads


@pytest.mark.slow
def test_waits_are_errors_from_the_second_epochs_first_batch_to_its_last(
    device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = as_attempt(training.small_run("mlp", optimizer="sgd"), "cuda")
    modes: list[list[str]] = []
    step = ModuleReplica.step

    def noted(replica: Any, batch: Any) -> Any:
        modes.append([call for call in device.calls if call.startswith("waits")])
        return step(replica, batch)

    monkeypatch.setattr(ModuleReplica, "step", noted)
    replica, loader = variants.replica_of(run, WORLD), variants.loader_of(run, WORLD)
    journal: Any = mock.MagicMock()
    Trainer(replica, loader, run=run, world=WORLD, journal=journal).train()
    assert modes == [[]] * 10 + [["waits: error"]] * 10, "the first epoch warms up"
    assert [call for call in device.calls if call.startswith("waits")] == ["waits: error", "waits: allowed"]


@pytest.mark.parametrize(
    ("step_s", "least_s", "timed"), [(0.25, 0.5, 8), (2**-10, 0.5, 8 + 512), (0.25, 0.0, 8), (2**-10, 0.0, 8)]
)
def test_a_trial_on_a_gpu_times_long_enough(
    step_s: float, least_s: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, steps, waits = Clock(), [], []
    monkeypatch.setattr(tuning, "time", clock)
    step = clock.taking(step_s, lambda: steps.append(1))
    found = tuning.mean_step_s(step, 8, lambda: waits.append(len(steps)), least_s=least_s)
    assert (found, len(steps)) == (step_s, timed)
    assert waits[0] == 0
    assert waits[-1] == timed, "the host waits for the device before it reads the clock"


@pytest.mark.parametrize("fails_in", ["__init__", "train"])
def test_a_reference_that_does_not_fit_leaves_its_memory(fails_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = as_checked(configured(*TINY))
    left: list[bool] = []
    references: list[Any] = []
    begin = before_training.Reference.__init__

    def noted(self: Any, *arguments: Any) -> None:
        references.append(self)
        begin(self, *arguments)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(before_training.Reference, "__init__", noted)
    monkeypatch.setattr(before_training.PlainTraining, fails_in, full)
    monkeypatch.setattr(before_training, "release", lambda: left.append(not hasattr(references[0], "training")))
    arrays = run.data.load(Path("nowhere"))
    rows = check_parity(build_model(run), run, World(), lambda of, shard: build_loader(arrays, of, World(), shard))
    assert rows is None
    assert left == [True], "once, after it was let go"
