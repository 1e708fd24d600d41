"""Spans: each instant of a step belongs to the innermost span around it, and to no other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelbench.measure.spans import PHASES, Spans


class Clock:
    """Whole numbers, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return self.now


Tree = list[tuple[int, str, Any]]
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.just([]),
    lambda children: st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(PHASES), children), max_size=4),
    max_leaves=12,
)


def walk(tree: Tree, spans: Spans, clock: Clock, phase: str, expected: dict[str, int]) -> None:
    """Each node takes time before it begins, for the phase around it."""
    for duration, inner, children in tree:
        clock.now += duration
        expected[phase] += duration
        with spans.span(inner):  # type: ignore[arg-type]
            walk(children, spans, clock, inner, expected)
            clock.now += 1
            expected[inner] += 1


@pytest.mark.slow
@given(TREES)
def test_phases_sum_to_the_step_whatever_is_nested(tree: Tree) -> None:
    clock = Clock()
    spans, expected = Spans(clock), dict.fromkeys(PHASES, 0)
    with spans.step() as step:
        walk(tree, spans, clock, "other", expected)
    assert step.phases == expected
    assert sum(step.phases.values()) == step.step_time_s == clock.now


def test_what_is_entered_and_not_left_ends_with_the_span_around_it() -> None:
    clock = Clock()
    spans = Spans(clock)
    with spans.step() as step:
        with spans.span("backward"):
            clock.now += 5
            spans.enter("communication")
            clock.now += 7
        clock.now += 11
    assert (step.phases["backward"], step.phases["communication"], step.phases["other"]) == (5, 7, 11)


def test_time_outside_of_steps_counts_nowhere() -> None:
    clock = Clock()
    spans = Spans(clock)
    with spans.span("forward"):
        clock.now += 3
    with spans.step() as step:
        clock.now += 1
    assert sum(step.phases.values()) == step.step_time_s == 1
    assert spans.seen == {"other"}


def test_a_step_that_fails_leaves_no_span_open() -> None:
    spans = Spans(Clock())
    with pytest.raises(ValueError, match="boom"), spans.step(), spans.span("forward"):
        raise ValueError("boom")
    assert spans.innermost is None
