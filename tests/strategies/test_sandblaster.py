"""Sharded L-BFGS: torch's on one device and over parts of vectors are the same, and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallelbench.config.run import RunConfig
from parallelbench.strategies.lbfgs.sandblaster import ShardedVector
from parallelbench.training.checks.comparability import as_reference
from tests.ranks import run_ranks
from tests.strategies.serving import PARAMETERS, small
from tests.strategies.test_parity import SYNTHETIC
from tests.strategies.training import configure, loader_of, prepared

FULL = ["optimizer=lbfgs", "optimizer.lr=1.0", "batch_size=96"]
STEPS = 12

# --- sharded vectors


@pytest.mark.cases("2-options0")
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
    assert losses == pytest.approx(expected["losses"], rel=1e-11)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(ranks[0]["state"], expected["state"], rtol=0, atol=1e-11)


def iterate(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Some iterations on this rank, and what they sent."""
    replica = prepared(run, rank, size)
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
def test_reductions_are_those_of_the_whole_vector(tmp_path: Path) -> None:
    whole = VECTOR.dot(VECTOR.neg()), VECTOR.abs().sum(), VECTOR.abs().max()
    for rank in run_ranks(reductions, 3, tmp_path):
        assert rank == [number.item() for number in whole]


VECTOR = torch.tensor([3.0, -8.0, 1.0, 5.0, -2.0, 0.0])


def reductions(rank: int, size: int) -> list[float]:
    """Those that `torch.optim.LBFGS` computes, of this rank's part."""
    part = VECTOR.chunk(size)[rank].as_subclass(ShardedVector)
    numbers = [part.dot(part.neg()), part.abs().sum(), part.abs().max()]
    assert {type(number) for number in numbers} == {Tensor}
    return [number.item() for number in numbers]


@pytest.mark.parametrize(
    "reduction",
    [
        *(lambda part: torch.dot(part, part), lambda part: part @ part, lambda part: part.vdot(part)),
        *(lambda part: torch.linalg.vecdot(part, part), torch.linalg.vector_norm, Tensor.norm, Tensor.amax, torch.sum),
    ],
)
def test_a_reduction_that_another_torch_may_use_is_an_error_and_not_a_parts(reduction: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="not that of the whole vector"):
        reduction(VECTOR.as_subclass(ShardedVector))


@pytest.mark.exhaustive
def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    run = small("strategy=sandblaster_lbfgs", "devices=3", *FULL)
    padded = -(-PARAMETERS // 3) * 3 * 8
    for rank in run_ranks(iterate, 3, tmp_path, run):
        gradient, parameter = rank["sent"]
        assert gradient == rank["evaluations"] * padded * 2 / 3, "each evaluation reduce-scatters one gradient"
        moves = parameter / (padded * 2 / 3)
        assert moves == int(moves)
        assert rank["evaluations"] - STEPS <= moves <= rank["evaluations"], "each trial gathers, or so does the end"
