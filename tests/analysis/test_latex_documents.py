"""The tables for a paper compile: where a TeX is there, by it; everywhere, by what their text must look like."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import write_report
from analysis.claims import judge
from analysis.metrics.columns import page_columns
from analysis.report import page as page_module
from analysis.report.claims import table as table_of_claims
from analysis.report.latex import HEAD, MOST_COLUMNS, MOST_ROWS, Rows, by_group, escape, floats
from analysis.report.publication import Hyperparameters, hyperparameter_table
from analysis.report.tables import Cell, Shown
from tests.analysis.factory import Fake, config, published
from tests.analysis.full_sweeps import made_up
from tests.analysis.latex_documents import Table, compiled, compiler, tables_in
from tests.analysis.test_claims import WOBBLE, claim, two_devices

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.claims.verdict import Judgement

pytestmark = pytest.mark.slow

NASTY = (
    *(rf"{character}a{character}{character} {character}" for character in "%_&#$~^\\{}[]*<>|\"'`,-?!/@=+"),
    *("\\end{document}", "\\input{x}", "% all of the rest", "[2cm] wide", "* starred", " [1]", "(1)", "^^41", "#1"),
    *("a\nb\r\tc\x00\x7f", "--figure ---", "naïve Ñandú Ångström e\u0301", "Łódź", "模型 🚀", "α → β", "½ ÷ µ ² ·"),
    *("", " ", "“said” ‘so’ …", "\u00a0\u202f\u00ad\u2060\u2028", "\ud800", "ŋĸ", "fi ffl"),
)
"""Names that somebody's data, models, devices or options may have, or that hide commands."""
NAMES = st.text(max_size=12) | st.sampled_from(NASTY)
HELD = NAMES.filter("\ud800".__ne__)
"""The same, of those that a table can hold."""
FEW_POINTS = 2.0
"""By how much a line may be wider than the page: less than anybody sees."""
TABLES = ("configurations", "energy", "accuracy", "experiment", "claims", "hyperparameters")


@pytest.fixture(scope="module")
def tex() -> str:
    return compiler() or pytest.skip("no TeX is installed: tests read the tables' structure")


def read(folder: Path) -> dict[str, str]:
    """The tables of a report by name."""
    written = {path.stem: path.read_text(encoding="utf-8") for path in (folder / "report" / "tables").glob("*.tex")}
    assert written.keys() == set(TABLES)
    return written


def require_whole(document: str) -> list[Table]:
    """As many cells in each row as there are columns, and no longer than a page."""
    found = tables_in(document)
    for table in found:
        assert table.caption
        assert set(table.rows) == {table.columns}
        assert 2 <= len(table.rows) <= 1 + MOST_ROWS
        assert table.columns <= 1 + MOST_COLUMNS
    return found


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=50)
@given(NAMES, NAMES, st.integers(1, 2 * MOST_ROWS + 1))
def test_tables_of_any_names_are_whole(group: str, name: str, rows: int) -> None:
    columns = page_columns("configurations")[:9]
    row = Shown(name, [Cell(column, 1.0, name) for column in columns])
    found = require_whole(floats(by_group([(group, [row] * rows), (name, [row])], columns), name="configurations"))
    pages = -(-rows // MOST_ROWS)
    assert [table.label for table in found] == [f"tab:configurations-{n + 1}" for n in range(2 * (pages + 1))]
    assert sum(len(table.rows) - 1 for table in found) == 2 * (rows + 1)


@settings(deadline=None, max_examples=50)
@given(st.lists(HELD, min_size=1, max_size=9, unique=True), HELD)
def test_hyperparameters_of_any_names_are_whole(names: list[str], value: str) -> None:
    values = tuple(value if place % 2 else "–" for place in range(len(names)))
    differing = ((names[0], values),) if len(names) > 1 else ()
    each = Hyperparameters(names[0], value, tuple(names), ((names[-1], value), ("epochs", "3")), differing)
    found = require_whole(hyperparameter_table([each, each]).latex)
    assert found[0].rows == [2, 2, 2]


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Judgement:
    """A claim that one case decides."""
    return judge(two_devices(tmp_path_factory.mktemp("claims"), tuple(0.6 * w for w in WOBBLE)), claim(), seed="007")


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=50)
@given(where=HELD, step=HELD)
def test_claims_about_any_works_are_whole(decided: Judgement, where: str, step: str) -> None:
    (case,) = decided.cases
    judgement = replace(decided, cases=(replace(case, where=where, step=step),) * 3)
    (table,) = require_whole(table_of_claims([judgement]).latex)
    assert table.rows == [3] * 4


def test_letters_that_no_font_has_are_written_as_codes() -> None:
    assert escape("模型 e\u0301 Łódź →") == r"U+6A21U+578B é Łódź \ensuremath{\rightarrow}"
    assert escape("cnn_small, 50 % × 2 (1,024)") == r"cnn\_small, 50 \% \texttimes{} 2 (1,024)"
    assert escape("--figure, ''") == "-{}-figure, '{}'"
    assert [escape(each) for each in ("[1]", "*", " [", "a [b]")] == ["{}[1]", "{}*", "{} [", "a [b]"]


def test_any_names_compile(tex: str, tmp_path: Path) -> None:
    rows = Rows("lr", ("Name", "Value"), [[name, name] for name in NASTY])
    compiled(tex, tmp_path / "tex", {"names": floats([(name or "none", [rows]) for name in NASTY], name="names")})


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
        undrawn.setattr(page_module, "draw", lambda runs: [])
        for folder in (sweep, root / "nasty"):
            write_report(folder)
    return [read(sweep), read(root / "nasty")]


@pytest.mark.exhaustive
def test_every_table_of_a_report_is_whole(reports: list[dict[str, str]]) -> None:
    sweep, nasty = reports
    for document in (*sweep.values(), *nasty.values()):
        require_whole(document)
    assert [name for name in TABLES if sweep[name] == HEAD] == []
    assert "GPU \\#1 \\{100 \\%\\} \\& a\\_b" in nasty["configurations"] + nasty["hyperparameters"]


@pytest.mark.exhaustive
def test_every_table_of_a_report_compiles(tex: str, tmp_path: Path, reports: list[dict[str, str]]) -> None:
    """References are found, and nothing is wider or longer than the page."""
    for number, documents in enumerate(reports):
        _, said = compiled(tex, tmp_path / str(number), documents)
        assert "LaTeX Warning" not in said, said[-3000:]
        wide = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", said)]
        assert max(wide, default=0) < FEW_POINTS, said[-3000:]


def test_a_sweep_of_very_many_kinds_of_work_compiles(tex: str, tmp_path: Path) -> None:
    """Tables without text between them: LaTeX holds back few."""
    rows = Rows("lr", ("a", "b"), [["1", "2"]] * 30)
    document = floats([(f"work {number}", [rows]) for number in range(150)], name="many")
    assert len(require_whole(document)) == 150
    compiled(tex, tmp_path / "tex", {"many": document})
