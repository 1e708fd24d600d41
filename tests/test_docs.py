"""Documentation that follows from the code is up to date, and what it refers to exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.docs import DOCS, EVIDENCE, PAGES, SITE_PAGES

ROOT = DOCS.parent


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "strategies.md" else name for name in PAGES]
)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `python -m tests.docs`"


WRITTEN = [path for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md")) if path.name not in SITE_PAGES]


@pytest.mark.parametrize(
    "path",
    [*WRITTEN, *(pytest.param(DOCS / name, marks=pytest.mark.slow) for name in SITE_PAGES)],
    ids=lambda path: path.name,
)
def test_links_paths_and_tests_in_the_documentation_exist(path: Path) -> None:
    text = SITE_PAGES[path.name]() if path.name in SITE_PAGES else path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"`((?:parallelbench|launch|analysis|conf|tests|docs)/[\w/.]+)(?:::\w+)?`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert name in functions(ROOT / file), f"{file} has no {name}"


@functools.cache
def functions(path: Path) -> set[str]:
    """Names of a file's functions, of which nothing is executed."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_number_names_the_test_that_holds_it() -> None:
    """Or says that nothing does, or that only a GPU can."""
    table = EVIDENCE.read_text().partition("\n\n")[2]
    rows = [row.strip("| ").split("|") for row in table.strip().splitlines()[2:]]
    assert len(rows) > 25
    for row in rows:
        number, against, _, *where = map(str.strip, row)
        held = where and (re.findall(r"`tests/[\w/]+\.py::\w+`", where[0]) or "#checking-a-gpu" in where[0])
        assert held or against == "nothing", number


def test_make_targets_named_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    targets |= {f"venv-{path.stem}" for path in (ROOT / "environments").glob("*.txt")}
    for path in WRITTEN:
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        assert named <= targets, f"{path.name}: {named - targets}"
