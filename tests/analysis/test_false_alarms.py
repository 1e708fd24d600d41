"""Where nothing differs, report, compare, claims and gate say so: as `tests.analysis.false_alarms` simulates it."""

from __future__ import annotations

import math

import pytest

from analysis import text
from analysis.comparison.pairing import pools
from tests.analysis.false_alarms import DESIGNS, FIRST, NOISE, ROOMS, SIZES, Start, false_alarms, looked_at
from tests.analysis.false_changes import EQUAL, EQUAL_RUNS, called, called_of_runs, changed

TRIALS = 60
ONE_AFTER_THE_OTHER = (
    "one submit per side, 3 % drift between them",
    f"6 submits per side, {FIRST}, drift shared by consecutive submits",
)
"""Sides that were measured so are never called different."""


@pytest.mark.parametrize("name", [name for name, design in DESIGNS.items() if not design.stops])
def test_equals_are_rarely_called_different(name: str) -> None:
    found = false_alarms(DESIGNS[name], TRIALS)
    assert found.keys() == ROOMS.keys()
    never = name in ONE_AFTER_THE_OTHER or DESIGNS[name].repeats == 3 or "steady drift" in name
    # Of 60 with a probability of 5 %, more than 9 come once in 800 cases.
    assert max(found.values()) <= (0 if never else 9), found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.cases("4")
def test_a_look_after_each_repeat_calls_equals_of_two_speeds_rarely_different(size: int) -> None:
    """Boost states, kinds of nodes: three or four pairs agree by chance."""
    design = looked_at(NOISE["two speeds"], size)
    assert max(false_alarms(design, TRIALS // 2).values()) <= 6  # of 30 with 5 %, more than 6 come once in 1,800 cases


def test_rounds_that_are_not_reversed_are_no_comparison() -> None:
    """A B, A B, …: a steady drift is in every pair, and no interval sees it."""
    starts = [(Start(("a", 0), 2 * r), Start(("a", 0), 2 * r + 1)) for r in range(6)]
    assert set(pools(starts)) == {0}  # type: ignore[arg-type]


# --- what is independent of what


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
        # Three submits of each side, one after the other: what changed in between is in all pairs.
        ([("a", 0, "d", 3), ("b", 1, "e", 4), ("c", 2, "f", 5)], 1),
        ([("a", 3, "d", 0), ("b", 4, "e", 1), ("c", 5, "f", 2)], 1),
        # In turn, but one side always first: a steady drift is in all pairs.
        ([("a", 0, "d", 1), ("b", 2, "e", 3), ("c", 4, "f", 5)], 1),
        ([("a", 0, "a", 1), ("a", 2, "a", 3), ("a", 4, "a", 5)], 1),
        # In turn, each side first in turn; and in twos.
        ([("a", 0, "d", 1), ("b", 3, "e", 2), ("c", 4, "f", 5)], 3),
        ([("a", 0, "d", 2), ("b", 1, "e", 3), ("c", 4, "f", 6), ("g", 5, "h", 7)], 2),
        # One pair in turn, then all others of one side first.
        ([("a", 0, "d", 1), ("b", 2, "e", 4), ("c", 3, "f", 5)], 2),
        # Times that nobody knows.
        ([("a", -math.inf, "d", 1), ("b", 2, "e", 3)], 1),
        # Two repeats in turn; two more of the second side were added later.
        ([("a", 0, "a", 1), ("a", 3, "a", 2), ("a", 4, "b", 8), ("a", 5, "b", 9)], 3),
    ],
)
def test_pairs_that_share_what_differs_between_submits_are_one_pool(
    pairs: list[tuple[str, float, str, float]], expected: int
) -> None:
    measured = [(Start((a, 0), at), Start((b, 0), then)) for a, at, b, then in pairs]
    assert len(set(pools(measured))) == expected  # type: ignore[arg-type]


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


@pytest.mark.parametrize("name", EQUAL)
def test_a_drifting_series_without_a_change_is_rarely_called_changed(name: str) -> None:
    """Of 60 with a probability of 5 %, more than 9 come once in 800 cases."""
    assert 60 * called(EQUAL[name], 20, 60) <= 9


@pytest.mark.parametrize("name", EQUAL_RUNS)
def test_points_of_odd_runs_without_a_change_are_rarely_called_changed(name: str) -> None:
    """Of 60 with a probability of 5 %, more than 9 come once in 800 cases; without the permutation test 11 % of series
    whose runs have two speeds are called changed.
    """
    assert 60 * called_of_runs(EQUAL_RUNS[name], 10, 60) <= 9


def test_changes_are_seen_in_spite_of_what_drift_may_be() -> None:
    """By hand: 5 times the noise in the middle of 20 points is a t of 5 · √20 / 2 = 11, and 3 times one of 6.7."""
    assert called(changed(7), 20, 60) > 0.9
    assert called(changed(5), 20, 60) > 0.7
    assert called(changed(7, last=2), 20, 60) > 0.9
