"""Pools: pairs of runs whose ratios have something in common, so that their mean counts once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from analysis.comparison.order import one_after_the_other

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from analysis.comparison.compared_run import ComparedRun
    from analysis.comparison.sessions import Span


def pools(pairs: Sequence[Sequence[ComparedRun]]) -> tuple[int, ...]:
    """Of each pair of runs the number of its pool. Pools are independent of each other; the pairs of one need not be.

    A pair that was measured in turn with the others of its session is a pool of its own: what changes slowly was the
    same for both sides. Pairs across sessions are in one pool, directly or through others, where

    - they share a session: what differed between these sessions is in all their ratios;
    - the time between the starts of one pair's runs overlaps with another pair's: what changed meanwhile is in both
      ratios. So sides that were measured one after the other are one pool, however many submits each side has.
    """
    sessions = [{run.session for run in pair} for pair in pairs]
    within: dict[Hashable, list[int]] = defaultdict(list)
    for number, found in enumerate(sessions):
        if len(found) == 1:
            within[next(iter(found))].append(number)
    alone = {n for numbers in within.values() if _in_turn([pairs[n] for n in numbers]) for n in numbers}
    across = [number for number in range(len(pairs)) if number not in alone]
    stretch = dict(zip(across, overlapping([_between_starts(pairs[number]) for number in across]), strict=True))
    return joined(
        [
            {("alone", number)} if number in alone else {*found, ("stretch", stretch[number])}
            for number, found in enumerate(sessions)
        ]
    )


def _in_turn(pairs: Sequence[Sequence[ComparedRun]]) -> bool:
    return not one_after_the_other([[run.span[0] for run in side] for side in zip(*pairs, strict=True)])


def _between_starts(pair: Sequence[ComparedRun]) -> Span:
    """From the start of the first run of a pair to that of its last; without end where one is unknown."""
    starts = [run.span[0] for run in pair]
    return min(starts), float("inf") if float("-inf") in starts else max(starts)


def overlapping(stretches: Sequence[Span]) -> tuple[int, ...]:
    """Number stretches of time so that those that overlap, directly or through others, have one number."""
    numbers = [0] * len(stretches)
    number, until = 0, float("-inf")
    for place in sorted(range(len(stretches)), key=lambda place: stretches[place]):
        first, last = stretches[place]
        number += first > until
        until = max(until, last)
        numbers[place] = number
    return tuple(numbers)


def joined(groups: Sequence[Collection[Hashable]]) -> tuple[int, ...]:
    """Number groups so that those with a common member, directly or through others, have one number."""
    number_of: dict[Hashable, int] = {}
    numbers: list[int] = []
    for number, group in enumerate(groups):
        joined = {number_of[member] for member in group if member in number_of}
        if joined:
            numbers = [number if old in joined else old for old in numbers]
            number_of = {member: number if old in joined else old for member, old in number_of.items()}
        numbers.append(number)
        number_of |= dict.fromkeys(group, number)
    return tuple(numbers)
