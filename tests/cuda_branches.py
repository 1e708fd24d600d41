"""Which branches on CUDA, and which calls of `world.cuda`, some tests reach: `python -m tests.cuda_branches`.

It runs those tests in one process, where each comparison of a device's type with "cuda" and each use of the module
`cuda` notes that it was reached. Coverage by lines can't tell: most are parts of an expression.

Arguments: the file for the result, then pytest's. Output: a JSON list of the places that were reached.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("parallelbench", "launch")
_ELSEWHERE = (
    *("parallelbench/gpu_check", "parallelbench/world/cuda.py"),
    *("parallelbench/frameworks/tensorflow/world.py", "parallelbench/frameworks/tensorflow/__init__.py, connect"),
)
"""Runs on GPUs only; what a script replaces; and what needs TensorFlow, which is not where these tests run."""
_NOTE = "__reached__"


class _Marks(ast.NodeTransformer):
    """Finds the places of a file, and lets each of them note that it was reached."""

    def __init__(self, file: str, source: str) -> None:
        self._file, self._within = file, [""]
        self._seam = "from parallelbench.world import cuda" in source
        self.places: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) and side.value == "cuda" for side in sides):
            return self._noted(node, when=isinstance(node.ops[0], ast.Eq))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self._seam and isinstance(node.value, ast.Name) and node.value.id == "cuda" and not _is_type(node):
            return self._noted(node, when=None)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node  # types are not executed

    def _noted(self, node: ast.expr, *, when: bool | None) -> ast.expr:
        """`when`: the value that means CUDA; None: any."""
        place = ", ".join((self._file, self._within[-1], ast.unparse(node)))
        self.places.append(place)
        values = [ast.Constant(place), node, ast.Constant(when)]
        call = ast.Call(func=ast.Name(_NOTE, ast.Load()), args=values, keywords=[])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def _is_type(node: ast.Attribute) -> bool:
    return node.attr[0].isupper()


def _marked(path: Path) -> tuple[ast.Module, list[str]]:
    source = path.read_text()
    marks = _Marks(str(path.relative_to(ROOT)), source)
    tree = marks.visit(ast.parse(source))
    return tree, marks.places


def files() -> list[Path]:
    found = (path for package in _PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if not str(path.relative_to(ROOT)).startswith(_ELSEWHERE)]


def places() -> list[str]:
    """All that some test must reach: file, function and expression."""
    return [place for path in files() for place in _marked(path)[1] if not place.startswith(_ELSEWHERE)]


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return compile(_marked(Path(self.path))[0], self.path, "exec")


class _Finder:
    """Loads the suite's files with their marks."""

    def __init__(self) -> None:
        self._files = {str(path) for path in files()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith(_PACKAGES) else None
        if spec is not None and spec.origin in self._files:
            spec.loader = _Loader(name, spec.origin)
        return spec


def main(arguments: list[str]) -> int:
    result, *options = arguments
    reached: set[str] = set()

    def note(place: str, value: Any, when: bool | None) -> Any:
        if when is None or value is when:
            reached.add(place)
        return value

    setattr(builtins, _NOTE, note)
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    code = pytest.main(["--noconftest", "-p", "no:xdist", *options])
    Path(result).write_text(json.dumps(sorted(reached)))
    return int(code)


if __name__ == "__main__":
    assert not [name for name in sys.modules if name.startswith(("parallelbench", "launch"))], "nothing is loaded yet"
    sys.exit(main(sys.argv[1:]))
