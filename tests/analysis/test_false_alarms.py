"""Where nothing differs, report, compare, claims and gate say so: as `tests.bench.false_alarms` simulates it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from analysis import text
from analysis.comparison.sessions import Span, blocks
from tests.bench.false_alarms import DESIGNS, ROOMS, false_alarms

TRIALS = 60


@pytest.mark.parametrize("name", [name for name, design in DESIGNS.items() if not design.stops])
def test_equals_are_rarely_called_different(name: str) -> None:
    found = false_alarms(DESIGNS[name], TRIALS)
    assert found.keys() == ROOMS.keys()
    # Of 60 with a probability of 5 %, more than 9 come once in 800 cases.
    assert max(found.values()) <= 9, found


def test_sides_of_one_submit_each_are_never_called_different() -> None:
    name = "one submit per side, 3 % drift between them"
    assert set(false_alarms(DESIGNS[name], TRIALS).values()) == {0}


# --- what is independent of what


@dataclass(frozen=True)
class Run:
    """A run, as far as its session goes."""

    session: str
    span: Span


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        # One sweep: in turn, so that each pair stands by itself.
        ([("a", 0, "a", 1), ("a", 3, "a", 2), ("a", 4, "a", 5)], 3),
        # One session, but all of one side first: a drift is in all pairs.
        ([("a", 0, "a", 2), ("a", 1, "a", 3)], 1),
        # A submit of each side.
        ([("a", 0, "b", 2), ("a", 1, "b", 3)], 1),
        # Each side in two submits, in alternation.
        ([("a", 0, "b", 2), ("a", 1, "b", 3), ("c", 4, "d", 6), ("c", 5, "d", 7)], 2),
        # The other side's second submit has nothing that the first one hadn't: both share the first side's.
        ([("a", 0, "b", 2), ("a", 1, "c", 3)], 1),
        # Two repeats in turn; two more of the second side were added later.
        ([("a", 0, "a", 1), ("a", 3, "a", 2), ("a", 4, "b", 8), ("a", 5, "b", 9)], 3),
    ],
)
def test_pairs_that_share_what_differs_between_submits_are_one_block(
    pairs: list[tuple[str, int, str, int]], expected: int
) -> None:
    measured = [(Run(a, (at, at + 0.5)), Run(b, (then, then + 0.5))) for a, at, b, then in pairs]
    assert len(set(blocks(measured))) == expected


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ((1.2, 1.1, 1.3), "1.20 (1.10–1.30)"),
        ((1.004, 1.003, 1.006), "1.004 (1.003–1.006)"),
        ((1.0001, 0.9996, 1.2), "1.0001 (0.9996–1.2000)"),
        ((1.0, 1.0, 1.0), "1.00 (1.00–1.00)"),
    ],
)
def test_the_digits_show_on_which_side_of_1_an_interval_ends(ends: tuple[float, float, float], shown: str) -> None:
    assert text.interval(*ends) == shown
