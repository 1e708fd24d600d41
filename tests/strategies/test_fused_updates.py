"""Fused updates of sharded parameters, and what every kind of process group can be asked: known without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.errors import ConfigError
from parallelbench.optim import optimizers
from parallelbench.strategies import mesh
from tests.helpers import configured


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
