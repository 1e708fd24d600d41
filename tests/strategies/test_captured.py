"""graph=true: a captured step trains like a step, warms up without a trace, and is refused where it can't be."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from parallelbench.config.run import RunConfig
from parallelbench.measure import clock
from parallelbench.optim.optimizers import Adam
from parallelbench.strategies import graph
from parallelbench.strategies.graph import WARM_STEPS, CapturedReplica, Progress
from parallelbench.training.loop import Trainer
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import Session, build_model
from parallelbench.world.world import World
from tests.faults import fault
from tests.planted import stops_updating
from tests.ranks import run_ranks
from tests.scripted_cuda import CPU, WORLD, ScriptedCuda
from tests.strategies.training import configure, drive, loader_of, one_device
from tests.test_closing import SMALL, closed, failed, passed

DATA = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37", "data.image_size=8"]
MLP = [*DATA, "model=mlp", "model.hidden=[24]"]
NORMED = [*DATA, "data.channels=3", "data.image_size=32", "model=resnet_tiny", "model.norm=batch"]
OPTIMIZERS = {
    "sgd": ["optimizer=sgd", "optimizer.momentum=0.9"],
    "adam": ["optimizer=adam"],
    "adamw": ["optimizer=adamw"],
    "adagrad": ["optimizer=adagrad"],
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ScriptedCuda:
    script = ScriptedCuda()
    script.install(monkeypatch)
    # torch refuses capturable updates on CPUs; they are the same arithmetic.
    monkeypatch.setattr(Adam, "counts_on_host", False)
    return script


def captured(run: RunConfig) -> RunConfig:
    return msgspec.structs.replace(run, graph=True)


@fault(
    "workers",
    "A rank hangs while others replay captured steps",
    injection="a scripted GPU whose last step is never completed, after slow ones, with graph=true",
    outcome="the ranks that wait end after launcher.collective_timeout_s; a GPU that is only slow is waited for",
)
def test_a_device_that_comes_no_further_is_noticed_and_one_that_is_slow_is_not(
    device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each captured step takes 40 s, and the host launches all at once: only what is completed counts."""
    progress = Progress(CPU, 100.0, lambda: None)
    monkeypatch.setattr(progress, "_watches", True)  # this test looks itself
    for _ in range(5):
        device.launch(40.0)
        progress.launched()
    assert not any(progress.is_stuck(device.now_s) for device.now_s in range(0, 200, 10))
    device.now_s = 200.0
    assert not progress.is_stuck(1e6), "nothing is left to wait for"
    device.launch(1e9)  # waits for a rank that hangs
    progress.launched()
    assert [progress.is_stuck(now_s) for now_s in (300.0, 400.0, 401.0)] == [False, False, True]


def test_a_thread_with_a_context_on_this_device_alone_ends_a_rank_that_waits(
    device: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "LOOK_S", 1e-3)
    ended = threading.Event()
    progress = Progress(torch.device("cuda", 3), 0.01, ended.set)
    device.launch(1e9)
    progress.launched()
    assert ended.wait(60.0)
    assert device.calls == ["choose cuda:3"]


def test_a_rank_among_several_notes_each_captured_step(device: ScriptedCuda, tmp_path: Path) -> None:
    run = captured(configure(*MLP, "strategy=ddp", "devices=2"))
    replica: Any = CapturedReplica.__new__(CapturedReplica)
    attempt: Any = SimpleNamespace(path=tmp_path)
    session: Any = SimpleNamespace(_run=run, _attempt=attempt, _world=World(rank=0, size=2))
    Session._watch(session, replica)
    assert isinstance(replica.progress, Progress)
    alone = configure(*MLP)
    one = alone.strategy.prepare(build_model(alone), captured(alone), WORLD)
    one.progress = Progress(CPU, 100.0, lambda: None)
    one.progress._watches = True
    drive(one, alone)
    assert one.progress._launched


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_step_trains_as_if_it_were_not(optimizer: str, device: ScriptedCuda) -> None:
    run = configure(*MLP, *OPTIMIZERS[optimizer])
    expected = drive(run.strategy.prepare(build_model(run), run, WORLD), run)
    replica = run.strategy.prepare(build_model(run), captured(run), WORLD)
    assert isinstance(replica, CapturedReplica)
    found = drive(replica, run)
    assert found["steps"] == expected["steps"]
    assert found["evaluated"] == expected["evaluated"]
    for what in ("gradients", "state"):
        torch.testing.assert_close(found[what], expected[what], rtol=0, atol=0)
    assert (device.captured, device.replayed) == (1, 3)


@pytest.mark.exhaustive
def test_statistics_and_random_numbers_are_as_before_the_warm_up(device: ScriptedCuda) -> None:
    run = configure(*NORMED)
    replica = run.strategy.prepare(build_model(run), captured(run), WORLD)
    device.random = torch.tensor([7], dtype=torch.uint8)
    drawn = []

    def draws(batch: Any) -> Any:
        drawn.append(device.random.clone())
        device.random = device.random + 1
        return type(replica)._forward_backward(replica, batch)

    replica._forward_backward = draws  # type: ignore[attr-defined]
    found, expected = drive(replica, run), one_device(run)
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=1e-12)
    assert [int(state) for state in drawn] == [*range(7, 7 + WARM_STEPS), 7, 8, 9]


def test_a_resumed_state_is_not_lost_in_the_warm_up(device: ScriptedCuda) -> None:
    run = configure(*MLP, *OPTIMIZERS["adam"])
    first = run.strategy.prepare(build_model(run), run, WORLD)
    batches = list(islice(loader_of(first, run).train(epoch=1), 4))
    for batch in batches[:2]:
        first.step(batch)
    again = run.strategy.prepare(build_model(run), captured(run), WORLD)
    again.load_local_state(copy.deepcopy(first.local_state()))
    for batch in batches[2:]:
        one, other = first.step(batch), again.step(batch)
        assert one is not None
        assert other is not None
        assert one.tolist() == other.tolist()
    torch.testing.assert_close(again.full_state_dict(), first.full_state_dict(), rtol=0, atol=0)


class LongCapture(ScriptedCuda):
    """A capture takes 5 s, and memory that is free afterwards; warming up for it takes more."""

    def capture(
        self, work: Callable[[], None], device: torch.device, *, warm_up: Callable[[], None]
    ) -> Callable[[], None]:
        def warmed() -> None:
            self._allocate_once(5000, device)
            warm_up()
            self._allocate_once(1000, device)

        self.now_s += 5.0
        return super().capture(work, device, warm_up=warmed)

    def _allocate_once(self, size_bytes: int, device: torch.device) -> None:
        self.allocate(size_bytes, device)
        self.allocate(-size_bytes, device)


@pytest.mark.slow
def test_a_step_is_captured_before_the_first_window_and_counts_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (device := LongCapture()).install(monkeypatch)
    monkeypatch.setattr(Adam, "counts_on_host", False)
    now = SimpleNamespace(time=lambda: device.now_s, perf_counter=lambda: device.now_s, process_time=lambda: 0.0)
    monkeypatch.setattr(clock, "time", now)
    run, startup, losses = configure(*MLP, *OPTIMIZERS["adam"], "epochs=2"), clock.StartUp(0.0, 0.0), []
    for each in (run, captured(run)):
        replica, journal = run.strategy.prepare(build_model(run), each, WORLD), mock.MagicMock()
        loader, begun = loader_of(replica, run), startup if each.graph else None
        Trainer(replica, loader, run=each, world=WORLD, journal=journal, startup=begun).train()
        written = [call.args for call in journal.write.call_args_list]
        losses.append([row for table, rows in written if table == "losses" for row in rows])
        ranks = [row for table, rows in written if table == "ranks" for row in rows]
        assert [row["peak_allocated_bytes"] for row in ranks] == [1000 * each.graph, 0]
        assert [row["epoch_time_s"] for row in ranks] == [0.0, 0.0]
    assert device.captured == 1
    assert startup.parts["startup_compile_s"] == 5.0
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2 * run.steps_per_epoch


def test_sums_of_a_step_outlast_the_next_one(device: ScriptedCuda) -> None:
    run = configure(*MLP)
    replica = run.strategy.prepare(build_model(run), captured(run), WORLD)
    batches = loader_of(replica, run).train(epoch=1)
    first = replica.step(next(batches))
    assert first is not None
    before = first.tolist()
    replica.step(next(batches))
    assert first.tolist() == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [("ddp", 2), ("fsdp", 2), ("hsdp", 4)], ids=lambda of: of[0])
def test_several_ranks_are_captured_like_one_device(strategy: tuple[str, int], tmp_path: Path) -> None:
    name, devices = strategy
    run = configure(*MLP, f"strategy={name}", f"devices={devices}", *OPTIMIZERS["sgd"])
    ranks = run_ranks(_train, devices, tmp_path, captured(run))
    expected = one_device(run)
    torch.testing.assert_close(ranks[0]["state"], expected["state"], rtol=0, atol=1e-9)
    torch.testing.assert_close(ranks[0]["gradients"], expected["gradients"], rtol=0, atol=1e-9)
    alike = run_ranks(_train, devices, tmp_path, run)
    assert [rank["sent"] for rank in ranks] == [rank["sent"] for rank in alike], "warm-up steps don't count"


@pytest.mark.exhaustive
def test_what_captured_layers_send_counts_at_each_replay(tmp_path: Path) -> None:
    run = configure(*NORMED, "model.norm=sync", "strategy=ddp", "devices=2")
    found = run_ranks(_sent_by_layers, 2, tmp_path, run)
    assert min(found[0]) > 0
    assert run_ranks(_sent_by_layers, 2, tmp_path, captured(run)) == found


def _sent_by_layers(rank: int, size: int, run: RunConfig) -> list[int]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        ScriptedCuda().install(monkeypatch)
        world = World(rank=rank, size=size, local_rank=rank, devices=(CPU,))
        replica = new_replica(build_model(run), run, world)
        sent = []
        for batch in islice(loader_of(replica, run).train(epoch=1), 2):
            replica.step(batch)
            sent.append(replica.traffic.take()["activation_bytes_sent"])
        return sent


def _train(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        script = ScriptedCuda()
        script.install(monkeypatch)
        # DDP wants to know the index of a CUDA device.
        world = World(rank=rank, size=dist.get_world_size(), local_rank=rank, devices=(CPU,))
        replica = run.strategy.prepare(build_model(run), run, world)
        trained = drive(replica, run)
        assert (script.captured, script.replayed) == ((1, 3) if run.graph else (0, 0))
        assert script.calls[:1] == (["aside"] if run.graph and run.strategy.name == "ddp" else [])
        return trained | {"sent": replica.traffic.take()["gradient_bytes_sent"]}


@pytest.mark.exhaustive
def test_after_training_captured_steps_are_held_against_plain_code(device: ScriptedCuda) -> None:
    """All batches of a run have one shape, so the graph takes the closing check's, too."""
    run = captured(configure(*SMALL, "strategy=single"))
    rows = closed(WORLD, run)
    assert not failed(rows)
    assert {"loss", "gradients", "update", "rounding", "evaluation loss"} <= passed(rows)
    assert device.captured == 1
    assert "update" in failed(closed(WORLD, run, stops_updating, 0))


@pytest.mark.exhaustive
def test_a_replayed_all_reduce_is_counted_by_nobody_and_no_fault(tmp_path: Path) -> None:
    run = configure(*SMALL, "strategy=ddp", "devices=2")
    for rows in run_ranks(_close, 2, tmp_path, run)[0]:
        assert not failed(rows)
        assert {"loss", "gradients", "update", "rounding"} <= passed(rows)
        assert [row["detail"] for row in rows if row["check"] == "bytes"] == ["graph=true"]


def _close(rank: int, size: int, run: RunConfig) -> list[Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        ScriptedCuda().install(monkeypatch)
        return [closed(World(rank=rank, size=size, local_rank=rank, devices=(CPU,)), captured(run))]
