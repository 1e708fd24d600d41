"""No number depends on a sentence: no code compares, splits or matches docs, reasons, warnings or error texts."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for package in ("analysis", "launch", "parallelbench") for path in (ROOT / package).rglob("*.py"))
PROSE = {"doc", "reason", "left_out", "exclusion_detail", "warning", "warnings", "message", "words", "lacks", "why"}
"""Names of attributes, variables, columns and keys that hold sentences."""
ERRORS = {"error", "err", "exc", "exception", "failure"}
"""Names of exceptions: their texts belong to libraries, which reword them."""
METHODS = {
    *("split", "rsplit", "splitlines", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index"),
    *("removeprefix", "removesuffix", "count"),
}
PATTERNS = {"match", "search", "fullmatch", "split", "findall", "finditer", "sub"}
SAME_TEXT = {"lower", "upper", "casefold", "strip", "one_line", "escape"}
"""Methods and functions that give a sentence back."""
EXCEPTIONS = {
    # gloo raises a plain RuntimeError for a lost rank and for a timeout, torch's CPU allocator for a lack of memory;
    # TensorFlow says only in words that it has given a rank up, and DDP that it misses a gradient.
    ("parallelbench/training/failure.py", "classify"): 6,
    # Only the words of a lost rank's RuntimeError name gloo, or NCCL; a worker's traceback comes as text.
    ("parallelbench/training/failure.py", "_is_between_ranks"): 2,
    # torch's DataLoader says only in words that a worker died, and sends a worker's traceback as text.
    ("parallelbench/training/failure.py", ""): 1,
    ("parallelbench/errors.py", "own_place"): 2,
    # A user's program says only by printing why it ended.
    ("parallelbench/frameworks/program/steps.py", ""): 1,
    # What ranks print may hold a private key, of many lines.
    ("launch/attempt/processes.py", ""): 1,
    # NCCL's watchdog says only by printing why it aborts a process, that it waited and what has failed; srun, why
    # Slurm could not start a step, or which of its options it does not know.
    ("launch/attempt/outcome.py", ""): 4,
    # gpu-check checks the text: whether it names the rank that hangs.
    ("parallelbench/gpu_check/whole_runs.py", "_expect"): 1,
    # scontrol says only in words that Slurm has forgotten a job.
    ("launch/slurm/scheduler.py", "_ended_with"): 1,
    # pathlib raises a plain RuntimeError for a user whose home it does not know.
    ("parallelbench/cli.py", "_main"): 1,
}
"""(file, function) → how many findings it has. Each is a place where a text is all that there is."""


def is_prose(node: ast.AST) -> bool:
    """Whether an expression is a sentence by its name: x.reason, row["warnings"], pl.col("doc"), str(error)."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in PROSE
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in PROSE
        case ast.Call(func=ast.Attribute(attr="col" | "get"), args=[ast.Constant(value=str(name)), *_]):
            return name in PROSE
        case ast.BoolOp(values=values):
            return any(map(is_prose, values))
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]):
            return name in ERRORS
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="args")):
            return name in ERRORS
        case ast.Call(func=ast.Name(id=function), args=[inner, *_]) if function in SAME_TEXT:
            return is_prose(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in SAME_TEXT:
            return is_prose(inner)
    return False


class Unaliased(ast.NodeTransformer):
    """Renames a function's variables that are set to a sentence, as in `text = str(error)`, to `message`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = set()
        for each in ast.walk(node):
            match each:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value) if is_prose(value):
                    names.add(name)
                case ast.NamedExpr(target=ast.Name(id=name), value=value) if is_prose(value):
                    names.add(name)
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in names:
                each.id = "message"
        return node


def is_sentence(node: ast.AST) -> bool:
    """Whether an expression is, or holds, a constant of several words."""
    match node:
        case ast.Constant(value=str(text)):
            return len([word for word in text.split() if word.isalpha()]) > 1
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return any(map(is_sentence, elements))
    return False


def has_words(pattern: str | bytes) -> bool:
    """Whether a regular expression matches several words with spaces between them."""
    text = pattern.decode() if isinstance(pattern, bytes) else pattern
    return len([word for word in text.split() if re.search(r"[A-Za-z]{3}", word)]) > 1


def function_at(source: str, line: int) -> str:
    """The name of the innermost function that a line belongs to; empty: of none."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or line)]
    return max(around, key=lambda node: node.lineno).name if around else ""


def findings(source: str) -> Iterator[int]:
    """The lines that compute with a sentence."""
    for node in ast.walk(Unaliased().visit(ast.parse(source))):
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
            case ast.Call(
                func=ast.Attribute(attr="compile"), args=[ast.Constant(value=str() | bytes() as pattern), *_]
            ):
                if has_words(pattern):
                    yield node.lineno
            case ast.Match(cases=cases):
                patterns = [inner for case in cases for inner in ast.walk(case.pattern)]
                if any(is_sentence(inner.value) for inner in patterns if isinstance(inner, ast.MatchValue)):
                    yield node.lineno


def test_no_code_computes_with_sentences() -> None:
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        for line in findings(source):
            found[path.relative_to(ROOT).as_posix(), function_at(source, line)].append(line)
    wrong = {place for place in found.keys() | EXCEPTIONS if len(found.get(place, ())) != EXCEPTIONS.get(place, 0)}
    told = [f"{file}, {function}: lines {found.get((file, function), [])}" for file, function in sorted(wrong)]
    assert not wrong, "\n".join(["use an enum:", *told])
