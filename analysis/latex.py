"""The page's tables for a paper: LaTeX, with booktabs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.cells import Shown
    from parallelbench.store.columns import Column

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
MOST_COLUMNS, LONG_HEADING = 6, 12
"""Of a tabular, besides the first: with headings in two lines they fit on a page, in footnotesize."""
HEAD = "% Needs \\usepackage{booktabs}; with pdfLaTeX also \\usepackage[T1]{fontenc} and \\usepackage{textcomp}.\n"


def tables(groups: Sequence[tuple[str, Sequence[Shown]]], columns: Sequence[Column], *, name: str) -> str:
    """One table per group of like work, or several where it would be wider than a page, each with the first column.

    Columns without any value are omitted. Labels are tab:NAME-1, tab:NAME-2, and so on.
    """
    parts = [part for group, rows in groups for part in _tabulars(group, rows, columns)]
    return HEAD + "\n".join(floating(*part, label=f"{name}-{number}") for number, part in enumerate(parts, 1))


def floating(caption: str, tabular: str, *, label: str) -> str:
    """The tabular in a table of its own, which LaTeX places, numbers and refers to."""
    words = escape(" ".join(caption.split()))
    above = [rf"\begin{{table}}[htbp]\caption{{{words}}}\label{{tab:{label}}}", r"\centering\footnotesize"]
    return "\n".join([*above, tabular.rstrip(), r"\end{table}", ""])


def _tabulars(group: str, rows: Sequence[Shown], columns: Sequence[Column]) -> list[tuple[str, str]]:
    name, *kept = [i for i in range(len(columns)) if any(row.cells[i].shown != text.MISSING for row in rows)]
    count = max(1, -(-len(kept) // MOST_COLUMNS))
    each = max(1, -(-len(kept) // count))
    parts = [[name, *kept[start : start + each]] for start in range(0, len(kept), each)] or [[name]]
    part_of = [f" ({number} of {count})" if count > 1 else "" for number in range(1, len(parts) + 1)]
    shown = [_tabular(rows, columns, part) for part in parts]
    return [
        (f"{group}: medians over the runs that count{part}", each) for part, each in zip(part_of, shown, strict=True)
    ]


def _tabular(rows: Sequence[Shown], columns: Sequence[Column], kept: list[int]) -> str:
    shape = "".join("r" if columns[i].numeric else "l" for i in kept)
    head = [_heading(columns[i].title, "r" if columns[i].numeric else "l") for i in kept]
    return tabular(shape, head, [[escape(row.cells[i].shown) for i in kept] for row in rows])


def tabular(shape: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Rows of cells that are LaTeX already."""
    first, *others = [" & ".join(line) + r" \\" for line in (head, *body)]
    begin = [rf"\begin{{tabular}}{{@{{}}{shape}@{{}}}}", r"\toprule"]
    return "\n".join([*begin, first, r"\midrule", *others, r"\bottomrule", r"\end{tabular}", ""])


def _heading(words: str, side: str) -> str:
    """In two lines where it is long; the upper line is as short as possible."""
    places = [at for at, character in enumerate(words) if character == " "]
    if len(words) <= LONG_HEADING or not places:
        return escape(words)
    middle = min(places, key=lambda at: max(at, len(words) - at - 1))
    return rf"\shortstack[{side}]{{{escape(words[:middle])}\\{escape(words[middle + 1 :])}}}"


def escape(words: str) -> str:
    """The same words in LaTeX."""
    return words.translate(_SPECIAL).replace("\n", " ")
