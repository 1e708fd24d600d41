"""Choices that matter on GPUs only: how they reach torch and NCCL, what is recorded, and what old runs are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import yaml

from launch.attempt.processes import Rendezvous, environment
from launch.sweep.compose import group_choices
from parallelbench.config.build import LATER_OPTIONS, from_mapping, to_mapping, whole_mapping
from parallelbench.config.components import Strategy
from parallelbench.config.identity import run_id
from parallelbench.config.run import Measure, Nccl, Preprocess, Settings
from parallelbench.config.run_rules import check_run
from parallelbench.data.torchvision import Mnist
from parallelbench.errors import ConfigError
from parallelbench.measure.environment_match import flatten, is_set_by_launcher, must_match
from parallelbench.optim import optimizers
from parallelbench.strategies import mesh
from parallelbench.strategies.expert import ExpertParallel
from parallelbench.strategies.fsdp import Fsdp
from parallelbench.strategies.tensor import TensorParallel
from parallelbench.world import world
from tests.helpers import configured, plain

CHOICES = {
    "clip_norm": "clip_norm=1.0",
    "compile_scope": "compile_scope=step",
    "activation_recomputation": "activation_recomputation=full",
    "graph": "graph=true",
    "cudnn_benchmark": "cudnn_benchmark=true",
    "measure.waits": "measure.waits=error",
    "nccl.backend": "nccl.backend=lazy",
    "nccl.per_edge": "nccl.per_edge=true",
    "nccl.interface": "nccl.interface=ib0",
    "strategy.gather": "strategy.gather=bf16",
    "strategy.micro_batches": "strategy.micro_batches=2",
    "strategy.vocabulary_parallel": "strategy.vocabulary_parallel=true",
    "strategy.sequence_parallel": "strategy.sequence_parallel=true",
    "strategy.expert_ranks": "strategy.expert_ranks=2",
    "data.files": "data.files=0123456789ab-100-50",
    "preprocess.engine": "preprocess.engine=numpy",
    "preprocess.recipe": "preprocess.recipe=sort",
    "preprocess.threads": "preprocess.threads=2",
    "preprocess.executions": "preprocess.executions=3",
}


SHARDED = ("strategy=fsdp", "devices=2", "data=mnist")
DIVIDED = ("strategy=tensor_parallel", "devices=2", "data=mnist", "model=vit")
EXPERTS = ("strategy=expert_parallel", "devices=4", "data=tokens", "model=gpt_moe_tiny")
BASES = dict.fromkeys(("strategy.vocabulary_parallel", "strategy.sequence_parallel"), DIVIDED)
BASES["strategy.expert_ranks"] = EXPERTS
"""Option → a run that has it, where it is none of `SHARDED`."""
STRATEGIES: dict[tuple[str, ...], type[Strategy]] = {SHARDED: Fsdp, DIVIDED: TensorParallel, EXPERTS: ExpertParallel}


@pytest.mark.parametrize("key", LATER_OPTIONS)
def test_the_default_of_a_later_option_is_the_shipped_one_and_that_of_its_field(key: str) -> None:
    base, default = BASES.get(key, SHARDED), LATER_OPTIONS[key]
    strategy = STRATEGIES[base]
    structs = {"": Settings, "measure": Measure, "nccl": Nccl, "strategy": strategy, "data": Mnist}
    structs["preprocess"] = Preprocess
    assert flatten(plain(*base))[key] == default
    parent, _, name = key.rpartition(".")
    (own,) = (field for field in msgspec.structs.fields(structs[parent]) if field.name == name)
    assert own.default == default


@pytest.mark.parametrize("key", LATER_OPTIONS)
def test_with_its_default_a_later_option_is_no_part_of_a_run_and_else_it_is(key: str) -> None:
    base = BASES.get(key, SHARDED)
    before, run = configured(*base), configured(*base, CHOICES[key])
    assert key not in flatten(to_mapping(before))
    assert flatten(to_mapping(run))[key] == flatten(whole_mapping(run))[key] != LATER_OPTIONS[key]
    assert flatten(whole_mapping(before))[key] == LATER_OPTIONS[key], "`show` shows it all the same"
    assert run_id(run) != run_id(before)
    for each in (before, run):
        assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(each)))) == each


@pytest.mark.parametrize(
    ("group", "default"), [("lr_schedule", "constant"), ("loss", "cross_entropy"), ("metric", "none")]
)
def test_a_later_component_is_no_part_of_a_run_that_has_its_default(group: str, default: str) -> None:
    assert group not in to_mapping(configured())
    assert run_id(configured(f"{group}={default}")) == run_id(configured())
    runs = [configured(f"{group}={name}") for name in group_choices()[group]]
    assert len({run_id(run) for run in runs}) == len(runs) > 1
    assert [from_mapping(to_mapping(run)) for run in runs] == runs
    with pytest.raises(ConfigError, match=f"{group}=None is not a component"):
        from_mapping(plain() | {group: None})


@pytest.mark.parametrize(
    ("choice", "variables"),
    [
        ("nccl.backend=default", {}),
        ("nccl.backend=lazy", {}),
        ("nccl.backend=legacy", {"TORCH_DIST_USE_NCCL2": "0"}),
        ("nccl.per_edge=true", {"TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P": "1"}),
        ("nccl.interface=ib1", {"NCCL_SOCKET_IFNAME": "ib1"}),
    ],
)
def test_what_torch_and_nccl_are_told(choice: str, variables: dict[str, str]) -> None:
    run = configured("strategy=pipeline", "devices=2", choice, "site.network_interface=ib0")
    names = ("TORCH_DIST_USE_NCCL2", "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P", "NCCL_SOCKET_IFNAME")

    def told(device_type: str, rendezvous: Rendezvous | None) -> dict[str, str]:
        found = environment(run, device_type, {}, rendezvous=rendezvous)
        return {name: found[name] for name in names if name in found}

    nodes = Rendezvous(node=0, nodes=2, host="head", port=1, id="x", secret="s")
    assert told("cuda", None) == variables
    assert told("cuda", nodes) == {"NCCL_SOCKET_IFNAME": "ib0"} | variables
    assert told("cpu", None) == {}
    for name in variables:
        key, key_of_run = f"variables.{name}", choice.partition("=")[0]
        assert must_match(key)
        assert is_set_by_launcher(key, flatten(to_mapping(run)), {}), "--by compares runs that differ in it"
        assert not is_set_by_launcher(key, {key_of_run: 1}, {key_of_run: 1})


def test_a_torch_that_lacks_a_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "ProcessGroupNCCLLazy", raising=False)
    with pytest.raises(ConfigError, match=r"nccl\.backend=lazy: torch .* has no nccl-lazy"):
        world.backends("cuda", Nccl(backend="lazy"))
    with pytest.raises(ConfigError, match=r"nccl\.per_edge=true: torch .* can't do it"):
        world.backends("cuda", Nccl(per_edge=True))  # torch was not told, which is as if it did not know


@pytest.mark.parametrize(
    "key",
    sorted(
        key
        for key in CHOICES.keys() - {"clip_norm", "compile_scope", "activation_recomputation", "graph"}
        if not key.startswith(("preprocess", "data", "strategy"))
    ),
)
def test_choices_that_would_change_nothing_are_refused(key: str) -> None:
    choice = CHOICES[key]
    with pytest.raises(ConfigError, match=rf"{choice} means nothing without GPUs"):
        check_run(configured("strategy=pipeline", "devices=2", choice), "cpu")
    check_run(configured("strategy=pipeline", "devices=2", choice), "cuda")


def test_the_process_group_is_the_one_that_was_chosen() -> None:
    assert world.backends("cpu", Nccl(backend="lazy")) == "gloo"
    assert world.backends("cuda") == world.backends("cuda", Nccl()) == "cpu:gloo,cuda:nccl"
    assert world.backends("cuda", Nccl(backend="legacy")) == "cpu:gloo,cuda:nccl", "a variable says which nccl it is"
    if torch.__version__ >= "2.15":  # earlier ones have no other backend for NCCL
        assert world.backends("cuda", Nccl(backend="lazy")) == "cpu:gloo,cuda:nccl-lazy"


def test_an_adagrad_of_torch_2_11_is_not_fused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried on a GPU: torch's own first step refuses it. Newer versions have a fused update."""
    run = configured("optimizer=adagrad")
    parameters = list(torch.nn.Linear(2, 2).parameters())

    def implementation() -> tuple[bool | None, bool | None]:
        chosen = run.optimizer.build(parameters, run, "cuda").defaults
        return chosen["fused"], chosen["foreach"]

    monkeypatch.setattr(optimizers, "_torch_version", lambda: (2, 12))
    assert implementation() == (True, None)
    monkeypatch.setattr(optimizers, "_torch_version", lambda: (2, 11))
    assert implementation() == (None, True)
    for changed in ("optimizer.implementation=fused", "precision=fp16", "graph=true"):
        refused = configured("optimizer=adagrad", changed)
        with pytest.raises(ConfigError, match=r"since version 2\.12, and 2\.11 is installed"):
            refused.optimizer.check(refused, "cuda")
        refused.optimizer.check(refused, "cpu")
        configured("optimizer=adam", changed).optimizer.check(configured("optimizer=adam", changed), "cuda")


@pytest.mark.parametrize("name", ["ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"])
def test_every_installed_process_group_takes_a_timeout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of meshes get the run's own; torch's backends for NCCL differ in their private methods.

    A group whose CUDA backend is a stand-in with the methods of each class, and no others.
    """
    kind = getattr(dist.distributed_c10d, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    given: list[timedelta] = []

    class Backend:
        def __getattr__(self, method: str) -> Callable[[timedelta], None]:
            if not hasattr(kind, method):
                raise AttributeError(f"{name} has no {method}")
            return given.append

    class Group(dist.ProcessGroup):
        """As torch's, which asks each backend: the public way by a method that all of them must have."""

        _device_types: Any = (torch.device("cuda"),)

        def _get_backend(self, device: torch.device) -> Any:
            return Backend()

        def set_timeout(self, timeout: timedelta) -> None:
            Backend().set_timeout(timeout)

    options = SimpleNamespace(_timeout=timedelta(seconds=7))
    world = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist.distributed_c10d, "_rank_not_in_group", lambda group: False)
    mesh._set_run_timeout(Group(0, 1))
    assert given == [timedelta(seconds=7)]
