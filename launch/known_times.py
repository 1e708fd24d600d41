"""What done runs of a sweep tell of those that are still to start: how long they take, and how long their jobs wait."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.identity import run_id
from parallelbench.results.attempt import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from launch.launcher import Prepared
    from parallelbench.results.attempt import AttemptInfo
    from parallelbench.results.folder import State


@dataclass(frozen=True)
class Estimate:
    """A duration, s, or what follows from it: the median of what is known, the least, and the most."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, known: Sequence[float]) -> Estimate:
        """Of one value or more."""
        return cls(median(known), min(known), max(known))

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.middle + other.middle, self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> Estimate:
        """So many times as much."""
        return Estimate(factor * self.middle, factor * self.low, factor * self.high)


@dataclass(frozen=True)
class Done:
    """A run that trained to its end in one attempt."""

    item: Prepared
    took_s: float
    """From the launch of its processes to its outcome."""
    waited_s: float | None
    """From its submission to the start of its job; None: not known."""


@dataclass(frozen=True)
class Known:
    """The done runs of one sweep."""

    done: Mapping[str, Sequence[Done]]
    """Configuration → its runs."""

    @classmethod
    def of(cls, prepared: Sequence[Prepared], states: Sequence[State]) -> Known:
        """Reads a file of each run that is done."""
        done: dict[str, list[Done]] = defaultdict(list)
        for item, finished_at, info in _finished(prepared, states):
            took_s = max(0.0, finished_at - info.launched_at)
            done[_configuration(item)].append(Done(item, took_s, info.waited_s))
        return cls(dict(done))

    @property
    def count(self) -> int:
        """How many runs are done."""
        return sum(map(len, self.done.values()))

    def same(self, item: Prepared) -> Sequence[Done]:
        """The done runs of a run's configuration."""
        return self.done.get(_configuration(item), ())

    def every(self) -> list[Done]:
        """All done runs."""
        return [each for runs in self.done.values() for each in runs]

    def scaled_s(self, devices: int) -> list[float]:
        """How long each done run would take on so many devices, s, as if fewer ones took longer in proportion."""
        return [each.took_s * max(1.0, each.item.planned.run.devices / devices) for each in self.every()]

    def time(self, item: Prepared) -> Estimate | None:
        """How long a run takes, s: as its configuration did or, where none of it is done, as others of its sweep that
        are scaled to its devices; None: none is.
        """
        known = [each.took_s for each in self.same(item)] or self.scaled_s(item.planned.run.devices)
        return Estimate.of(known) if known else None

    def together(self, items: Iterable[Prepared]) -> Estimate | None:
        """How long several runs take one after the other, s."""
        times = [self.time(item) for item in items]
        known = [time for time in times if time is not None]
        return reduce(Estimate.__add__, known) if known else None

    def waits(self, alike: Callable[[Prepared], bool]) -> Estimate | None:
        """How long the jobs of such runs have waited, s; None: not known of any."""
        known = [each.waited_s for each in self.every() if each.waited_s is not None and alike(each.item)]
        return Estimate.of(known) if known else None


NOTHING_KNOWN = Known({})


def _configuration(item: Prepared) -> str:
    return run_id(msgspec.structs.replace(item.planned.run, repeat=0))


def _finished(prepared: Sequence[Prepared], states: Sequence[State]) -> Iterator[tuple[Prepared, float, AttemptInfo]]:
    for item, state in zip(prepared, states, strict=True):
        if state.state == "done" and state.outcome and state.attempt == 1:
            info = Attempt(item.folder.path / "attempts" / "1").info()
            if info is not None:
                yield item, state.outcome.finished_at, info
