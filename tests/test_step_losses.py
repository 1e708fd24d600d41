"""Losses of single steps: as a loop by hand has them, whatever pieces a strategy computes them in."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.strategies.replica import added
from parallelbench.training.observers import BLOCK, by_step, rows_of
from parallelbench.training.torch_session import build_model
from parallelbench.world.numerics import Sums, sums
from tests.ranks import run_ranks
from tests.strategies.training import configure, plain_epochs, trained
from tests.test_closing import SMALL


def on_ranks(rank: int, size: int, runs: list[RunConfig]) -> list[list[dict[str, Any]]]:
    return [trained(rank, size, run)[0]["losses"] for run in runs]


@pytest.mark.slow
def test_rows_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    exact = [*SMALL, "precision=fp64", "devices=2"]
    pieces = ["strategy.micro_batches=4"]
    runs = [configure(*exact, "strategy=ddp"), configure(*exact, "strategy=pipeline", *pieces)]
    expected = list(chain.from_iterable(plain_epochs(build_model(runs[0]).double(), runs[0])))
    for rows in run_ranks(on_ranks, 2, tmp_path, runs)[0]:
        steps = runs[0].steps_per_epoch
        assert [(row["epoch"], row["step"], row["steps"]) for row in rows] == [
            (epoch, step, 1) for epoch in (1, 2) for step in range(1, steps + 1)
        ]
        assert [row["train_loss"] for row in rows] == pytest.approx(expected, rel=1e-9)


def test_later_steps_share_rows() -> None:
    rows = list(rows_of([float(step) for step in range(150)], before=10, samples=2))
    assert [row["steps"] for row in rows] == [1] * 54 + [10, 64, 22]
    assert [row["step"] for row in rows] == [*range(1, 55), 55, 65, 129]
    assert rows[0]["train_loss"] == 0.0
    assert rows[-1]["train_loss"] == pytest.approx((128 + 149) / 2 / 2)
    assert not list(rows_of([1.0, math.nan], before=0, samples=2))
    assert [row["steps"] for row in rows_of([1.0] * 70, before=BLOCK, samples=1)] == [64, 6]


def part(value: float) -> Sums:
    return sums(torch.tensor(value), torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("pieces", [1, 3])
def test_steps_are_told_apart_after_any_number_of_them(pieces: int) -> None:
    """Also once sums have been added up, 64 at a time."""
    total: Sums | None = None
    for step in range(150):
        for _ in range(pieces):
            total = added(total, part(step))
    assert by_step(total, 150) == pytest.approx([4.0 * step * pieces for step in range(150)])
    assert all(map(math.isnan, by_step(total, 149)))
    assert by_step(None, 2) == [0.0, 0.0]


def test_replayed_steps_are_told_apart_too() -> None:
    """A captured step returns its sums as one tensor."""
    total: Sums | None = None
    for step in range(70):
        one = Sums([], torch.tensor([float(step), 1.0], dtype=torch.float64), samples=5)
        total = added(total, one)
    assert total is not None
    assert by_step(total, 70) == [float(step) for step in range(70)]
    assert (total.tolist(), total.samples) == ([69 * 70 / 2, 70.0], 350)


def test_samples_count_once_backward_has_reached_them() -> None:
    logits = torch.zeros(4, 3, requires_grad=True) * 2
    loss = torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    total = sums(loss, logits, torch.zeros(4, dtype=torch.int64))
    assert total.samples == 0
    loss.backward(retain_graph=True)
    loss.backward()
    assert total.samples == 4
    assert added(total, part(1.0)).samples == 4, "nothing was differentiated in the second"
