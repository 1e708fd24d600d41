"""The order of the source: rooms import each other in one direction only."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import cast

import pytest

from tests.test_imports import SOURCES


def needed(module: str) -> set[str]:
    """Modules that a module takes something from when it runs; a package counts for what is defined in it itself."""
    nodes = [node for node in ast.walk(_without_type_checking(module)) if isinstance(node, ast.ImportFrom)]
    found = {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    found = {name if name in SOURCES else name.rpartition(".")[0] for name in found}
    return found & SOURCES.keys() - {module}


@cache
def _without_type_checking(module: str) -> ast.Module:
    class Without(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.If | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else node

    return cast("ast.Module", Without().visit(ast.parse(SOURCES[module].read_text())))


OWN_ROOMS = ("parallelbench.frameworks.tensorflow", "parallelbench.frameworks.program")
"""Folders in a room's folder that are rooms of their own."""


def room(module: str) -> str:
    """The folder of a module, such as parallelbench.training; a module outside of such a folder is its own room."""
    return next((own for own in OWN_ROOMS if f"{module}.".startswith(f"{own}.")), ".".join(module.split(".")[:2]))


def rooms() -> dict[str, set[str]]:
    """Room → rooms that it takes something from."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module in SOURCES:
        for other in needed(module):
            if room(module) != room(other):
                graph[room(module)].add(room(other))
    return graph


@pytest.mark.exhaustive
def test_rooms_import_each_other_in_one_direction_only() -> None:
    try:
        TopologicalSorter(rooms()).prepare()
    except CycleError as error:
        pytest.fail(f"rooms import each other in a circle: {' → '.join(reversed(error.args[1]))}")
