"""How long the runs of a plan that are still to start will take, by those that are done: nothing is guessed."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.identity import run_id
from parallelbench.errors import count_of, duration
from parallelbench.results.attempt import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.preparation import Prepared
    from parallelbench.results.folder import State


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Of the runs of a plan."""

    runs: int
    to_start: int
    """Runs that submitting starts."""
    measured: int
    """Runs that are done and whose time tells how long those to start take."""
    seconds: float | None
    """Sum over the runs to start, as if one ran after the other; null: none is done."""

    def in_words(self) -> str:
        """The line that ends a plan."""
        what = f"{count_of(self.runs, 'run')}, {self.to_start} to start"
        if not self.to_start:
            return what
        if self.seconds is None:
            return f"{what}; none is done, so their time is not known yet: plan again after the first"
        return f"{what}: about {duration(self.seconds)} one after another, as long as the {self.measured} done took"


def estimate(prepared: Sequence[Prepared], states: Sequence[State]) -> Estimate:
    """Each run takes the median of the done ones of its configuration; where none of that is done, of all."""
    waiting = [item for item, state in zip(prepared, states, strict=True) if state.to_run]
    if not waiting:  # the times of thousands of runs are not read for nothing
        return Estimate(runs=len(prepared), to_start=0, measured=0, seconds=0.0)
    took: dict[str, list[float]] = {}
    for item, seconds in _taken(prepared, states):
        took.setdefault(_configuration(item), []).append(seconds)
    every = [seconds for times in took.values() for seconds in times]
    total = sum(median(took.get(_configuration(item), every)) for item in waiting) if every else None
    return Estimate(runs=len(prepared), to_start=len(waiting), measured=len(every), seconds=total)


def _configuration(item: Prepared) -> str:
    return run_id(msgspec.structs.replace(item.planned.run, repeat=0))


def _taken(prepared: Sequence[Prepared], states: Sequence[State]) -> Iterator[tuple[Prepared, float]]:
    """Runs that trained to their end in one attempt, and the seconds from its start."""
    for item, state in zip(prepared, states, strict=True):
        if state.state == "done" and state.outcome and state.attempt == 1:
            info = Attempt(item.folder.path / "attempts" / "1").info()
            if info is not None:
                yield item, max(0.0, state.outcome.finished_at - info.launched_at)
