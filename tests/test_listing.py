"""Tables of the verbs on a narrow terminal."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from analysis import load
from analysis.claims import judge
from analysis.claims.table import judgements_table
from analysis.comparison import gate
from analysis.comparison.sides import by
from launch.verbs.console import WIDTH, console, listing
from tests.analysis.factory import config, published, steady
from tests.analysis.test_claims import REPEATS, claim

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from rich.console import RenderableType

NAME = "digits-cnn_small-model_parallel_tutorial-x2-r0-4f7c5a44-and-a-tail-that-is-longer-than-any-line-of-80"
ROWS = [(NAME, "1", "[red]timeout[/]", "the run hung in an all-reduce for longer than its time limit allows")]


def printed(width: int, shown: RenderableType | None = None) -> list[str]:
    out = io.StringIO()
    shown = listing(("run", "attempt", "state", "reason"), ROWS) if shown is None else shown
    Console(file=out, width=width).print(shown, crop=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_where_a_table_is_too_wide_a_run_has_a_line_of_its_own_that_is_not_cut() -> None:
    first, *others = printed(80)
    assert first == NAME
    assert all(len(line) <= 80 for line in others)
    assert "state timeout" in " ".join(others)


def test_where_there_is_room_it_is_a_table() -> None:
    head, row = printed(250)
    assert head.split() == ["run", "attempt", "state", "reason"]
    assert row.split()[:3] == [NAME, "1", "timeout"]


def test_comparisons_and_claims_fit_80_columns_and_cut_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for repeat in REPEATS:
        for strategy, devices, time_s in (("single", 1, 10.0), ("ddp", 2, 6.0), ("model_parallel_tutorial", 2, 9.0)):
            published(config(tmp_path, strategy=strategy, devices=devices, repeat=repeat), steady(time_s + repeat / 10))
    runs, name = load(tmp_path), "a_claim_of_which_the_name_takes_half_of_a_line"
    compared = gate.table(by(runs, "strategy", "ddp", "model_parallel_tutorial"))
    judged = judgements_table([judge(runs, claim(name=name), seed="007")])
    for shown in (listing(*compared), judged):
        assert all(len(line) <= 80 for line in printed(80, shown))
    assert "ddp × 2 → model_parallel_tutorial × 2" in printed(80, listing(*compared))
    assert "slower" in " ".join(printed(80, listing(*compared)))
    assert name in printed(80, judged)
    assert any(name in line and "reproduced" in line for line in printed(160, judged)), "else it is a table"
    for columns, width in (("80", 80), ("", WIDTH)):  # of a pipe
        monkeypatch.setenv("COLUMNS", columns)
        assert console().width == width
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    for environment, coloured in ((("TERM", "xterm-256color"), True), (("NO_COLOR", "1"), False)):
        monkeypatch.setenv(*environment)
        terminal.truncate(0)
        console().print(judged)
        assert ("\x1b[32m" in terminal.getvalue()) is coloured


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True
