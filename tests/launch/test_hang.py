"""A rank that hangs: the others run out of patience, the run ends, and its outcome names the one that hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers import TINY
from tests.launch.programs import completed, own_strategy, the_run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CODE = '''
"""A strategy of which one rank stops to take part."""
import time

from parallelbench.strategies.{module} import {base}


class Mine({base}, frozen=True, kw_only=True):
    """In the second epoch, rank 1 trains no more, for longer than any test waits."""

    def prepare(self, model, run, world):
        replica = super().prepare(model, run, world)
        evaluate = replica.evaluate

        def last(batches):
            replica.step = lambda batch: time.sleep(3600)
            return evaluate(batches)

        if world.rank == 1:
            replica.evaluate = last
        return replica
'''
KINDS = {
    "ddp": ("data_parallel", "Ddp", ""),  # two ranks wait for the same gradients
    "parameter_server": ("servers", "ParameterServer", "mode: async\n"),  # a worker for the server, that for anybody
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.cases("ddp")
def test_the_rank_that_hangs_is_named_and_not_those_that_wait_for_it(strategy: str, tmp_path: Path) -> None:
    module, base, more = KINDS[strategy]
    own = own_strategy(tmp_path, CODE.format(module=module, base=base), like=strategy, more=more)
    options = ["devices=3", "batch_size=24", "epochs=5", "measure.parity=false"]
    options += ["measure.probe=false", "measure.telemetry_hz=0"]
    limits = ["launcher.oversubscribe=true", "launcher.collective_timeout_s=20"]
    code, text = completed("run", *own, *TINY, *options, *limits, results=tmp_path / "results")
    assert code == 1, text
    state = the_run(tmp_path / "results").state()
    assert state.outcome is not None
    assert state.outcome.outcome == "timeout"
    assert state.outcome.reason == (
        "rank 1 hangs: rank 0 and rank 2 waited for it longer than launcher.collective_timeout_s"
    )
    assert state.to_run, "it may go better next time"
