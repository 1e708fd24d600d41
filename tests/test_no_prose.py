"""No number depends on a sentence: no code compares, splits or matches docs, reasons, warnings or error texts."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for package in ("analysis", "parallelbench") for path in (ROOT / package).rglob("*.py"))
PROSE = {"doc", "reason", "left_out", "exclusion_detail", "warning", "warnings", "message", "words", "lacks", "why"}
"""Names of attributes, variables, columns and keys that hold sentences."""
ERRORS = {"error", "err", "exc", "exception", "failure"}
"""Names of exceptions: their texts belong to libraries, which reword them."""
METHODS = {
    *("split", "rsplit", "splitlines", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index"),
    *("removeprefix", "removesuffix", "count"),
}
PATTERNS = {"match", "search", "fullmatch", "split", "findall", "finditer", "sub"}
EXCEPTIONS = {
    "parallelbench/rank/worker.py": 1,  # torch has no class of its own for a CPU that is out of memory
}
"""File → how many findings are known and allowed."""


def is_prose(node: ast.AST) -> bool:
    """Whether an expression is a sentence by its name: x.reason, row["warnings"], pl.col("doc"), str(error)."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in PROSE
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in PROSE
        case ast.Call(func=ast.Attribute(attr="col"), args=[ast.Constant(value=str(name)), *_]):
            return name in PROSE
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]):
            return name in ERRORS
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="args")):
            return name in ERRORS
    return False


def is_sentence(node: ast.AST) -> bool:
    """Whether an expression is, or holds, a constant of several words."""
    match node:
        case ast.Constant(value=str(text)):
            return len([word for word in text.split() if word.isalpha()]) > 1
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return any(map(is_sentence, elements))
    return False


def findings(source: str) -> Iterator[int]:
    """The lines that compute with a sentence."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                compared = any(isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in ops)
                contained = any(isinstance(op, (ast.In, ast.NotIn)) for op in ops) and any(map(is_prose, others))
                if compared and (contained or any(map(is_sentence, [left, *others]))):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=column, attr="str"))):
                if any(map(is_prose, ast.walk(column))):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(attr="split"), args=[]):
                pass  # folds white space
            case ast.Call(func=ast.Attribute(value=receiver, attr=method)) if method in METHODS and is_prose(receiver):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=method), args=arguments) if method in PATTERNS:
                if any(map(is_prose, arguments)):
                    yield node.lineno
            case ast.Match(cases=cases):
                patterns = [inner for case in cases for inner in ast.walk(case.pattern)]
                if any(is_sentence(inner.value) for inner in patterns if isinstance(inner, ast.MatchValue)):
                    yield node.lineno


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_code_computes_with_sentences(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    lines = list(findings(path.read_text(encoding="utf-8")))
    assert len(lines) <= EXCEPTIONS.get(name, 0), f"{name}: lines {lines}: use an enum"


@pytest.mark.parametrize(
    "snippet",
    [
        '[name for name, (_, doc) in SUMMARY.items() if doc.startswith("median over repeats")]',
        'pl.col("left_out").str.contains("^(oversubscribed|packed)")',
        'facts(runs).filter(pl.col("left_out").str.starts_with("oversubscribed"))',
        'gone["left_out"].drop_nulls().str.split(":").list.first()',
        'Counter(reason.partition(":")[0] for reason in rows["reason"].drop_nulls())',
        're.search(r"Expected `(.*)`", str(error))',
        "_PATH.fullmatch(str(error))",
        'str(error).partition(" - at ")',
        'error.args[0].endswith("required field")',
        'if row["verdict"] == "too few repeats": pass',
        'verdict in ("above 1", "still running")',
        '"out of memory" in text',
        '"memory" in outcome.reason',
        "match word:\n    case 'not compared': pass",
    ],
)
def test_what_the_review_found_is_found_again(snippet: str) -> None:
    assert list(findings(snippet))


@pytest.mark.parametrize(
    "snippet",
    [
        'row["exclusion"] == Exclusion.PACKED.value',
        'f"{name}: {outcome.reason}"',
        'key.partition(".")[0] == "optimizer"',
        'raise ConfigError(f"no such file: {error}") from None',
        'outcome == "parity_failed"',
        '"; ".join(filter(None, [row["warnings"], more]))',
    ],
)
def test_identifiers_and_plain_messages_are_no_findings(snippet: str) -> None:
    assert not list(findings(snippet))
