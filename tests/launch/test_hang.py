"""A rank that hangs: the others run out of patience, the run ends, and its outcome names the one that hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers import TINY
from tests.launch.programs import completed, the_run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CODE = '''
"""Strategies of which one rank stops to take part."""
import time

from parallelbench.strategies.data_parallel import Ddp
from parallelbench.strategies.servers import ParameterServer


def hangs(replica, world):
    """In the second epoch, rank 1 trains no more, for longer than any test waits."""
    evaluate = replica.evaluate

    def last(batches):
        replica.step = lambda batch: time.sleep(3600)
        return evaluate(batches)

    if world.rank == 1:
        replica.evaluate = last
    return replica


class HangingDdp(Ddp, frozen=True, kw_only=True):
    """Two ranks wait for the same gradients."""

    def prepare(self, model, run, world):
        return hangs(super().prepare(model, run, world), world)


class HangingServers(ParameterServer, frozen=True, kw_only=True):
    """The worker that goes on waits for the server, and the server for anybody."""

    def prepare(self, model, run, world):
        return hangs(super().prepare(model, run, world), world)
'''
OPTIONS = {
    "HangingDdp": "bucket_mib: 25.0\ngradient_as_bucket_view: true\nstatic_graph: false\ncompression: none\n",
    "HangingServers": "mode: async\nservers: 1\nn_push: 1\nn_fetch: 1\nslow_worker_factor: 1.0\n",
}


QUIET = ["measure.probe=false", "measure.telemetry_hz=0"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", OPTIONS)
@pytest.mark.cases("HangingDdp")
def test_the_rank_that_hangs_is_named_and_not_those_that_wait_for_it(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    yaml = f"_target_: hanging.{strategy}\nname: hanging\n{OPTIONS[strategy]}"
    (tmp_path / "conf" / "strategy" / "hanging.yaml").write_text(yaml)
    (tmp_path / "hanging.py").write_text(CODE)
    own = ["--conf", str(tmp_path / "conf"), "--plugin", str(tmp_path / "hanging.py")]
    options = ["strategy=hanging", "devices=3", "batch_size=24", "epochs=5", "measure.parity=false", *QUIET]
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
