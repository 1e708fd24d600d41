"""Tables of the verbs on a narrow terminal."""

from __future__ import annotations

import io

from rich.console import Console

from launch.verbs.console import listing

NAME = "digits-cnn_small-model_parallel_tutorial-x2-r0-4f7c5a44-and-a-tail-that-is-longer-than-any-line-of-80"
ROWS = [(NAME, "1", "[red]timeout[/]", "the run hung in an all-reduce for longer than its time limit allows")]


def printed(width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(listing(("run", "attempt", "state", "reason"), ROWS), crop=False)
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
