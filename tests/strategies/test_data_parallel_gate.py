"""The parity gate catches each data parallel strategy when it is broken on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor, nn

from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.data_parallel import RingDdp, Zero1, ring
from parallelbench.strategies.data_parallel.ring import ring_average
from parallelbench.strategies.fsdp import Fsdp, Hsdp
from parallelbench.world.world import World
from tests.strategies.training import configure
from tests.test_parity_gate import DATA, passed


class DroppedGradient(RingDdp, frozen=True, kw_only=True):
    """Rank 1 sends zeros round the ring."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        def dropped(values: Tensor, traffic: Traffic) -> None:
            ring_average(values.zero_() if world.rank == 1 else values, traffic)

        ring.ring_average = dropped  # the process ends with the test
        return super().prepare(model, run, world)


class IdleShard(Fsdp, frozen=True, kw_only=True):
    """Rank 1 never updates its shard."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica: Any = super().prepare(model, run, world)
        if world.rank == 1:
            replica._optimizer.step = lambda: None
        return replica


class SameSamples(Hsdp, frozen=True, kw_only=True):
    """Both copies of the model read the same half of each batch."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica: Any = super().prepare(model, run, world)
        replica.data_shard = Shard(world.rank % self.shard, world.size)
        return replica


class IdleOwner(Zero1, frozen=True, kw_only=True):
    """Rank 1 sends its parameters out as they were."""

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica: Any = super().prepare(model, run, world)
        if world.rank == 1:
            replica._optimizer.optim.step = lambda: None
        return replica


@pytest.mark.cases("DroppedGradient-ring_ddp-2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "strategy", "devices"),
    [(DroppedGradient, "ring_ddp", 2), (IdleShard, "fsdp", 2), (SameSamples, "hsdp", 4), (IdleOwner, "zero1", 2)],
)
def test_a_broken_strategy_is_caught_and_a_whole_one_is_not(
    broken: type, strategy: str, devices: int, tmp_path: Path
) -> None:
    run = configure(*DATA, "model=mlp", f"strategy={strategy}", f"devices={devices}", "precision=fp32")
    (tmp_path / "whole").mkdir()
    assert passed(run, tmp_path / "whole")
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    assert not passed(msgspec.structs.replace(run, strategy=broken(**options)), tmp_path)
