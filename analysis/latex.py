"""The page's tables for a paper: LaTeX, with booktabs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.cells import Column, Shown

_SPECIAL = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "×": r"\texttimes{}",
        "–": "--",
        "—": "---",
        "−": r"\textminus{}",
        "±": r"\textpm{}",
        "≥": r"\ensuremath{\geq}",
        "≤": r"\ensuremath{\leq}",
        "\u00a0": "~",
        "\u202f": r"\,",
        "\u00ad": r"\-",
        "\u2060": "",
    }
)
_HEAD = "% Needs \\usepackage{booktabs}; with pdfLaTeX also \\usepackage[T1]{fontenc} and \\usepackage{textcomp}.\n"


def tables(groups: Sequence[tuple[str, Sequence[Shown]]], columns: Sequence[Column]) -> str:
    """One tabular per group of like work; columns without any value are left out, as nobody would print them."""
    return _HEAD + "\n".join(_tabular(group, rows, columns) for group, rows in groups)


def _tabular(group: str, rows: Sequence[Shown], columns: Sequence[Column]) -> str:
    kept = [i for i in range(len(columns)) if any(row.cells[i].shown != text.MISSING for row in rows)]
    shape = "".join("r" if columns[i].numeric else "l" for i in kept)
    lines = [[columns[i].heading for i in kept], *([row.cells[i].shown for i in kept] for row in rows)]
    head, *body = [" & ".join(map(escape, line)) + r" \\" for line in lines]
    begin = [f"% {' '.join(group.split())}", rf"\begin{{tabular}}{{{shape}}}", r"\toprule"]
    return "\n".join([*begin, head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def escape(words: str) -> str:
    """The same words in LaTeX."""
    return words.translate(_SPECIAL).replace("\n", " ")
