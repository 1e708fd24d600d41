"""Every strategy trains like one device: losses, gradients, parameters, evaluation, in fp64."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.training.checks.compared import local_statistics
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.helpers import torchs_strategies
from tests.ranks import PATIENCE_S, run_ranks
from tests.strategies.training import STEPS, configure, one_device, summed, train

pytestmark = pytest.mark.slow

SYNTHETIC = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37"]
MODELS = {
    "mlp": ["model=mlp", "data.image_size=32"],
    "cnn_small": ["model=cnn_small", "data.image_size=28"],
    "vit_tiny": ["model=vit_tiny", "data.image_size=32"],
    "resnet_sync": ["model=resnet_tiny", "model.norm=sync", "data.image_size=32"],
    "resnet_group": ["model=resnet_tiny", "model.norm=group", "data.image_size=32"],
}
OVERRIDES = {
    "downpour": ["optimizer.momentum=0.0"],
    "sandblaster_lbfgs": ["optimizer=lbfgs", "optimizer.lr=1.0", "batch_size=96"],
}
"""What a strategy needs besides its file."""
SHIPPED = [name for name in torchs_strategies() if name not in ("single", "expert_parallel")]
"""`expert_parallel` takes models with experts only: `test_expert_parallel.py`."""


CHESSBOARD = [
    (strategy, model, size)
    for row, strategy in enumerate(SHIPPED)
    for column, model in enumerate(MODELS)
    for size in (2, 4)
    if model == "mlp" or (row + column + size // 2) % 2 == 0
]
"""Each strategy with each model and with each size, and each model with each size."""


@pytest.mark.parametrize(("strategy", "model", "size"), CHESSBOARD)
@pytest.mark.cases("ddp-resnet_group-*", "fsdp-resnet_group-*", "pipeline-resnet_group-*", "*-mlp-4")
def test_every_shipped_strategy_trains_like_one_device(strategy: str, model: str, size: int, tmp_path: Path) -> None:
    """And a state of one device passes through it; so it does between any two, for their names and layout are its."""
    options = [f"launcher.collective_timeout_s={PATIENCE_S}", *OVERRIDES.get(strategy, [])]
    for devices in (size, *([] if model == "mlp" else [6 - size])):  # where a size is refused, the other one
        try:
            run = configure(*SYNTHETIC, *MODELS[model], f"strategy={strategy}", f"devices={devices}", *options)
            break
        except ConfigError as error:
            refused = error
    else:
        pytest.skip(f"refused: {refused}")
    expected = one_device(run)
    ranks = run_ranks(train_and_hand_on, run.strategy.processes(run, "cpu"), tmp_path, run, expected["state"])
    trained, handed_on, timeouts = zip(*ranks, strict=True)
    assert list(handed_on[0]) == list(expected["state"])
    torch.testing.assert_close(handed_on[0], expected["state"], rtol=0, atol=0)
    assert set().union(*timeouts) == {PATIENCE_S}, "torch gives a new group half an hour, however short the run's own"
    if _computes_as_one_device(run):
        assert_equal(list(trained), expected, tolerance=1e-9)


def _computes_as_one_device(run: RunConfig) -> bool:
    """Asynchronous ones do not: they are compared with a sequential simulation elsewhere.

    Nor do micro-batches under norm=sync, which normalise on their own; norm=group is tested.
    """
    return run.strategy.equals_one_device(run) and not local_statistics(run)


Trained = tuple[dict[str, Any] | None, dict[str, torch.Tensor], set[float]]


def train_and_hand_on(rank: int, size: int, run: RunConfig, state: dict[str, torch.Tensor]) -> Trained:
    """What `train` gives, where that can be compared; the state as it comes out again; groups' timeouts in seconds."""
    trained = train(rank, size, run) if _computes_as_one_device(run) else None
    model = build_model(run).double()
    model.load_state_dict(state, strict=True)
    handed_on = run.strategy.prepare(model, run, World(rank=rank, size=size, local_rank=rank)).full_state_dict()
    return trained, handed_on, timeouts_s()  # of both replicas' groups


def timeouts_s() -> set[float]:
    """How long the process groups of this rank wait; the first is that of `run_ranks`."""
    groups, cpu = dist.distributed_c10d._world.pg_map, torch.device("cpu")
    return {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}


def test_no_strategy_is_refused_everywhere() -> None:
    """A strategy that no model and no size suits would be skipped above, silently."""
    for strategy in SHIPPED:
        if strategy in ("data_parallel", "context_parallel", "fsdp_cp"):
            continue  # one needs two GPUs; the others take tokens: test_context_parallel.py, test_fsdp_cp.py
        possible = 0
        for model in MODELS.values():
            for size in (2, 4):
                with contextlib.suppress(ConfigError):
                    overrides = OVERRIDES.get(strategy, [])
                    configure(*SYNTHETIC, *model, f"strategy={strategy}", f"devices={size}", *overrides)
                    possible += 1
        assert possible, strategy


def test_the_tutorials_map_goes_back_to_the_first_device(tmp_path: Path) -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], "strategy=model_parallel_tutorial", "devices=2")
    ranks = run_ranks(train, 2, tmp_path, run)
    assert_equal(ranks, one_device(run), tolerance=0.0)
    assert [rank["steps"][0] is None for rank in ranks] == [False, True], "rank 0 holds fc4, so it owns the loss"


def test_naive_model_parallelism_is_bitwise_equal(tmp_path: Path) -> None:
    run = configure(*SYNTHETIC, *MODELS["cnn_small"], "strategy=model_parallel", "devices=2")
    assert_equal(run_ranks(train, 2, tmp_path, run), one_device(run), tolerance=0.0)


@pytest.mark.exhaustive
def test_batch_norm_differs_between_shards(tmp_path: Path) -> None:
    run = configure(
        *SYNTHETIC, "model=resnet_tiny", "model.norm=batch", "data.image_size=32", "strategy=ddp", "devices=2"
    )
    with pytest.raises(AssertionError):
        assert_equal(run_ranks(train, 2, tmp_path, run), one_device(run), tolerance=1e-9)


def assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], *, tolerance: float) -> None:
    """What the ranks computed together is what one device computed."""
    for step in range(STEPS):
        together = summed([rank["steps"][step] for rank in ranks])
        assert together == pytest.approx(expected["steps"][step], rel=tolerance, abs=tolerance)
    evaluated = summed([rank["evaluated"] for rank in ranks])
    assert evaluated == pytest.approx(expected["evaluated"], rel=tolerance, abs=tolerance)
    for what in ("gradients", "state"):
        torch.testing.assert_close(ranks[0][what], expected[what], rtol=0, atol=tolerance)
        assert list(ranks[0][what]) == list(expected[what]), "same names in the same order"
        assert not any(rank[what] for rank in ranks[1:])
