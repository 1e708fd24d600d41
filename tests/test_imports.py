"""Who may import whom: data flows conf → launch → parallelbench → analysis, and never back."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
    for package in ("parallelbench", "launch", "analysis")
    for path in sorted((ROOT / package).rglob("*.py"))
}
FRONT_DOOR = "parallelbench.cli"
"""The program itself: nothing imports it, and it hands over to launch and analysis."""


def classes(group: str) -> set[str]:
    """The classes that the YAML files of a folder of conf/ name."""
    return {
        line.removeprefix("_target_: ")
        for path in (ROOT / "conf" / group).glob("*.yaml")
        for line in path.read_text().splitlines()
        if line.startswith("_target_: ")
    }


def targets(group: str) -> set[str]:
    """Their modules."""
    return {name.rpartition(".")[0] for name in classes(group)}


STRATEGIES = targets("strategy")
"""The strategies' own files."""
COMPONENTS = set.union(
    *map(targets, ("model", "data", "strategy", "optimizer", "lr_schedule", "loss", "metric", "loader"))
)

TORCH_FREE = [
    "analysis",
    "launch.verbs.doctor",
    "launch.launcher",
    "launch.local",
    "launch.slurm.launcher",
    "launch.verbs.plan",
    "launch.verbs.bundle",
    "launch.verbs.report",
    "launch.attempt.supervisor",
    "launch.sweep",
    "launch.verbs.run",
    "launch.verbs.status",
    "parallelbench.config.check",
    "parallelbench.config.run",
    "parallelbench.world.machine",
    "parallelbench.results.folder",
    "parallelbench.results.journal",
    "parallelbench.results.publish",
    "parallelbench.telemetry.__main__",
    "parallelbench.telemetry.nvml",
    "parallelbench.telemetry.sampler",
    "parallelbench.training.worker",
    *sorted(COMPONENTS),
    *(name for name in SOURCES if name.startswith("analysis.")),
]


@functools.cache
def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, also inside functions and for type checkers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def top(name: str) -> str:
    return name.partition(".")[0]


def test_data_flows_one_way() -> None:
    against = []
    for module, path in SOURCES.items():
        names = {top(name) for name in imported(path)}
        never: set[str] = set()
        if top(module) == "parallelbench" and module != FRONT_DOOR:
            never |= {"launch", "analysis"}
        if top(module) in ("launch", "analysis"):
            never.add("torch")
        if top(module) == "analysis":
            never.add("launch")
        against += [f"{module} imports {name}" for name in sorted(names & never)]
    assert not against, "\n".join(against)


def test_nothing_imports_the_front_door_or_the_tests() -> None:
    for module, path in SOURCES.items():
        assert FRONT_DOOR not in imported(path), module
        assert "tests" not in {top(name) for name in imported(path)}, module


def test_strategies_do_not_import_each_other() -> None:
    """Families may take a base class from another one, never one of its strategies."""
    assert len(STRATEGIES) >= 3, STRATEGIES
    for module in STRATEGIES:
        assert not imported(SOURCES[module]) & classes("strategy"), module


def test_models_know_nothing_of_parallelism() -> None:
    for module, path in SOURCES.items():
        if module.startswith("parallelbench.models"):
            assert not any(name.startswith("parallelbench.strategies") for name in imported(path)), module


IMPORT_EACH = """
import importlib, sys, traceback
for module in sys.argv[1:]:
    ours = ("analysis", "conf", "launch", "parallelbench")
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]  # libraries stay: they import nothing of the suite
    code = 2
    try:
        importlib.import_module(module)
        code = int(any(name in sys.modules for name in ("torch", "torchvision")))
    except BaseException:
        traceback.print_exc()
    print(module, code, flush=True)
"""


@pytest.mark.slow
def test_importing_any_of_them_first_and_alone_loads_no_torch() -> None:
    """Prints 0 for each, 1 if it or one before it loads torch, 2 if it can't be imported."""
    command = [sys.executable, "-c", IMPORT_EACH, *TORCH_FREE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == [f"{module} 0" for module in TORCH_FREE]


@pytest.mark.parametrize("module", sorted(STRATEGIES))
def test_a_strategys_file_loads_torch_only_to_prepare(module: str) -> None:
    """Submitting and planning check thousands of strategies on login nodes."""
    tree = ast.parse(SOURCES[module].read_text())
    at_import = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert "torch" not in {top(name or "") for name in at_import}
