"""LaTeX tables: complete, and nothing in them that LaTeX would take for a command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import load, write_report
from analysis.report.latex import MOST_COLUMNS, escape
from tests.analysis.factory import Fake, config, published

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = (
    *("textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar", "textquotedbl"),
    *("texttimes", "textminus", "textpm", "ensuremath", "geq", "leq", "rightarrow", "textasciigrave"),
)


@given(st.text())
def test_nothing_special_is_left(words: str) -> None:
    left = re.sub(rf"\\(?:(?:{'|'.join(COMMANDS)})(?:\{{\\?[a-z]*\}})?|[&%$#_{{}},-])|{{}}", "", escape(words))
    assert not set(left) & set('&%$#_{}\\^<>|"')


def test_plain_words_stay() -> None:
    assert escape("Samples per second (1,024)") == "Samples per second (1,024)"
    assert escape("cnn_small, 50 % × 2") == r"cnn\_small, 50 \% \texttimes{} 2"


TABLE = (
    r"\\begin{table}\[htbp\]\\caption{(.*?)}\\label{([^}]*)}\n\\centering\\footnotesize\\smallskip\n(.*?)\n\\end{table}"
)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_report_has_its_tables_for_a_paper(tmp_path: Path) -> None:
    for strategy, devices in (("single", 1), ("ddp", 2)):
        for repeat in range(2):
            time_s = (2 + 0.01 * repeat) / devices
            run = config(tmp_path, strategy=strategy, devices=devices, repeat=repeat)
            published(run, Fake(epoch_time_s=lambda epoch, rank, time_s=time_s: time_s))  # type: ignore[misc]
    page = write_report(tmp_path)
    words = (page.parent / "tables" / "configurations.tex").read_text()
    parts = re.findall(TABLE, words, re.DOTALL)
    heads = [part.splitlines()[2] for _, _, part in parts]
    for number, (caption, label, part) in enumerate(parts, start=1):
        begin, top, head, middle, *rows, bottom, end = part.splitlines()
        columns = re.fullmatch(r"\\begin{tabular}{@{}([rl]+)@{}}", begin)
        assert columns is not None
        assert len(columns[1]) <= 1 + MOST_COLUMNS
        assert (top, middle, bottom, end) == (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")
        assert all(line.endswith(r" \\") and line.count(" & ") == len(columns[1]) - 1 for line in (head, *rows))
        assert [row.split(" & ")[0] for row in rows] == [r"single \texttimes{}~1", r"ddp \texttimes{}~2"]
        assert (label, caption) == (
            f"tab:configurations-{number}",
            rf"digits · cnn\_small: medians over the runs that count ({number} of 3)",
        )
    assert len(parts) == 3
    assert heads[0].startswith(r"Configuration & Runs counted & ")
    assert r"& \shortstack[r]{Time per\\epoch (s)} &" in heads[0]
    assert r"& \shortstack[r]{Memory, largest\\process (MiB)}" in heads[1]
    assert not (page.parent / "tables" / "energy.tex").read_text().count("tabular"), "no energy was measured"
    assert load(tmp_path).run.height == 4
