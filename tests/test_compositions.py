"""What the tests' shorter way makes of overrides is what Hydra composes, or refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from tests.compositions import _remembered, by_hydra

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

CASES: list[list[str]] = [
    [],
    ["optimizer.lr=0.1", "optimizer=sgd", "epochs=3", "results=/some/where"],
    ["model=mlp", "model.hidden=[3,4]", "model.name='a b'", "epochs=${devices}", "results=${model.name}/x"],
    ["epochs=1", "epochs=2", "seed='007'", "launcher.timeout_s=null", "channels_last=true", "optimizer.eps=1e-9"],
    ["strategy=model_parallel", "strategy.device_map={fc1:0,fc2:1}", "devices=2"],
    ["++strategy.name=renamed", "strategy.name=again", "+model.more=1", "epochs=4"],
    ["strategy.name=first", "++strategy.name=second"],
    ["~sweep", "epochs=2"],
    ["sweep=demo", "sweep.repeats=7", "sweep.blocks=[{grid:{epochs:[1,2]}}]", "sweep.name=x"],
    ["results='\\${epochs}'", "results=$x\\,y", "precision=???"],
    ["model=mlp", "strategy=ddp", "optimizer=sgd", "data=synthetic", "launcher=slurm", "sweep=demo", "devices=2"],
    ["site=a100_80gb", "model=mlp"],
    ["model=mlp", "strategy=ddp", "model=cnn"],
    ["strategy=ddp", "model=nothing"],
    ["model=mlp", "strategy=ddp,fsdp"],
    ["optimizer=1"],
    ["optimizer.nothing=1"],
    ["optimizer.lr.deeper=1"],
    ["optimizer.lr={a:1}"],
    ["data._target_=os.system", "site.setup=[]", "results="],
    ["seed=0x10", "epochs=1_000", "devices=inf", "batch_size=-0.0"],
]


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_the_shorter_way_leads_where_hydra_leads(overrides: list[str]) -> None:
    def outcome(composed: Callable[[list[str], None], Any]) -> str:
        try:
            return repr(composed(list(overrides), None))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    assert outcome(_remembered) == outcome(by_hydra)
