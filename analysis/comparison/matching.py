"""Which definitions of two sides belong together, and which differ in what nobody allowed to differ."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from analysis.comparison.work import canonical, without, work_differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.comparison.work import Differences, Work

_ROW = ("strategy.name", "devices", "nodes", "data.name", "model.name")
"""What identifies a row of a comparison. Where these differ, the other side has nothing to compare with."""


def unlike_works(one: Iterable[Work], other: Sequence[Work]) -> Differences:
    """The differences between works without a partner on the other side, where two belong to one row."""
    unlike: Differences = {}
    for work in one:
        if others := [each for each in other if _row(each) == _row(work)]:
            unlike = nearest(work, others) | unlike
    return unlike


def nearest(work: Work, others: Iterable[Work]) -> Differences:
    """How a work differs from the one that is most like it."""
    return min((work_differences(work, other) for other in others), key=len)


def _row(work: Work) -> str:
    return canonical({key: value for key, value in work.items() if key in _ROW})


def differences_within(definitions: Sequence[Work]) -> Differences:
    """How the first definition that is unlike the first of all differs from it; empty where all are equal."""
    first, *others = definitions
    return next(filter(None, (work_differences(first, other) for other in others)), {})


def are_comparable(one: Iterable[Work], other: Iterable[Work], *, across: tuple[str, ...]) -> bool:
    """Whether these definitions make two sides that `compare` takes, as far as definitions go."""
    sides: list[dict[str, list[Work]]] = []
    for definitions in (one, other):
        members: dict[str, list[Work]] = defaultdict(list)
        for definition in definitions:
            members[canonical(without(definition, across))].append(definition)
        sides.append(members)
    if any(differences_within(members) for side in sides for members in side.values()):
        return False
    rests = [
        [without(members[0], across) for key, members in side.items() if key not in rest]
        for side, rest in (sides, sides[::-1])
    ]
    return bool(sides[0].keys() & sides[1].keys()) and not unlike_works(rests[0], rests[1])
