"""The benchmarks' page: partial runs replace their own rows only. The benchmarks themselves run in `make bench`."""

from __future__ import annotations

from importlib import import_module

from tests.bench.__main__ import PARTS, main
from tests.bench.measure import Figure
from tests.bench.page import PAGE, cells, merged, rows_of, with_rows

ORDER = ("loop", "feeding", "ddp")


def row(part: str, what: str, note: str = "") -> list[str]:
    return [part, what, "1", "1 – 1", "≥ 1", "met", note, "today, here"]


def test_a_part_replaces_its_own_rows_and_no_others() -> None:
    """In the order of the parts; one that could not be measured keeps its rows, one that is gone loses them."""
    old = [row("loop", "a"), row("feeding", "b"), row("feeding", "c"), row("gone", "d"), row("ddp", "e")]
    found = merged(old, {"ddp": [], "feeding": [row("feeding", "new")]}, ORDER)
    assert [cells[1] for cells in found] == ["a", "new", "e"]


def test_the_page_is_read_as_it_was_written() -> None:
    page = PAGE.read_text()
    assert {cells[0] for cells in rows_of(page)} <= set(PARTS)
    rows = [row("loop", "a", note="with a note"), row("ddp", "b")]
    changed = with_rows(page, rows)
    assert rows_of(changed) == rows
    assert changed.partition("<!--")[0] == page.partition("<!--")[0]
    assert changed.rpartition("-->")[2] == page.rpartition("-->")[2]
    assert with_rows(page, rows_of(page)) == page


def test_a_figure_becomes_a_row() -> None:
    found = cells("ddp", Figure("speed", [0.9, 1.1, 1.0], "×", 1.05, True, "a note"))
    assert found[:7] == ["ddp", "speed", "1 ×", "0.9 – 1.1", "≥ 1.05 ×", "**missed**", "a note"]
    assert "busy" not in found[7]
    assert cells("ddp", Figure("speed", [1.0], "×", 1, True), others=3)[7].endswith("; busy with 3 other processes")


def test_every_part_exists_and_an_unknown_one_is_refused() -> None:
    assert all(callable(import_module(f"tests.bench.{part}").figures) for part in PARTS)
    assert main(["nothing"]) == 2
