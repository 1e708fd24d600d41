"""What LaTeX would make of a table: its structure, read without a TeX, and a document that is compiled with one."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from analysis.report.latex import CLEAR, HEAD, MOST_FLOATS
from tests.surroundings import machine_path

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+|\\.|[{}&%#$_^]|[^\\{}&%#$_^]+", re.DOTALL)
OPTIONAL = (r"\\", r"\toprule", r"\midrule", r"\bottomrule")
"""Commands that would take what follows in brackets, or a star, for their own."""
PROGRAMS = ("pdflatex", "lualatex", "xelatex", "tectonic")
COMPILE_TIMEOUT_S = 300
DOCUMENT = r"""\documentclass{article}
\usepackage[a4paper,margin=25mm]{geometry}
\usepackage{booktabs}\usepackage{array}
\ifdefined\pdftexversion\usepackage[T1]{fontenc}\usepackage{textcomp}\usepackage{lmodern}\fi
\begin{document}
See table~\ref{tab:%s}.
%s
\end{document}
"""


class Table(NamedTuple):
    """A table as LaTeX reads it."""

    caption: str
    label: str
    columns: int
    rows: list[int]
    """Cells of each row, the heading first."""


def tables_in(document: str) -> list[Table]:
    """All tables; `AssertionError` for what would stop LaTeX, or make it set something else than was meant."""
    assert document.startswith(HEAD)
    parts = re.split(r"(?<=\\end\{table\}\n)\n?", document.removeprefix(HEAD))
    assert not parts.pop().strip(), "nothing but tables"
    for number, part in enumerate(parts):
        assert part.startswith(CLEAR) == (number > 0 and number % MOST_FLOATS == 0), "more than LaTeX can hold back"
    found = [_table(part.removeprefix(CLEAR)) for part in parts]
    assert len({table.label for table in found}) == len(found)
    return found


def _table(part: str) -> Table:
    begin = r"\begin{table}[htbp]\caption{"
    assert part.startswith(begin)
    caption, rest = _group(part[len(begin) - 1 :])
    label = re.match(
        r"\\label\{(tab:[a-z]+-\d+)\}\n\\centering\\footnotesize\\smallskip\n\\begin\{tabular\}(?=\{)", rest
    )
    assert label is not None
    _rows(caption)  # no command that is unknown, no character that no font has
    shape, cells = _group(rest[label.end() :])
    assert cells.endswith("\\end{tabular}\n\\end{table}\n")
    aligned = shape.replace("@{}", "").replace(r">{\raggedright\arraybackslash}", "")
    aligned = re.sub(r"p\{[\d.]+\\linewidth\}", "p", aligned)
    assert re.fullmatch("[lrp]+", aligned), shape
    return Table(caption, label[1], len(aligned), _rows(cells.removesuffix("\\end{tabular}\n\\end{table}\n")))


def _group(text: str) -> tuple[str, str]:
    """What stands in the braces that the text begins with, and what follows them."""
    depth, at = 0, 0
    for token in TOKENS.finditer(text):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        at = token.end()
        if depth == 0:
            break
    assert depth == 0, "a brace is open"
    return text[1 : at - 1], text[at:]


def _rows(text: str) -> list[int]:
    """Cells of each row."""
    depth, cells, rows = 0, 1, []
    for token in TOKENS.finditer(text):
        shown = token[0]
        depth += {"{": 1, "}": -1}.get(shown, 0)
        assert depth >= 0, "a brace is closed that was not opened"
        assert shown not in "%#$_^", f"{shown} is raw"
        assert not shown.startswith((r"\begin", r"\end{")), shown
        assert shown != "&" or depth == 0, "a cell ends within braces"
        cells += shown == "&"
        if shown in OPTIONAL:
            assert not re.match(r"\s*[\[*]", text[token.end() :]), "taken for an option"
        if shown == r"\\" and depth == 0:
            rows.append(cells)
            cells = 1
        if shown[0] not in "\\{}&":
            assert all(letter == "\n" or (letter.isprintable() and _is_in_fonts(letter)) for letter in shown), shown
            assert not re.search("---?-|,,|''", shown.replace("---", "").replace("--", "")), "letters become another"
    assert (depth, cells) == (0, 1), "something is open"
    return rows


def _is_in_fonts(letter: str) -> bool:
    """By the code pages whose letters T1 fonts have."""
    for page in ("latin-1", "cp1252", "cp1250", "cp1254"):
        try:
            letter.encode(page)
        except UnicodeEncodeError:
            continue
        return True
    return False


def compiler() -> str | None:
    """A TeX that is installed here."""
    return next(filter(None, (shutil.which(name, path=machine_path()) for name in PROGRAMS)), None)


def compiled(program: str, folder: Path, documents: dict[str, str]) -> tuple[Path, str]:
    """The PDF of these tables, and what LaTeX has said; `AssertionError` with that where it stops."""
    folder.mkdir()
    for name, document in documents.items():
        (folder / f"{name}.tex").write_text(document, encoding="utf-8")
    first = next(name for name, document in documents.items() if document != HEAD)
    inputs = "\n".join(rf"\input{{{name}}}" for name in documents)
    (folder / "paper.tex").write_text(DOCUMENT % (f"{first}-1", inputs), encoding="utf-8")
    quick = [] if program.endswith("tectonic") else ["-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape"]
    for _ in range(1 if program.endswith("tectonic") else 2):  # the second time, references are known
        done = subprocess.run(
            [program, *quick, "paper.tex"], cwd=folder, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        said = done.stdout.decode("utf-8", "replace") + done.stderr.decode("utf-8", "replace")
        assert done.returncode == 0, said[-3000:]
    assert (folder / "paper.pdf").read_bytes().startswith(b"%PDF")
    return folder / "paper.pdf", said
