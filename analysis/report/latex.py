"""Tables for a paper: LaTeX, with booktabs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_APART = "\u2063"
"""Stands between two characters that T1 fonts would make one of."""
_LETTERS = "ĂăĄąĆćČčĎďĐđĘęĚěĞğİıĹĺĽľŁłŃńŇňŐőŒœŔŕŘřŚśŞşŠšŢţŤťŮůŰűŸŹźŻżŽž“”‘’…"
"""What T1 fonts have beyond Latin-1."""


# A table of our own: pylatexenc's writes Cyrillic and Greek as commands of font encodings that few papers load, which
# ends their compilation, and a quotation mark as two apostrophes.
class _Characters(dict[int, str]):
    """Code of a character → the same in LaTeX, for `str.translate`; what fonts lack is written as its code: U+4E2D."""

    def __missing__(self, code: int) -> str:
        """Of all that no command stands for."""
        character = chr(code)
        known = character.isprintable() and (code < 256 or character in _LETTERS)  # ASCII and Latin-1
        self[code] = " " if character.isspace() else character if known else f"U+{code:04X}"
        return self[code]


_SPECIAL = _Characters(
    {
        ord(character): shown
        for character, shown in {
            **{character: f"\\{character}" for character in "&%$#_{}"},
            "\\": r"\textbackslash{}",
            "~": r"\textasciitilde{}",
            "^": r"\textasciicircum{}",
            "`": r"\textasciigrave{}",
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
            "→": r"\ensuremath{\rightarrow}",
            "\u00a0": "~",
            "\u202f": r"\,",
            "\u00ad": r"\-",
            "\u2060": "",
            _APART: "{}",
        }.items()
    }
)
LONG_HEADING = 12
"""Letters of a heading that is set in one line."""
MOST_ROWS = 50
"""Of a tabular with one line per row: so many fit on a page, in footnotesize. LaTeX breaks none."""
MOST_FLOATS = 16
"""Tables that any LaTeX can hold back while it looks for a place. Nothing but tables stands here, so it may have to."""
CLEAR = "\\clearpage\n"
HEAD = (
    "% Needs \\usepackage{booktabs} and \\usepackage{array}; with pdfLaTeX also \\usepackage[T1]{fontenc} and "
    "\\usepackage{textcomp}.\n"
)


def broken(share: float) -> str:
    """A column of so much of the page's width, in which lines break between words and are not stretched."""
    return rf">{{\raggedright\arraybackslash}}p{{{share:.3f}\linewidth}}"


class Rows(NamedTuple):
    """A tabular, in plain text."""

    shape: Sequence[str]
    """The alignment of its columns: l, r or `broken`."""
    head: Sequence[str]
    body: Sequence[Sequence[str]]


Captioned = Sequence[tuple[str, Sequence[Rows]]]
"""Captions, each with the tabulars below it."""


def floats(captioned: Captioned, *, name: str, most: int = MOST_ROWS) -> str:
    """A table of its own, which LaTeX places, numbers and refers to, for each tabular; several where one has more than
    `most` rows. Captions say which of how many; labels are tab:NAME-1, tab:NAME-2, and so on.
    """
    shown = [part for caption, tabulars in captioned for part in _numbered(caption, tabulars, most=most)]
    written = (
        (CLEAR if number > 1 and number % MOST_FLOATS == 1 else "") + _float(*part, label=f"{name}-{number}")
        for number, part in enumerate(shown, 1)
    )
    return HEAD + "\n".join(written)


def _numbered(caption: str, tabulars: Iterable[Rows], *, most: int) -> Iterator[tuple[str, Rows]]:
    pages = [
        rows._replace(body=rows.body[start : start + most])
        for rows in tabulars
        for start in range(0, len(rows.body), most)
    ]
    for number, page in enumerate(pages, 1):
        yield caption + (f" ({number} of {len(pages)})" if len(pages) > 1 else ""), page


def _float(caption: str, rows: Rows, *, label: str) -> str:
    above = [
        rf"\begin{{table}}[htbp]\caption{{{escape(caption)}}}\label{{tab:{label}}}",
        r"\centering\footnotesize\smallskip",
    ]
    stacked = [_heading(title, kind) for title, kind in zip(rows.head, rows.shape, strict=True)]
    escaped = [[escape(cell) for cell in row] for row in rows.body]
    head, *body = [" & ".join(line) + r" \\" for line in (stacked, *escaped)]
    begin = [rf"\begin{{tabular}}{{@{{}}{''.join(rows.shape)}@{{}}}}", r"\toprule"]
    end = [r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    return "\n".join([*above, *begin, head, r"\midrule", *body, *end])


def _heading(title: str, side: str) -> str:
    """In two lines where it is long and its column breaks none; the upper line is as short as possible."""
    places = [at for at, character in enumerate(title) if character == " "]
    if len(title) <= LONG_HEADING or not places or side not in "lr":
        return escape(title)
    middle = min(places, key=lambda at: max(at, len(title) - at - 1))
    return rf"\shortstack[{side}]{{{escape(title[:middle])}\\{escape(title[middle + 1 :])}}}"


def escape(plain: str) -> str:
    """The same in LaTeX, for a cell or a caption. Letters that T1 fonts lack become their code, as U+4E2D."""
    apart = re.sub(r"([-',])(?=\1)", rf"\1{_APART}", unicodedata.normalize("NFC", plain))
    shown = apart.translate(_SPECIAL)
    # A row ends with \\, which would take these for its own options.
    return f"{{}}{shown}" if re.match(r"\s*[\[*]", shown) else shown
