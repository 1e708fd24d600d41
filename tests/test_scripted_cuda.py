"""CUDA branches of what measures, of loaders, strategies and launchers, driven by a scripted device."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallelbench.config.components import Batch, Shard
from parallelbench.gpu_check import training, variants
from parallelbench.gpu_check.variants import as_attempt
from parallelbench.loaders import stream as stream_module
from parallelbench.loaders.stream import StreamedLoader
from parallelbench.measure import attribution, bandwidth, machine_probe, memory
from parallelbench.measure.attribution import AttributionPass
from parallelbench.measure.clock import StepClock, TimedWindow
from parallelbench.measure.memory import MemoryProbe
from parallelbench.strategies import state
from parallelbench.strategies.data_parallel import ring
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.training import worker
from parallelbench.training.checks import before_training
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.parity import as_checked
from parallelbench.training.loop import Trainer, device_uuid
from parallelbench.training.observers import StepTimes
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world import world
from parallelbench.world.spans import waits_are_hidden
from parallelbench.world.world import World
from tests.helpers import TINY, configured
from tests.scripted_cuda import CPU, WORLD, ScriptedCuda


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


def test_retries_are_those_of_the_window(device: ScriptedCuda) -> None:
    probe = MemoryProbe(WORLD)
    device.held[CPU].retries = 7
    probe.start()
    device.held[CPU].retries += 2
    assert probe.stop()["alloc_retries"] == 2


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

    def fetch(*_: Any) -> tuple[None, None, None]:
        threads.append(threading.current_thread())
        device.calls.append("fetch")
        return None, None, None

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


class OnCpu(str):
    """A device that says it is CUDA, and is the CPU to torch."""

    type = "cuda"


def loader_on_cuda(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Any:
    """A loader that takes the CPU for a GPU, and one that doesn't."""
    run = configured(*TINY, *overrides)
    arrays = run.data.load(Path("nowhere"))
    expected = build_loader(arrays, run, world.World(), Shard())
    with monkeypatch.context() as patched:
        patched.setattr(torch, "device", lambda name: name)
        found = build_loader(arrays, run, SimpleNamespace(device=OnCpu("cpu"), device_type="cpu"), Shard())  # type: ignore[arg-type]
    return found, expected


# --- loaders


def test_a_copy_is_waited_for_by_the_device_that_uses_it(device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = loader_on_cuda(monkeypatch, "loader=streamed")
    empty, pinned, used_by = torch.empty, [], []

    def allocated(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(stream_module.torch, "empty", allocated)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: used_by.append(stream.name))
    batches = list(zip(found.train(epoch=1), expected.train(epoch=1), strict=True))
    for batch, right in batches:
        assert torch.equal(batch.images, right.images)
        assert torch.equal(batch.labels, right.labels)
    assert device.calls.count("main: wait for an event") == len(batches)
    assert used_by == ["main"] * 2 * len(batches), "no memory is given away while the other stream needs it"
    assert True in pinned


@pytest.mark.parametrize("loader", ["dataloader", "tensor_dataset"])
def test_host_memory_is_page_locked_for_a_gpu_only(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = loader_on_cuda(monkeypatch, f"loader={loader}")
    pinned = [[part._loader.pin_memory for part in each._parts] for each in (found, expected)]
    assert pinned == [[True, True], [False, False]]
    for each in (found, expected):
        each.close()


# --- probes


@pytest.mark.slow
def test_memory_is_given_back_to_the_device(device: ScriptedCuda) -> None:
    memory.release()
    assert device.calls == ["release"]


@pytest.mark.parametrize("takes_s", [2.0, 1e-5])
def test_an_all_reduce_takes_what_the_device_takes(
    takes_s: float, device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the host takes a tenth of a millisecond to launch each, and ranks leave the barrier one by one."""

    def all_reduce(values: Any, **_: Any) -> None:
        device.now_s += 1e-4
        device.launch(takes_s if hasattr(values, "is_mine") else 0.0)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    mine, cuda = SimpleNamespace(is_mine=True), SimpleNamespace(type="cuda")
    timed_s = bandwidth._timed(lambda: dist.all_reduce(mine), cuda, None)  # type: ignore[arg-type]
    assert timed_s == pytest.approx(takes_s)


@pytest.mark.slow
def test_a_gpus_speed_is_measured_in_fp16(device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "_SIDES", {"cuda": 8})
    monkeypatch.setattr(machine_probe, "_COPIED_BYTES", {"cuda": 64})
    types = []

    def times(pieces: Any, _: Any) -> list[float]:
        types.extend([piece() for piece in pieces])
        return [2.0]

    monkeypatch.setattr(machine_probe, "times_s", times)
    assert machine_probe._measured(WORLD, WORLD.device) == (8**3, 64.0)
    assert [values.dtype for values in types] == [torch.float16, torch.uint8]


def test_a_trace_holds_what_the_gpu_does(device: ScriptedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Profile:
        def __init__(self, activities: list[Any]) -> None:
            asked.extend(activities)

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None: ...

        def export_chrome_trace(self, path: str) -> None:
            Path(path).touch()

    monkeypatch.setattr(attribution.torch.profiler, "profile", Profile)
    run = configured(*TINY)
    replica = run.strategy.prepare(build_model(run), run, WORLD)
    loader = build_loader(run.data.load(Path("nowhere")), run, world.World(), Shard())
    AttributionPass(replica, loader, run=run, world=WORLD).trace(tmp_path / "trace.json")
    assert asked == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    assert device.calls[-1] == "synchronize"


def test_a_checkpoint_holds_the_devices_random_numbers(device: ScriptedCuda) -> None:
    device.random = torch.tensor([7], dtype=torch.uint8)
    saved = WORLD.random_state()
    device.random = torch.tensor([8], dtype=torch.uint8)
    WORLD.set_random_state(saved)
    assert device.random.tolist() == [7]


def test_each_gpu_of_a_rank_draws_numbers_of_its_own(device: ScriptedCuda) -> None:
    gpus = tuple(torch.device("cuda", index) for index in range(2))
    several = World(device_type="cuda", devices=gpus)
    several.draw_from("0 0")
    first = dict(device.seeds)
    assert first.keys() == set(gpus)
    assert len({*first.values(), torch.initial_seed()}) == 3
    several.draw_from("0 1")
    assert set(device.seeds.values()).isdisjoint(first.values())


# --- ranks


def test_a_rank_chooses_its_device_before_anything_else(device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert world.join("cuda", devices=1, timeout_s=1.0).devices == (torch.device("cuda", 3),)
    assert device.calls == ["choose cuda:3"]


def test_the_sampler_watches_the_gpus_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[int] = []
    monkeypatch.setattr(worker, "sampling", lambda settings, _: watched.append(settings.gpus))
    attempt: Any = SimpleNamespace(path=Path("nowhere"), number=1)
    run = configured("strategy=ddp", "devices=4", "nodes=2")
    for device_type in ("cuda", "cpu"):
        worker._sampler(run, attempt, None, device_type=device_type, spare_cores=[])  # type: ignore[arg-type]
    assert watched == [2, 0]


# --- strategies


@pytest.mark.parametrize("graph", [False, True])
def test_ddp_is_told_its_device_and_made_aside_where_it_is_captured(
    graph: bool, device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    class Ddp(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, **options: Any) -> None:
            super().__init__()
            told.update(options, calls=list(device.calls))

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Ddp)
    run = configured("strategy=ddp", "devices=2", f"graph={graph}".lower())
    run.strategy.in_ddp(build_model(run), run, WORLD)  # type: ignore[attr-defined]
    assert told["device_ids"] == [CPU.index]
    assert told["calls"] == (["aside"] if graph else [])


def test_a_ring_goes_round_beside_backward(device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    future = torch.futures.Future
    monkeypatch.setattr(torch.futures, "Future", lambda devices: future())
    streams: list[str] = []
    monkeypatch.setattr(ring, "ring_average", lambda *_: streams.append(device.here.name))
    values = torch.ones(3)
    reduce = ring.ring_hook(None, WORLD)  # type: ignore[arg-type]
    assert reduce(SimpleNamespace(buffer=lambda: values)).value() is values  # type: ignore[arg-type]
    assert streams == ["side"]
    assert device.calls == ["side: wait for main"], "the bucket is full"
    assert device.here.name == "main"


def test_streams_hide_waiting() -> None:
    assert waits_are_hidden("cuda", compiled=False)
    assert waits_are_hidden("cpu", compiled=True)
    assert not waits_are_hidden("cpu", compiled=False)


def test_a_warm_up_restores_the_generators_of_the_modules_gpus(device: ScriptedCuda) -> None:
    parameters = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cpu", "cuda:0")]
    device.random = torch.tensor([7], dtype=torch.uint8)
    module = SimpleNamespace(parameters=lambda: parameters, named_modules=lambda: iter(()))
    with state.undrawn_numbers(module, torch.optim.SGD([torch.zeros(1)])):  # type: ignore[arg-type]
        device.random = torch.tensor([8], dtype=torch.uint8)
    assert device.random.tolist() == [7]
