"""The tables for a paper are what LaTeX can set: their structure, read without a TeX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import write_report
from analysis.report import page as page_module
from analysis.report.latex import CLEAR, HEAD, MOST_FLOATS, MOST_ROWS, Rows, escape, floats
from tests.analysis.factory import Fake, config, published
from tests.analysis.full_sweeps import made_up

pytestmark = pytest.mark.slow

NASTY = (
    *(rf"{character}a{character}{character} {character}" for character in "%_&#$~^\\{}[]*<>|\"'`,-?!/@=+"),
    *("\\end{document}", "\\input{x}", "% all of the rest", "[2cm] wide", "* starred", " [1]", "(1)", "^^41", "#1"),
    *("a\nb\r\tc\x00\x7f", "--figure ---", "naïve Ñandú Ångström e\u0301", "Łódź", "模型 🚀", "α → β", "½ ÷ µ ² ·"),
    *("", " ", "“said” ‘so’ …", "\u00a0\u202f\u00ad\u2060\u2028", "\ud800", "ŋĸ", "fi ffl"),
)
"""Names that somebody's data, models, devices or options may have, or that hide commands."""
NAMES = st.text(max_size=12) | st.sampled_from(NASTY)
TOKENS = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+|\\.|[{}&%#$_^]|[^\\{}&%#$_^]+", re.DOTALL)
OPTIONAL = (r"\\", r"\toprule", r"\midrule", r"\bottomrule")
"""Commands that would take what follows in brackets, or a star, for their own."""
MOST_COLUMNS = 7
"""That fit on a page, in footnotesize, with headings in two lines."""


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


def read(folder: Path) -> dict[str, str]:
    """The tables of a report by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in (folder / "report" / "tables").glob("*.tex")}


def require_whole(document: str) -> list[Table]:
    """As many cells in each row as there are columns, and no longer than a page."""
    found = tables_in(document)
    for table in found:
        assert table.caption
        assert set(table.rows) == {table.columns}
        assert 2 <= len(table.rows) <= 1 + MOST_ROWS
        assert table.columns <= MOST_COLUMNS
    return found


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=50)
@given(NAMES, NAMES, st.integers(1, 2 * MOST_ROWS + 1))
def test_tables_of_any_names_are_whole(group: str, name: str, rows: int) -> None:
    long, short = (Rows("lrl", [name, group, name], [[name, group, name]] * count) for count in (rows, 1))
    found = require_whole(floats([(f"{group}: all", [long]), (f"{name}: one", [short])], name="configurations"))
    pages = -(-rows // MOST_ROWS)
    assert [table.label for table in found] == [f"tab:configurations-{n + 1}" for n in range(pages + 1)]
    assert sum(len(table.rows) - 1 for table in found) == rows + 1


def test_letters_that_no_font_has_are_written_as_codes() -> None:
    assert escape("模型 e\u0301 Łódź →") == r"U+6A21U+578B é Łódź \ensuremath{\rightarrow}"
    assert escape("cnn_small, 50 % × 2 (1,024)") == r"cnn\_small, 50 \% \texttimes{} 2 (1,024)"
    assert escape("--figure, ''") == "-{}-figure, '{}'"
    assert [escape(each) for each in ("[1]", "*", " [", "a [b]")] == ["{}[1]", "{}*", "{} [", "a [b]"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The tables of a published sweep with its claims, and of devices whose names LaTeX would choke on."""
    root = tmp_path_factory.mktemp("reports")
    sweep = made_up(root, ["sweep=mnist_two_devices", "measure.telemetry_hz=1"])
    for batch_size, device in ((64, "GPU #1 {100 %} & a_b^2 ~$5 \\x"), (128, "[模型] <x|y>")):
        fake = Fake(device_name=device, device_type="cuda", gpu_power_w=lambda epoch, rank: 100.0)
        for strategy, devices in (("single", 1), ("ddp", 2)):
            for repeat in range(2):
                work = {"strategy": strategy, "devices": devices, "repeat": repeat, "batch_size": batch_size}
                published(config(root / "nasty", device="cuda", **work), fake)
    with pytest.MonkeyPatch.context() as undrawn:
        undrawn.setattr(page_module, "drawn", lambda runs: [])
        for folder in (sweep, root / "nasty"):
            write_report(folder)
    return [read(sweep), read(root / "nasty")]


@pytest.mark.exhaustive
def test_every_table_of_a_report_is_whole(reports: list[dict[str, str]]) -> None:
    sweep, nasty = reports
    for document in (*sweep.values(), *nasty.values()):
        assert require_whole(document)
    assert (sweep.keys(), nasty.keys()) == ({"configurations", "claims"}, {"configurations"})
    assert "GPU \\#1 \\{100 \\%\\} \\& a\\_b" in nasty["configurations"]
