"""Sharded L-BFGS: the line search is torch's, the vectors are one device's, bytes, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lbfgs import _strong_wolfe

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.strategies.lbfgs import SandblasterLbfgs
from parallelbench.strategies.lbfgs.wolfe import Point, Search, cubic_minimum, strong_wolfe
from parallelbench.training.checks.likeness import as_checked, as_reference
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.serving import PARAMETERS, small
from tests.strategies.test_parity import SYNTHETIC
from tests.strategies.training import configure, loader_of
from tests.test_parity_gate import passed

FULL = ["optimizer=lbfgs", "optimizer.lr=1.0", "batch_size=96"]
STEPS = 12

Curve = Callable[[float], tuple[float, float]]
"""From a step length to the loss and its derivative."""


# --- the line search


def searched(search: Search, curve: Curve) -> tuple[float, list[float]]:
    """The step length taken, and those tried."""
    tried = [next(search)]
    while True:
        try:
            tried.append(search.send(curve(tried[-1])))
        except StopIteration as end:
            return end.value, tried


@given(
    scale=st.floats(0.01, 100),
    wave=st.floats(0, 5),
    frequency=st.floats(0.1, 20),
    minimum=st.floats(0.01, 30),
    first=st.floats(0.01, 10),
    evaluations=st.integers(1, 25),
)
def test_the_line_search_tries_and_takes_what_torchs_does(
    scale: float, wave: float, frequency: float, minimum: float, first: float, evaluations: int
) -> None:
    def curve(t: float) -> tuple[float, float]:
        loss = scale * (t - minimum) ** 2 + wave * math.cos(frequency * t)
        return loss, 2 * scale * (t - minimum) - wave * frequency * math.sin(frequency * t)

    theirs: list[float] = []

    def objective(_x: object, t: Any, _d: object) -> tuple[float, torch.Tensor]:
        theirs.append(float(t))
        loss, slope = curve(float(t))
        return loss, torch.tensor([slope], dtype=torch.float64)

    loss, slope = curve(0.0)
    one = torch.ones(1, dtype=torch.float64)
    start = one * slope
    _, _, expected, _ = _strong_wolfe(objective, None, first, one, loss, start, start.dot(one), max_ls=evaluations)
    taken, tried = searched(
        strong_wolfe(Point(0.0, loss, slope), first, direction_max=1.0, evaluations=evaluations), curve
    )
    assert tried == pytest.approx(theirs, rel=1e-6)
    assert taken == pytest.approx(float(expected), rel=1e-6)


def test_a_cubic_without_a_minimum_is_halved() -> None:
    assert cubic_minimum(Point(0, 0, -1), Point(2, -2, -1)) == 1, "a straight line"
    assert cubic_minimum(Point(0, 0, -1), Point(1, -2 / 3, -1), (3.0, 5.0)) == 4


# --- sharded vectors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [(2, ["optimizer.history_size=3"]), (3, ["optimizer.lr=0.1"]), (4, ["optimizer.line_search_evaluations=2"])],
)
def test_many_iterations_equal_those_of_torch(devices: int, options: list[str], tmp_path: Path) -> None:
    """The history wraps around; the length of the parameter vector is no multiple of the ranks."""
    model = ["model=logistic_regression", "data.image_size=9"]
    run = configure(*SYNTHETIC, *model, "strategy=sandblaster_lbfgs", f"devices={devices}", *FULL, *options)
    ranks = run_ranks(iterate, devices, tmp_path, run)
    expected = iterate(0, 1, as_reference(run))
    losses = [sum(values) for values in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=1e-9)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(ranks[0]["state"], expected["state"], rtol=0, atol=1e-9)


def iterate(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Some iterations on this rank, and what they sent."""
    replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    evaluations = 0
    forward_backward = replica._forward_backward  # type: ignore[attr-defined]

    def counted(batch: Any) -> Any:
        nonlocal evaluations
        evaluations += 1
        return forward_backward(batch)

    replica._forward_backward = counted  # type: ignore[attr-defined]
    batches = chain.from_iterable(map(loader_of(replica, run).train, count(1)))
    results = [replica.step(next(batches)) for _ in range(STEPS)]
    return {
        "losses": [result[0].item() for result in results if result is not None],
        "state": replica.full_state_dict(),
        "evaluations": evaluations,
        "sent": (replica.traffic.gradient, replica.traffic.parameter),
    }


@pytest.mark.slow
def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    run = small("strategy=sandblaster_lbfgs", "devices=3", *FULL)
    padded = -(-PARAMETERS // 3) * 3 * 8
    for rank in run_ranks(iterate, 3, tmp_path, run):
        gradient, parameter = rank["sent"]
        assert gradient == rank["evaluations"] * padded * 2 / 3, "each evaluation reduce-scatters one gradient"
        moves = parameter / (padded * 2 / 3)
        assert moves == int(moves)
        assert rank["evaluations"] - STEPS <= moves <= rank["evaluations"], "each trial gathers, or so does the end"


class ForgetfulShard(SandblasterLbfgs, frozen=True, kw_only=True):
    """The last rank leaves its part out of all dot products."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        if world.rank == world.size - 1:
            history = replica._history  # type: ignore[attr-defined]
            history.dot = lambda a, b: history.total(torch.zeros(()))
        return replica


@pytest.mark.slow
def test_a_shard_missing_from_dot_products_is_caught_even_in_fp32(tmp_path: Path) -> None:
    run = small("strategy=sandblaster_lbfgs", "devices=2", "precision=fp32", *FULL)
    assert as_checked(run).precision == "fp64"
    (tmp_path / "right").mkdir()
    assert passed(run, tmp_path / "right")
    assert not passed(msgspec.structs.replace(run, strategy=ForgetfulShard(name="wrong")), tmp_path)


# --- refusals


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["strategy=sandblaster_lbfgs", "devices=2"], ["optimizer=sgd", "optimizer=lbfgs", "batch_size=96"]),
        (["strategy=sandblaster_lbfgs", "devices=5"], ["batch_size=95"]),
        (
            ["strategy=sandblaster_lbfgs", "devices=2", *FULL, "batch_size=24"],
            ["batch_size=24", "choose batch_size=96"],
        ),
        (
            ["strategy=sandblaster_lbfgs", "devices=2", *FULL, "batch_size=24", "scaling=weak"],
            ["choose batch_size=48 (per device"],
        ),
        (["strategy=sandblaster_lbfgs", "devices=1", *FULL], ["devices=2", "strategy=single optimizer=lbfgs"]),
        (["strategy=ddp", "devices=2", *FULL], ["strategy=ddp", "strategy=sandblaster_lbfgs", "strategy=single"]),
        (
            ["strategy=parameter_server", "devices=2", *FULL],
            ["=parameter_server", "or optimizer=adagrad, adam"],
        ),
        (["strategy=single", *FULL, "batch_size=95"], ["choose batch_size=96"]),
        (["strategy=single", *FULL, "precision=bf16"], ["precision=fp32 or fp64"]),
        (["strategy=single", *FULL, "channels_last=true"], ["channels_last=false"]),
    ],
)
def test_what_lbfgs_cannot_do_is_refused_with_the_fix(overrides: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        small(*overrides)
    for words in said:
        assert words in str(caught.value)
