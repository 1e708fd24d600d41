"""The shape of the source: no import circles, no name twice, short files and functions, few positional parameters."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.test_imports import SOURCES, imported

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = 320
FUNCTION_LINES = 50
POSITIONAL_PARAMETERS = 4
DOCUMENT_COLUMNS = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


@cache
def functions(module: str) -> list[tuple[str, Function, bool]]:
    """Where each function is, the function, and whether its first parameter is the instance or the class."""
    methods = {
        each
        for cls in ast.walk(tree(module))
        if isinstance(cls, ast.ClassDef)
        for each in cls.body
        if isinstance(each, Function) and not any(ast.unparse(d) == "staticmethod" for d in each.decorator_list)
    }
    return [
        (f"{SOURCES[module].relative_to(ROOT)}:{node.lineno} {node.name}", node, node in methods)
        for node in ast.walk(tree(module))
        if isinstance(node, Function)
    ]


def occurring_twice(places: Iterable[tuple[str, str]]) -> list[str]:
    """Each name that stands in several modules, with these modules."""
    found = defaultdict(list)
    for name, module in places:
        found[name].append(module)
    return [f"{name}: {', '.join(modules)}" for name, modules in found.items() if len(modules) > 1]


def needed(module: str) -> set[str]:
    """Modules that a module takes something from; a package counts for what is defined in it, not for its modules."""
    names = imported(SOURCES[module]) & SOURCES.keys() - {module}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


@pytest.mark.always
def test_no_imports_go_in_a_circle_not_even_those_for_type_checkers() -> None:
    graph = {module: needed(module) for module in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' → '.join(reversed(error.args[1]))}")


OWN_ROOMS = ("parallelbench.frameworks.tensorflow",)
"""Folders in a room's folder that are rooms of their own."""
BACKWARDS = {
    ("parallelbench.spec.loader", "parallelbench.loaders.batch_loader"): "names the type of what a loader builds",
    ("parallelbench.rank.checked_run", "parallelbench.strategies.single"): "a check's reference is one device",
    ("parallelbench.rank.likeness", "parallelbench.strategies.single"): "one device is not held against itself",
}
"""Imports that go against the order of the rooms, each with its reason."""


def room(module: str) -> str:
    """The folder of a module, such as parallelbench.rank; a module outside of such a folder is its own room."""
    return next((own for own in OWN_ROOMS if f"{module}.".startswith(f"{own}.")), ".".join(module.split(".")[:2]))


def rooms(allowed: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Room → rooms that it takes something from, without these imports."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module in SOURCES:
        for other in needed(module):
            if (module, other) not in allowed and room(module) != room(other):
                graph[room(module)].add(room(other))
    return graph


def test_rooms_import_each_other_in_one_direction_only() -> None:
    try:
        TopologicalSorter(rooms(BACKWARDS)).prepare()
    except CycleError as error:
        pytest.fail(f"rooms import each other in a circle: {' → '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("exception", BACKWARDS, ids="->".join)
def test_no_exception_from_the_order_of_the_rooms_is_granted_in_vain(exception: tuple[str, str]) -> None:
    of_both = [each for each in BACKWARDS if room(each[0]) == room(exception[0]) and each != exception]
    assert exception[1] in needed(exception[0])
    with pytest.raises(CycleError):
        TopologicalSorter(rooms(set(BACKWARDS) - {exception, *of_both})).prepare()


def test_no_file_name_occurs_twice() -> None:
    paths = ((path.name, module) for module, path in SOURCES.items())
    twice = occurring_twice((name, module) for name, module in paths if not name.startswith("__"))
    assert not twice, "\n".join(twice)


@pytest.mark.always
def test_no_class_name_occurs_twice() -> None:
    nodes = ((node, module) for module in SOURCES for node in ast.walk(tree(module)))
    twice = occurring_twice((node.name, module) for node, module in nodes if isinstance(node, ast.ClassDef))
    assert not twice, "\n".join(twice)


@pytest.mark.always
def test_files_and_functions_are_short() -> None:
    long = []
    for module, path in SOURCES.items():
        if (lines := path.read_text().count("\n")) > FILE_LINES:
            long.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for place, function, _ in functions(module):
            assert function.end_lineno is not None
            if (length := function.end_lineno - function.lineno + 1) > FUNCTION_LINES:
                long.append(f"{place} has {length} lines")
    assert not long, "\n".join(long)


@pytest.mark.always
def test_functions_have_few_positional_parameters() -> None:
    many = []
    for module in SOURCES:
        for place, function, is_method in functions(module):
            count = len(function.args.posonlyargs) + len(function.args.args) - is_method
            if count > POSITIONAL_PARAMETERS:
                many.append(f"{place} has {count} positional parameters: make some keyword-only")
    assert not many, "\n".join(many)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_lines_of_the_documentation_fit_a_screen(page: Path) -> None:
    in_code, long = False, []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|") and len(line) > DOCUMENT_COLUMNS:
            long.append(f"{page.relative_to(ROOT)}:{number} has {len(line)} columns")
    assert not long, "\n".join(long)


BRACKETED_PLURAL = re.compile(r"(?:^|\S)\((?:s|es)\)")
"""As in "1 run" + "(s)", also at the start of what follows a value in an f-string; "(s)" after a space is a unit."""


def bracketed_plurals(text: str) -> list[str]:
    """Words of both numbers at once."""
    return [line.strip() for line in text.splitlines() if BRACKETED_PLURAL.search(line)]


@pytest.mark.parametrize("module", SOURCES)
def test_messages_count_in_words_that_fit_the_number(module: str) -> None:
    texts = (node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant))
    found = [line for text in texts if isinstance(text, str) for line in bracketed_plurals(text)]
    assert not found, f"write count_of(number, noun) of parallelbench.errors: {found}"


PAGES = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "conf").rglob("*.yaml")]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_pages_and_choices_count_in_words_that_fit_the_number(page: Path) -> None:
    assert not bracketed_plurals(page.read_text())


def test_the_checks_find_what_they_look_for() -> None:
    assert bracketed_plurals("1 run(s)\n(s) after a value\n2 process(es)\nTime (s)") == [
        "1 run(s)",
        "(s) after a value",
        "2 process(es)",
    ]
    assert occurring_twice([("a.py", "one.a"), ("b.py", "one.b"), ("a.py", "two.a")]) == ["a.py: one.a, two.a"]
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
