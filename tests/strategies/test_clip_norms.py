"""Norms of gradients before they are clipped: those of a loop by hand, the same on every rank that clips."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.strategies.clipping import StepNorms
from parallelbench.training.loop import Trainer
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_parity import MODELS, SYNTHETIC
from tests.strategies.training import STEPS, Rows, configure, loader_of, one_device, prepared, shard_loader

NAMES = ("gradient_norm_mean", "gradient_norm_max", "clipped_share")


def clipped_to(most: float | None, *overrides: str) -> RunConfig:
    return configure(*SYNTHETIC, *MODELS["mlp"], *overrides, f"clip_norm={'null' if most is None else most}")


def by_hand(run: RunConfig) -> list[float]:
    """The norm of each of `STEPS` steps on one device."""
    return loop_by_hand(run)[0]


def loop_by_hand(run: RunConfig) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The norms, the last step's gradients before they are clipped, and the model."""
    model = build_model(run).double()
    optimizer = run.optimizer.build(model.parameters(), run, "cpu")
    batches, norms = itertools.chain.from_iterable(map(shard_loader(run, Shard()).train, itertools.count(1))), []
    for batch in itertools.islice(batches, STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.images), batch.labels).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(sum((gradient**2).sum().item() for gradient in gradients.values()) ** 0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm or 0.0)
        optimizer.step()
    return norms, gradients, dict(model.state_dict())


def of_ranks(rank: int, size: int, run: RunConfig) -> list[dict[str, float]]:
    """What a rank says after `STEPS` steps, and once more."""
    replica = prepared(run, rank, size)
    batches = itertools.chain.from_iterable(map(loader_of(replica, run).train, itertools.count(1)))
    for batch in itertools.islice(batches, STEPS):
        replica.step(batch)
    taken = [replica.take_norms(), replica.take_norms()]
    replica.close()
    return taken


def summed_up(norms: list[float], most: float) -> dict[str, float]:
    clipped = [norm > most for norm in norms]
    values = (sum(norms) / len(norms), max(norms), sum(clipped) / len(clipped))
    return dict(zip(NAMES, values, strict=True))


@pytest.mark.slow
def test_one_device_clips_as_torch_does() -> None:
    norms, gradients, state = loop_by_hand(run := clipped_to(0.2))
    assert min(norms) > 0.2
    found = one_device(run)
    torch.testing.assert_close(found["state"], state, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["gradients"], gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_norms_are_those_of_a_loop_by_hand() -> None:
    first = by_hand(clipped_to(1e-3))
    most = sorted(by_hand(clipped_to(1e6)))[STEPS // 2]  # so that some steps are clipped, and some are not
    assert len(set(first)) == STEPS
    for limit in (1e-3, most, 1e6):
        run = clipped_to(limit)
        taken, again = of_ranks(0, 1, run)
        assert taken == pytest.approx(summed_up(by_hand(run), limit), rel=1e-12)
        assert again == {}, "they are of the steps since the last call"
    assert 0 < of_ranks(0, 1, clipped_to(most))[0]["clipped_share"] < 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "clips"),
    [
        (("strategy=ddp", "devices=2"), (0, 1)),
        (("strategy=fsdp", "devices=2"), (0, 1)),
        (("strategy=pipeline", "devices=2"), (0, 1)),
        (("strategy=dp_tp", "devices=4"), (0, 1, 2, 3)),
        (("strategy=parameter_server", "strategy.servers=2", "devices=4"), (2, 3)),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
@pytest.mark.cases("*fsdp*")
def test_every_rank_that_clips_knows_the_whole_gradients(
    options: tuple[str, ...], clips: tuple[int, ...], tmp_path: Path
) -> None:
    """Workers of parameter servers clip nothing: the servers do."""
    run = clipped_to(0.2, *options)
    expected = summed_up(by_hand(run), 0.2)
    found = [taken for taken, _ in run_ranks(of_ranks, run.devices, tmp_path, run)]
    assert [rank for rank, taken in enumerate(found) if taken] == list(clips)
    for rank in clips:
        assert found[rank] == pytest.approx(expected, rel=1e-9)


def test_a_step_that_overflowed_counts_neither_way() -> None:
    norms = StepNorms(2.0)
    for value in (1.0, float("inf"), 3.0, float("nan")):
        norms.note(torch.tensor(value))
    assert norms.take() == {"gradient_norm_mean": 2.0, "gradient_norm_max": 3.0, "clipped_share": 0.5}
    norms.note(torch.tensor(float("inf")))
    assert norms.take() == {}


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 200])
def test_none_of_many_steps_is_lost(steps: int) -> None:
    norms = StepNorms(steps / 2)
    for value in range(1, steps + 1):
        norms.note(torch.tensor(float(value)))
    assert norms.take() == summed_up([float(value) for value in range(1, steps + 1)], steps / 2)


def trained(run: RunConfig) -> list[dict[str, Any]]:
    """The rows of `ranks` of all epochs; a step before them belongs to none."""
    replica, journal = prepared(run), Rows()
    loader = shard_loader(run, Shard())
    replica.step(next(loader.train(epoch=9)))
    Trainer(replica, loader, run=run, world=World(), journal=journal).train()  # type: ignore[arg-type]
    return [{name: row[name] for name in NAMES} for row in journal.of["ranks"]]


def test_an_epoch_has_those_of_its_own_steps() -> None:
    run = clipped_to(1e6, "epochs=2")
    rows = trained(run)
    assert [row["clipped_share"] for row in rows] == [0.0, 0.0]
    assert rows[0]["gradient_norm_mean"] != rows[1]["gradient_norm_mean"]
    replica = prepared(run)
    loader = shard_loader(run, Shard())
    replica.step(next(loader.train(epoch=9)))
    replica.take_norms()
    for batch in loader.train(1):
        replica.step(batch)
    assert rows[0] == pytest.approx(replica.take_norms())


def test_without_clipping_there_are_none() -> None:
    assert trained(clipped_to(None, "epochs=1")) == [dict.fromkeys(NAMES)]
