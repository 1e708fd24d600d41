"""Spans: each instant of a step belongs to the innermost span around it, and to no other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelbench.world.spans import PHASES, Spans
from tests.helpers import Clock

Tree = list[tuple[int, str, Any]]
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.just([]),
    lambda children: st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(PHASES), children), max_size=4),
    max_leaves=12,
)


def walk(tree: Tree, spans: Spans, clock: Clock, phase: str, expected: dict[str, int]) -> None:
    """Each node takes time before it begins, for the phase around it."""
    for duration, inner, children in tree:
        clock.now_s += duration
        expected[phase] += duration
        with spans.span(inner):  # type: ignore[arg-type]
            walk(children, spans, clock, inner, expected)
            clock.now_s += 1
            expected[inner] += 1


@pytest.mark.slow
@given(TREES)
def test_phases_sum_to_the_step_whatever_is_nested(tree: Tree) -> None:
    clock = Clock()
    spans, expected = Spans(clock.perf_counter), dict.fromkeys(PHASES, 0)
    with spans.step() as step:
        walk(tree, spans, clock, "other", expected)
    assert step.phases == expected
    assert sum(step.phases.values()) == step.step_time_s == clock.now_s


def test_what_is_entered_and_not_left_ends_with_the_span_around_it() -> None:
    clock = Clock()
    spans = Spans(clock.perf_counter)
    with spans.step() as step:
        with spans.span("backward"):
            clock.now_s += 5
            spans.enter("communication")
            clock.now_s += 7
        clock.now_s += 11
    assert (step.phases["backward"], step.phases["communication"], step.phases["other"]) == (5, 7, 11)


def test_time_outside_of_steps_counts_nowhere() -> None:
    clock = Clock()
    spans = Spans(clock.perf_counter)
    with spans.span("forward"):
        clock.now_s += 3
    with spans.step() as step:
        clock.now_s += 1
    assert sum(step.phases.values()) == step.step_time_s == 1
    assert spans.seen == {"other"}


def test_a_step_that_fails_leaves_no_span_open() -> None:
    spans = Spans(Clock().perf_counter)
    with pytest.raises(ValueError, match="boom"), spans.step(), spans.span("forward"):
        raise ValueError("boom")
    assert spans.innermost is None
