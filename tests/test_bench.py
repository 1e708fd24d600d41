"""The benchmarks' page: partial runs replace their own rows only. The benchmarks themselves run in `make bench`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.bench.__main__ import PARTS
from tests.bench.measure import Figure
from tests.bench.page import HEADERS, PAGE, cells, merged, rows_of, with_rows

ORDER = ("loop", "feeding", "ddp")


def row(part: str, what: str, note: str = "") -> list[str]:
    return [part, what, "1", "1 – 1", "≥ 1", "met", note, "today, here"]


def test_a_part_replaces_its_own_rows_and_no_others() -> None:
    old = [row("loop", "a"), row("feeding", "b"), row("feeding", "c"), row("ddp", "d")]
    found = merged(old, {"feeding": [row("feeding", "new")]}, ORDER)
    assert [cells[1] for cells in found] == ["a", "new", "d"]


def test_a_part_that_could_not_be_measured_keeps_its_rows_and_one_that_is_gone_loses_them() -> None:
    old = [row("loop", "a"), row("gone", "b")]
    assert merged(old, {"loop": []}, ORDER) == [row("loop", "a")]


def test_rows_follow_the_order_of_the_parts() -> None:
    found = merged([row("ddp", "d")], {"feeding": [row("feeding", "b")], "loop": [row("loop", "a")]}, ORDER)
    assert [cells[0] for cells in found] == ["loop", "feeding", "ddp"]


def test_the_page_is_read_as_it_was_written() -> None:
    page = PAGE.read_text()
    rows = [row("loop", "a", note="with a note"), row("ddp", "b")]
    changed = with_rows(page, rows)
    assert rows_of(changed) == rows
    assert changed.partition("<!--")[0] == page.partition("<!--")[0]
    assert changed.rpartition("-->")[2] == page.rpartition("-->")[2]
    assert with_rows(page, rows_of(page)) == page


def test_every_row_of_the_page_is_of_a_part_and_says_when_and_where() -> None:
    rows = rows_of(PAGE.read_text())
    assert rows
    assert {len(cells) for cells in rows} == {len(HEADERS)}
    assert {cells[0] for cells in rows} <= set(PARTS)
    assert all(cells[-1].startswith("20") and "cores" in cells[-1] for cells in rows)


def test_a_figure_becomes_a_row() -> None:
    found = cells("ddp", Figure("speed", [0.9, 1.1, 1.0], "×", 1.05, True, "a note"))
    assert found[:7] == ["ddp", "speed", "1 ×", "0.9 – 1.1", "≥ 1.05 ×", "**missed**", "a note"]
    assert "busy" not in found[7]
    assert cells("ddp", Figure("speed", [1.0], "×", 1, True), others=3)[7].endswith("; busy with 3 other processes")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_figures(part: str) -> None:
    assert callable(importlib.import_module(f"tests.bench.{part}").figures)


def test_an_unknown_part_lists_the_valid_ones() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.bench", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothing: no such benchmark; choose of loop, " in done.stdout
