"""Tests that inject a fault say which, how, and what must come of it; docs/reliability.md is made from that."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """What one test injects."""

    area: str
    name: str
    injection: str
    outcome: str
    test: str


def fault(area: str, name: str, *, injection: str, outcome: str) -> Callable[[Any], Any]:
    """Mark a test as the proof that a fault is survived; all four must be plain strings, which are read, not executed.

    `area` is numbers, submission, lifecycle, workers, or storage and input.
    """
    assert all((area, name, injection, outcome))
    return lambda test: test


def faults() -> Iterator[Fault]:
    """All that the tests inject, by area, in the order of the files."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for call in (d for d in node.decorator_list if isinstance(d, ast.Call)):
                    if isinstance(call.func, ast.Name) and call.func.id == "fault":
                        yield _read(call, f"{path.relative_to(TESTS.parent)}::{node.name}")


def _read(call: ast.Call, test: str) -> Fault:
    area, name = (ast.literal_eval(argument) for argument in call.args)
    texts = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return Fault(area=area, name=name, test=test, **texts)
