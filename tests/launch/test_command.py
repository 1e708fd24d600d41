"""Command lines and environments of the training processes: pure functions."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed
from torch.distributed.run import get_args_parser

from launch.attempt.processes import MALLOC, command_line, environment
from parallelbench.processes import foreign
from tests.helpers import configured


def test_several_are_started_by_torchrun_on_this_machine_only() -> None:
    command = command_line(["/a b/run", "3"], 4)
    exits = "/a b/run/attempts/3/exits-node0.json"
    assert command[:4] == [sys.executable, "-m", "parallelbench.training.torchrun", exits]
    assert command[-4:] == ["-m", "parallelbench.training.worker", "/a b/run", "3"]
    options = command[4:-4]
    assert "--rdzv-endpoint=127.0.0.1:0" in options, "no fixed port, which another job might have, and no name"
    assert "--nproc-per-node=4" in options
    assert "--max-restarts=0" in options
    assert "--local-addr=127.0.0.1" in options


def test_the_environment_is_inherited_but_for_the_marks_of_another_job() -> None:
    inherited = {"PATH": "/bin", "HOME": "/root", "RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_PORT": "1"}
    found = environment(configured(), "cpu", inherited)
    assert {key: found.get(key) for key in inherited} == dict.fromkeys(inherited) | {"PATH": "/bin", "HOME": "/root"}
    assert inherited["RANK"] == "7", "nothing is changed in place"


def read_by_distributed() -> set[str]:
    """Names of variables that torch.distributed reads from the environment, as its Python sources have them."""
    found = set()
    for path in Path(torch.distributed.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = {
            target.id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                key: ast.expr = node.slice
            elif isinstance(node, ast.Call) and node.args and _READS.search(ast.unparse(node.func)):
                key = node.args[0]
            else:
                continue
            name = named.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
            found |= {name} if isinstance(name, str) else set()
    return found


_READS = re.compile(r"environ\.(get|pop|setdefault)$|getenv$|get_env$")
PASSED = {
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),  # which GPUs a job has
    *("NCCL_HOME", "NCCL_EP_HOME", "NVSHMEM_LIB_DIR", "ROCM_PATH", "ROCSHMEM_LIB_DIR"),  # where libraries are
    "PYTORCH_NO_CUDA_MEMORY_CACHING",  # how torch computes: recorded, and sides that are compared must agree in it
    "FR_TRACE_VERBOSE_OUTPUT",  # of a program that nobody starts here
}
"""What torch.distributed reads and the user's shell may say."""


@pytest.mark.exhaustive
def test_every_variable_of_torch_distributed_is_decided() -> None:
    names = read_by_distributed()
    assert {"MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCH_WORKER_SERVER_SOCKET"} <= names
    passed = {name for name in names if not foreign(name)}
    assert passed <= PASSED, "decide: passed on purpose, or left out by parallelbench.processes"


def test_no_option_of_torchrun_comes_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [action.dest for action in get_args_parser()._actions if type(action).__name__ in ("env", "check_env")]
    assert {"nnodes", "no_python"} <= set(options)
    shell = {f"PET_{option.upper()}": "7" for option in options}
    words = command_line(["run", "1"], 2)[4:]
    parsed = []
    for variables in ({}, shell):
        monkeypatch.setattr(os, "environ", environment(configured(), "cpu", variables))
        parsed.append(vars(get_args_parser().parse_args(words)))
    assert parsed[0] == parsed[1]


def test_malloc_and_threads_are_set_for_cpus() -> None:
    found = environment(configured("cores_per_device=3"), "cpu", {"OMP_NUM_THREADS": "64"})
    assert found["OMP_NUM_THREADS"] == "3"
    assert MALLOC.items() <= found.items()
    assert environment(configured("cores_per_device=3"), "cuda", {"OMP_NUM_THREADS": "64"})["OMP_NUM_THREADS"] == "1", (
        "until it is pinned beside its GPU"
    )


@pytest.mark.parametrize(
    ("override", "device_type", "name", "value"),
    [
        ("measure.deterministic=true", "cuda", "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("measure.deterministic=false", "cuda", "CUBLAS_WORKSPACE_CONFIG", None),
        ("compile=true", "cpu", "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1"),  # compiling starts cold
        ("epochs=1", "cpu", "PYTHONSAFEPATH", "1"),  # nothing in the working directory shadows the suite
    ],
)
def test_a_run_decides_these_variables(override: str, device_type: str, name: str, value: str | None) -> None:
    assert environment(configured(override), device_type, {}).get(name) == value
