"""What a strategy of one's own returns from prepare, refused by what it lacks."""

from __future__ import annotations

from typing import Any

import pytest

from launch.sweep import one_run
from parallelbench.errors import ConfigError
from parallelbench.strategies.single import Single
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.helpers import TINY


class Steps:
    """No replica, but it steps."""

    def step(self, batch: Any) -> None:
        """Nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, r"strategy=single: prepare returns NoneType, which lacks .*data_shard.*step.*BaseReplica"),
        (Steps(), r"returns Steps, which lacks close, copied, .*ModuleReplica"),
    ],
)
def test_what_is_no_replica_is_refused_by_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, made: Any, message: str
) -> None:
    run = one_run([*TINY, "strategy=single"]).run
    assert new_replica(build_model(run), run, World()) is not None
    monkeypatch.setattr(Single, "prepare", lambda *_: made)
    with pytest.raises(ConfigError, match=message):
        new_replica(build_model(run), run, World())
