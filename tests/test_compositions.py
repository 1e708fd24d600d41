"""What is composed by hand is what Hydra composes, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from launch.sweep.compose import _composed, _set_by_hand, by_hydra, group_choices
from parallelbench.errors import ConfigError

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

    assert outcome(_composed) == outcome(by_hydra)


@pytest.mark.cases("loss")
@pytest.mark.parametrize("group", sorted({*group_choices()} - {"program"}))  # of which none is there by default
def test_each_shipped_file_is_set_by_hand_to_what_hydra_makes_of_it(group: str) -> None:
    for name in group_choices()[group]:
        assert repr(_set_by_hand([f"{group}={name}"], None)) == repr(by_hydra([f"{group}={name}"], None))


@pytest.mark.exhaustive
def test_files_of_ones_own_that_do_more_than_set_their_node_are_left_to_hydra(tmp_path: Path) -> None:
    files = {
        "model/wide.yaml": "defaults: [mlp, _self_]\nname: wide\nhidden: [512]\n",
        "model/late.yaml": "defaults: [_self_, mlp]\nname: late\n",
        "model/silent.yaml": "defaults: [mlp]\nname: silent\n",
        "model/everywhere.yaml": "# @package _global_\nepochs: 7\n",
        "model/other.yaml": "defaults: [mlp, override /optimizer: sgd, _self_]\nname: other\n",
        "model/number.yaml": "_target_: a.B\nname: number\nrate: 1e-3\n",
        "model/sub/x.yaml": "name: x\n",
        "model/nest.yaml": "defaults: [sub/x, _self_]\nname: nest\n",
        "experiment/mine.yaml": "# @package _global_\nepochs: 7\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    group_choices.cache_clear()
    for path in files:
        group, _, name = path.removesuffix(".yaml").partition("/")
        overrides = [f"{group}={name}", "batch_size=3"]
        if name == "late":  # mlp comes later, with its name
            with pytest.raises(ConfigError, match="model=late has `name: mlp`"):
                _composed(overrides, tmp_path)
            continue
        try:
            expected = repr(by_hydra(overrides, tmp_path))
        except HydraException as error:
            with pytest.raises(HydraException, match=str(error).split("\n")[0][:30]):
                _composed(overrides, tmp_path)
        else:
            assert repr(_composed(overrides, tmp_path)) == expected, path
