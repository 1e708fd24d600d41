"""compile=true changes how, not what: each strategy that takes it trains like one device that compiles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parallelbench.rank.session import build_model
from parallelbench.rank.world import World
from parallelbench.spec.config import RunConfig
from tests.ranks import run_ranks
from tests.strategies.test_parity import OVERRIDES, assert_equal
from tests.strategies.training import configure, drive, loader_of, one_device

DATA = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37", "data.image_size=8"]
MLP = [*DATA, "model=mlp", "model.hidden=[24]"]
DEVICES = {
    "ddp": 2,
    "dp_pp_tp": 4,
    "dp_tp": 4,
    "fsdp": 2,
    "hsdp": 4,
    "model_parallel": 2,
    "parameter_server": 2,
    "pipeline": 2,
    "ring_ddp": 2,
    "sandblaster_lbfgs": 2,
    "tensor_parallel": 2,
    "zero1": 2,
}


def train_compiled(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Compile as a session does, then train; and how many graphs there were to compile."""
    from torch._dynamo.utils import counters

    replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    replica.compile_warmup(next(loader_of(replica, run).train(epoch=1)))
    return {**drive(replica, run), "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DEVICES)
@pytest.mark.cases("ddp", "dp_pp_tp")
def test_a_compiled_strategy_trains_like_one_device(strategy: str, tmp_path: Path) -> None:
    own = OVERRIDES.get(strategy, [])
    run = configure(*MLP, f"strategy={strategy}", f"devices={DEVICES[strategy]}", "compile=true", *own)
    ranks = run_ranks(train_compiled, run.strategy.processes(run, "cpu"), tmp_path, run)
    assert any(rank["graphs"] for rank in ranks)
    assert_equal(ranks, one_device(msgspec.structs.replace(run, compile=False)), tolerance=1e-9)
