"""Which tests see a wrong number: small changes to the source, drawn at random, each tried against the tests near it.

    python -m tests.mutants [NUMBER…]

changes one place after another where it stands (so nothing may be uncommitted), runs the test files that import the
module, the nearest first, up to the first failure, and puts the place back. It writes what it found to
`tests/mutants.json`, which `make site` shows; numbers choose some of the draw, and keep the others' results. Libraries
that mutate (mutmut, cosmic-ray) try every place with one command for all: days, here.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import random
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOUND = ROOT / "tests/mutants.json"
AREAS = {
    "metrics": ("analysis/metrics",),
    "comparison": ("analysis/comparison",),
    "bytes": ("parallelbench/measure/traffic.py", "parallelbench/measure/counted_bytes.py"),
    "checks": ("parallelbench/training/checks",),
    "results": ("parallelbench/results",),
}
OF_EACH, SEED = 6, 36
FARTHEST, MOST = 2, 24
"""Imports between a test file and the module, and files that are tried."""
PATIENCE_S = 900
SWAPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: bytes from `begin` to `end` become `new`."""

    file: str
    function: str
    begin: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        """Where it is, and what: no line numbers, which move."""
        return f"{self.file} {self.function}: {_line(self)}"

    def text(self) -> bytes:
        """The whole changed file."""
        source = (ROOT / self.file).read_bytes()
        return source[: self.begin] + self.new.encode() + source[self.end :]


def _line(mutant: Mutant) -> str:
    source = (ROOT / mutant.file).read_bytes()
    first, last = source.rfind(b"\n", 0, mutant.begin) + 1, source.find(b"\n", mutant.end)
    before, after = source[first : mutant.begin].decode().lstrip(), source[mutant.end : last].decode()
    return f"{before}⟦{mutant.old} → {mutant.new}⟧{after}"


def drawn() -> list[Mutant]:
    """The same for the same source: `OF_EACH` of each area."""
    chosen = []
    for area, paths in AREAS.items():
        files = [
            file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("*.py"))
        ]
        places = [mutant for file in sorted(files) for mutant in mutants(file)]
        chosen += random.Random(f"{SEED} {area}").sample(places, OF_EACH)
    return chosen


def mutants(file: Path) -> Iterator[Mutant]:
    """All of one file: in what functions do, and in what modules and classes declare by calls."""
    source = file.read_bytes()
    starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
    name = str(file.relative_to(ROOT))

    def place(node: ast.expr, *, end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        assert line is not None
        assert column is not None
        return starts[line - 1] + column

    def between(left: ast.expr, right: ast.expr, operator: ast.AST, function: str) -> Iterator[Mutant]:
        begin, end = place(left, end=True), place(right)
        old, new = SWAPPED.get(type(operator), ("", ""))
        found = (
            [*re.finditer(rf"(?<![\w<>=!*/]){re.escape(old)}(?![\w<>=*/])", source[begin:end].decode())] if old else []
        )
        if len(found) == 1:
            yield Mutant(name, function, begin + found[0].start(), begin + found[0].end(), old, new)

    def within(node: ast.AST, function: str) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, operator, function)
            case ast.BinOp(right=ast.Constant(value=None)):
                return  # a type
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between(left, right, operator, function)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, operator, function)
            case ast.UnaryOp(op=ast.Not()):
                yield Mutant(name, function, place(node), place(node) + len("not"), "not", "")
            case ast.Call(func=ast.Name(id=called)) if called in CALLED:
                yield Mutant(name, function, place(node), place(node) + len(called), called, CALLED[called])
            case ast.Constant(value=bool(value)):
                yield Mutant(name, function, place(node), place(node, end=True), str(value), str(not value))
            case ast.Constant(value=int() | float() as value):
                text = source[place(node) : place(node, end=True)].decode()
                yield Mutant(name, function, place(node), place(node, end=True), text, str(value + 1))
            case ast.IfExp(test=test) | ast.If(test=test) if ast.unparse(test) != "TYPE_CHECKING":
                text = source[place(test) : place(test, end=True)].decode()
                yield Mutant(name, function, place(test), place(test, end=True), text, f"not ({text})")

    def all_in(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        yield from within(node, function)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list", "bases", "msg"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not isinstance(child, ast.Assert | ast.Raise):
                        yield from all_in(child, function)

    yield from all_in(ast.parse(source), "")


def near(file: str) -> list[str]:
    """Test files that import the module, the nearest first; of those equally near, the longest of its room first."""
    distances, left = {file: 0}, deque([file])
    while left:
        needed = left.popleft()
        for other in _importers()[needed]:
            if other not in distances and distances[needed] < FARTHEST:
                distances[other] = distances[needed] + 1
                left.append(other)
    tests = [path for path in distances if Path(path).name.startswith("test_")]
    rooms = [part for part in Path(file).parts if part != "parallelbench"]

    def order(path: str) -> tuple[int, bool, int]:
        return distances[path], not any(room in path for room in rooms), -(ROOT / path).stat().st_size

    return sorted(tests, key=order)[:MOST]


@functools.cache
def _importers() -> dict[str, set[str]]:
    """File → files that import it or, where it is a package, what is in it."""
    folders = ("analysis", "launch", "parallelbench", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    importers: dict[str, set[str]] = {str(path.relative_to(ROOT)): set() for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    module = files.get(f"{node.module}.{alias.name}", files.get(str(node.module)))
                    if module is not None:
                        importers[str(module.relative_to(ROOT))].add(str(path.relative_to(ROOT)))
    return importers


def caught(mutant: Mutant) -> str | None:
    """The first test that fails with the mutant; None if there is none."""
    path, tests = ROOT / mutant.file, near(mutant.file)
    source, before = path.read_bytes(), path.stat()
    path.write_bytes(mutant.text())
    # Of another second, so that no compiled file of the one stands for the other.
    os.utime(path, (before.st_atime, before.st_mtime + 10))
    try:
        return next(filter(None, map(first_failure, (tests[:3], tests[3:9], tests[9:]))), None)
    finally:
        path.write_bytes(source)
        os.utime(path, (before.st_atime, before.st_mtime))


def first_failure(files: list[str]) -> str | None:
    """What fails first of the tests that `make test` runs; without the mutant all of them pass."""
    if not files:
        return None
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:xdist", "--timeout=300"]
    command += ["-m", "not slurm and not exhaustive and not tensorflow and not velox", *files]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    if found is None and done.returncode not in (0, 5):
        return "tests that can't be collected"
    return found[1] if found else None


def found() -> dict[str, str | None]:
    """Mutant → the first test that failed, as last written."""
    known: dict[str, str | None] = json.loads(FOUND.read_text("utf-8")) if FOUND.exists() else {}
    return known


def main(numbers: list[int]) -> None:
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *sum(AREAS.values(), ())], cwd=ROOT, check=False)
    if changed.returncode:
        sys.exit("the mutated files have changes that are not committed: commit them first")
    draw = drawn()
    for number, mutant in enumerate(draw):
        if not numbers or number in numbers:
            known = found() | {str(mutant): caught(mutant)}
            print(f"{number:2} {mutant}\n   {known[str(mutant)]}", flush=True)
            kept = {str(each): known[str(each)] for each in draw if str(each) in known}
            FOUND.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
