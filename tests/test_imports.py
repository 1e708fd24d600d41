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
    *COMPONENTS,
    *("parallelbench.telemetry.__main__", "parallelbench.training.worker"),
    *(
        name
        for name in SOURCES
        if name.startswith(("analysis", "launch", "parallelbench.config", "parallelbench.results"))
    ),
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
        assert FRONT_DOOR not in imported(path), module
        names = {top(name) for name in imported(path)}
        never = {"tests"}
        if top(module) == "parallelbench" and module != FRONT_DOOR:
            never |= {"launch", "analysis"}
        if top(module) in ("launch", "analysis"):
            never.add("torch")
        if top(module) == "analysis":
            never.add("launch")
        against += [f"{module} imports {name}" for name in sorted(names & never)]
    assert not against, "\n".join(against)


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
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if "torch" in sys.modules or "torchvision" in sys.modules:
        sys.exit(f"{module} loads torch")
"""


@pytest.mark.slow
def test_importing_any_of_them_loads_no_torch() -> None:
    """Submitting and planning check thousands of runs on login nodes."""
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH, *TORCH_FREE], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
