"""Parameter servers: shards, synchronous training, bytes, refusals. For asynchronous ones see `test_downpour.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallelbench.config.components import Batch
from parallelbench.config.run import RunConfig
from parallelbench.strategies.servers import Schedule
from parallelbench.strategies.servers.servers import AsyncServer, Layout, shard_bounds
from parallelbench.strategies.servers.workers import HostedParameters
from parallelbench.strategies.state import FlatParameters
from parallelbench.training.torch_session import build_model
from tests.ranks import run_ranks
from tests.strategies.serving import EPOCHS, PARAMETERS, small, train_epochs
from tests.strategies.training import loader_of, prepared

# --- shards and schedules


@pytest.mark.slow
@given(length=st.integers(0, 10_000), count=st.integers(1, 64))
def test_shards_cover_the_vector_in_nearly_equal_parts(length: int, count: int) -> None:
    bounds = shard_bounds(length, count)
    assert len(bounds) == count
    assert [index for start, stop in bounds for index in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_parameters_become_views_of_one_vector(memory_format: torch.memory_format) -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 7)).to(memory_format=memory_format)
    module[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = HostedParameters(module)
    assert flat.values.numel() == 5 * 27 + 20 * 7 + 7
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.stride() == before[name].stride()
    module(torch.randn(2, 3, 4, 4)).sum().backward()
    flat.gather_gradient()
    named = flat.named_views(flat.gradient_to_host(), module)
    for name, parameter in module.named_parameters():
        assert parameter.grad is None or torch.equal(named[name], parameter.grad)
    flat.values.mul_(2)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name] * (2 if parameter.requires_grad else 1))


def test_only_who_asks_for_copies_on_the_host_has_them() -> None:
    """Pinning memory takes a GPU: without one, a copy would fail for parameters that are not on the CPU."""
    module = nn.Linear(3, 5, device="meta")
    assert FlatParameters(module, multiple=4).values.shape == (20,)
    assert vars(FlatParameters(nn.Linear(3, 5))).keys() & {"host_values", "host_gradient"} == set()


@given(steps=st.integers(1, 50), n_push=st.integers(1, 60), n_fetch=st.integers(1, 60))
def test_a_schedule_pushes_every_gradient_and_fetches_only_within_the_epoch(
    steps: int, n_push: int, n_fetch: int
) -> None:
    schedule = Schedule(steps, n_push, n_fetch)
    assert len(schedule.push_steps) == -(-steps // n_push)
    assert schedule.push_steps[-1] == steps
    assert not schedule.fetches_before(1)
    assert schedule.requests == -(-steps // n_push) + -(-steps // n_fetch) - 1


@pytest.mark.parametrize("steps", [10, 1000])
def test_a_servers_step_does_not_walk_through_the_epoch(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the schedule says of each step is asked once in a training, however long the epoch is."""
    asked: list[int] = []

    def noted(name: str) -> Callable[[Schedule, int], bool]:
        real = getattr(Schedule, name)
        return lambda schedule, step: asked.append(step) or real(schedule, step)

    for name in ("fetches_before", "pushes_after"):
        monkeypatch.setattr(Schedule, name, noted(name))
    run, schedule = small("strategy=parameter_server", "strategy.mode=async", "devices=2"), Schedule(steps, 2, 3)
    server = AsyncServer(build_model(run), Layout(rank=1, workers=1, servers=1), run, schedule)
    monkeypatch.setattr(server, "_serve", lambda: setattr(server, "_served", server._served + 1))
    monkeypatch.setattr(server, "_end_epoch", lambda: None)
    for _ in range(steps):
        server.step(Batch(None, None, 0))
    assert server._served == steps // 2 + -(-steps // 3) - 1, "pushes, and fetches but for the first"
    assert len(asked) == 2 * steps


# --- sync: like one device


@pytest.mark.exhaustive
def test_synchronous_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    run = small("strategy=parameter_server", "devices=4", "strategy.servers=2")
    ranks = run_ranks(train_epochs, 4, tmp_path, run)
    size, steps = PARAMETERS * 8, run.steps_per_epoch
    for worker in ranks[:2]:
        assert worker["sent"] == [{"gradient": steps * size, "parameter": 0}] * EPOCHS
        assert worker["pushes"] == [[(step, 0) for step in range(1, steps + 1)]] * EPOCHS
    for server in ranks[2:]:
        assert server["sent"] == [{"gradient": 0, "parameter": steps * 2 * size // 2}] * EPOCHS


def optimizer_bytes(rank: int, size: int, run: RunConfig) -> int:
    """Memory of the optimizer's state on this rank, before the first step and after it."""
    replica = prepared(run, rank, size)
    replica.step(next(loader_of(replica, run).train(1)))
    states = replica._optimizer.state.values()  # type: ignore[attr-defined]
    return sum(value.nbytes for state in states for value in state.values() if value.dim())


@pytest.mark.cases("sync")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_optimizers_state_is_on_the_servers_only(mode: str, tmp_path: Path) -> None:
    batch = "batch_size=96"  # the first step is the epoch
    run = small("strategy=parameter_server", f"strategy.mode={mode}", "devices=3", "optimizer=adagrad", batch)
    assert run_ranks(optimizer_bytes, 3, tmp_path, run) == [0, 0, PARAMETERS * 8]


# --- refusals
