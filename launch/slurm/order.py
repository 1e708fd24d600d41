"""The order in which the shapes of a sweep are submitted: repeat by repeat, not shape by shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launch.slurm.sbatch import slurm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launch.slurm.sbatch import JobGroup


MOST_TURNS = 8
"""More repeats share turns: every turn of a shape is an array of its own, which sbatch takes a moment for."""


@dataclass(frozen=True)
class Turn:
    """What one shape submits at once."""

    group: JobGroup
    """Those of its runs."""
    shape: int
    """Which of the groups it is a part of."""
    before: int
    """Tasks of this shape in earlier turns."""
    whole: int
    """Tasks of this shape."""


def in_turns(groups: Sequence[JobGroup]) -> list[Turn]:
    """First the first repeats of each shape, then the next ones.

    A sweep measures its configurations in turn within each repeat. One array for each shape would undo that: Slurm
    starts jobs in about the order of their submission. A shape whose jobs `launcher.array_parallelism` holds back stays
    one array, since that limit is one array's.
    """
    repeats = sorted({item.planned.run.repeat for group in groups for item in group.runs if _may_turn(group)})
    several = sum(map(_may_turn, groups)) > 1
    turn_of = {repeat: place * min(MOST_TURNS, len(repeats)) // len(repeats) for place, repeat in enumerate(repeats)}
    turns: dict[tuple[int, int], list[int]] = {}
    for shape, group in enumerate(groups):
        for place, item in enumerate(group.runs):
            turn = turn_of[item.planned.run.repeat] if several and _may_turn(group) else 0
            turns.setdefault((turn, shape), []).append(place)
    before = dict.fromkeys(range(len(groups)), 0)
    found = []
    for (_, shape), places in sorted(turns.items()):
        group = groups[shape]
        part = replace(group, runs=[group.runs[place] for place in places])
        found.append(Turn(part, shape, before[shape], len(group.tasks())))
        before[shape] += len(part.tasks())
    return found


def _may_turn(group: JobGroup) -> bool:
    """Whether its runs may be several arrays: not where they share a job, or wait for each other."""
    launcher = slurm(group.runs[0].planned.run)
    return not launcher.pack and len(group.runs) <= launcher.array_parallelism
