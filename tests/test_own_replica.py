"""What a strategy of one's own returns from prepare, refused by what it lacks, or says in another form."""

from __future__ import annotations

from typing import Any

import pytest

from launch.sweep import one_run
from parallelbench.errors import ConfigError
from parallelbench.strategies.single import Single
from parallelbench.training.checks.copies import Copies
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


@pytest.mark.parametrize(
    ("copied", "message"),
    [
        ((), r"strategy=single: copied of Holds returns tuple: return a dict of 2 groups at most, .*\{\} where"),
        (None, "returns NoneType: return a dict"),
        ({0: (), 1: (), 2: ()}, "returns 3 groups: return a dict of 2 groups at most"),
    ],
)
def test_what_other_ranks_hold_too_is_a_mapping_of_two_groups_at_most(copied: Any, message: str) -> None:
    class Holds:
        def copied(self) -> Any:
            return copied

    run: Any = one_run([*TINY, "strategy=single"]).run
    replica: Any = Holds()
    with pytest.raises(ConfigError, match=message):
        Copies(replica, run, World())
