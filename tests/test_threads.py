"""A rank has the threads that torch asks for, on its own cores, whatever the user's shell says; and they compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelbench.errors import ConfigError
from parallelbench.results.journal import read_tables
from parallelbench.training.checks.before_training import check_arithmetic
from parallelbench.training.torch_session import build_model
from tests.faults import fault
from tests.helpers import TINY
from tests.launch.programs import completed, the_run
from tests.strategies.training import configure, shard_loader

FEWER = {"OMP_THREAD_LIMIT": "1", "OMP_MAX_ACTIVE_LEVELS": "0", "OMP_DYNAMIC": "true"}
"""Each lets OpenMP grant fewer threads than torch asks for; the last one only while others compute."""
ELSEWHERE = {"OMP_PROC_BIND": "true", "OMP_PLACES": "{0}", "GOMP_CPU_AFFINITY": "0"}
"""Each pins threads to cores that a rank has not chosen."""
TWO = ["launcher.oversubscribe=true", "cores_per_device=2"]

LOADED = """
import json, os, sys
import torch
torch.set_num_threads(2)
torch.ones(1_000_000).add_(1)
from parallelbench.errors import ConfigError
from parallelbench.world.threads import _in_each_thread, _openmp, require_threads
os.sched_setaffinity(0, set(json.loads(sys.argv[1])))
try:
    require_threads()
except ConfigError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps(_in_each_thread(_openmp(), lambda: sorted(os.sched_getaffinity(0)))))
"""


def loaded(**variables: str) -> Any:
    """What a process that has loaded torch under these variables finds: a refusal, or the cores of each thread."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(cores)], env=os.environ | variables, capture_output=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEWER)
def test_fewer_threads_than_torch_asks_for_are_refused(name: str) -> None:
    found = loaded(**{name: FEWER[name]})
    assert isinstance(found, str)
    assert found.startswith("torch asks for 2 threads here, and OpenMP grants it ")
    assert name in found


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [("OMP_PROC_BIND", "OMP_PLACES"), ("GOMP_CPU_AFFINITY",)])
def test_threads_run_on_the_ranks_cores(names: tuple[str, ...]) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert loaded(**{name: ELSEWHERE[name] for name in names}) == [cores, cores], "not on one core only"


@pytest.mark.exhaustive
@fault(
    "workers",
    "Threads in the user's shell",
    injection="OMP_THREAD_LIMIT=1, OMP_DYNAMIC, OMP_PLACES and the like in the shell of `submit`",
    outcome="ranks have their own threads, on their own cores: losses are those of a clean shell",
)
def test_the_shell_decides_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, losses = [*TINY, "model=cnn_small", "measure.probe=false", *TWO], []
    hostile = FEWER | ELSEWHERE | {"RANK": "3", "WORLD_SIZE": "4"}
    for launcher in ("launcher=local", "launcher=inline", "launcher.pack=true", "clean"):
        results = tmp_path / str(len(losses))
        with monkeypatch.context() as shell:
            for variable, value in hostile.items() if launcher != "clean" else ():
                shell.setenv(variable, value)
            code, text = completed("submit", *options, *([launcher] if launcher != "clean" else []), results=results)
        assert code == 0, text
        epochs = read_tables(the_run(results).attempts()[-1].path)[0]["epochs"]
        losses.append([row["train_loss"] for row in epochs])
    assert losses == [losses[-1]] * 4


class Forked(torch.autograd.Function):
    """A kernel whose backward pass goes wrong on several threads."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        wrong = torch.get_num_threads() > 1 and gradient.dtype != torch.float64
        return gradient * 1e14 if wrong else gradient


class Kernel(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return Forked.apply(values)  # type: ignore[no-any-return]


@pytest.fixture
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.cases("fp32")
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.usefixtures("two_threads")
def test_a_step_on_all_threads_is_held_against_one_thread(precision: str) -> None:
    run = configure(*TINY, "model=cnn_small", f"precision={precision}", "cores_per_device=2")
    check_arithmetic(build_model(run), run, shard_loader)
    assert torch.get_num_threads() == 2
    model = nn.Sequential(build_model(run), Kernel())
    if precision == "fp64":  # whose kernels this fault leaves alone
        check_arithmetic(model, run, shard_loader)
        return
    with pytest.raises(ConfigError, match=rf"one step in {precision} on 2 threads differs .* gradients by .*e\+1"):
        check_arithmetic(model, run, shard_loader)
