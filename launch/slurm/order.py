"""The order in which the shapes of a sweep are submitted: round by round, not shape by shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launch.slurm.sbatch import slurm

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from launch.slurm.record import Submission
    from launch.slurm.sbatch import JobGroup


MOST_TURNS = 8
"""More rounds share turns, two, four or more each: every turn of a shape is an array of its own, which sbatch takes a
moment for."""


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
    number: int
    """Which turn it is, from 0; all shapes of a turn are submitted before the next one's."""


def in_turns(groups: Sequence[JobGroup]) -> list[Turn]:
    """First the first round of each shape, then the next ones; a round is one repeat of every configuration.

    A sweep measures its configurations in turn within each round. One array for each shape would undo that: Slurm
    starts jobs in about the order of their submission. Every other turn has the shapes in reverse, so that none of two
    shapes always comes first. Within a turn, runs keep the order that is planned.
    """
    turn_of = _turns(sorted({item.planned.run.repeat for group in groups for item in group.runs}))
    turns: dict[tuple[int, int], list[int]] = {}
    for shape, group in enumerate(groups):
        for place, item in enumerate(group.runs):
            turn = 0 if len(groups) == 1 or _packed(group) else turn_of[item.planned.run.repeat]
            turns.setdefault((turn, shape), []).append(place)
    before = dict.fromkeys(range(len(groups)), 0)
    # The same in every submit of the sweep, whichever run its plan begins with.
    in_order = sorted(before, key=lambda shape: str(groups[shape].shape))
    place_of = {shape: place for place, shape in enumerate(in_order)}
    found = []
    for turn, shape in sorted(turns, key=lambda key: (key[0], place_of[key[1]] * (-1) ** key[0])):
        group = groups[shape]
        part = replace(group, runs=[group.runs[place] for place in turns[turn, shape]])
        found.append(Turn(part, shape, before[shape], len(group.tasks()), turn))
        before[shape] += len(part.tasks())
    return found


def interleaving(groups: Sequence[JobGroup]) -> str:
    """ "6 rounds, 3 shapes in turn"; empty of a single round, and of shapes that take no turns."""
    rounds = len({item.planned.run.repeat for group in groups for item in group.runs})
    if rounds < 2 or any(map(_packed, groups)):
        return ""
    if len(groups) == 1:
        return f"{rounds} rounds of one shape, in the order of the plan"
    turns = len({turn.number for turn in in_turns(groups)})
    each = "" if turns == rounds else f" in {turns} turns"
    return f"{rounds} rounds{each}, {len(groups)} shapes in turn"


def out_of_turn(groups: Sequence[JobGroup], *, repeats: Collection[int]) -> Iterator[str]:
    """Why runs of several shapes are not measured in turn; `repeats`: of all that was asked for."""
    if len(groups) < 2:
        return
    if set(repeats) == {0}:
        yield (
            "of one repeat there are no turns: the shapes are measured one after the other, and comparisons between "
            "them get no verdict: choose sweep.repeats=6"
        )
    elif any(map(_packed, groups)):
        yield (
            "launcher.pack=true puts all repeats of a shape into one job, so the shapes are measured one after the "
            "other, and comparisons between them count as not interleaved: choose launcher.pack=false"
        )


def holds_back(submission: Submission) -> bool:
    """Whether some jobs of an array wait for others of it, and not for devices alone."""
    return len(submission.tasks) > submission.launcher.array_parallelism


def _turns(repeats: Sequence[int]) -> dict[int, int]:
    """Repeat → its turn, by its own number: repeats that are submitted one by one have shapes in reverse, too.

    Rounds are planned in pairs, one the reverse of the other: these share turns first.
    """
    rounds = 1 if len(repeats) <= MOST_TURNS else 2 * -(-len(repeats) // (2 * MOST_TURNS))
    return {repeat: repeat // rounds for repeat in repeats}


def _packed(group: JobGroup) -> bool:
    """Whether its runs share one job, which can't be divided."""
    return slurm(group.runs[0].planned.run).packed
