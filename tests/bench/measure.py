"""Paired measurement: alternatives in turn, in changing order, so that the machine's drift hits all of them alike."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parallelbench.world.machine import this_machine

ROUNDS = 9


@dataclass(frozen=True)
class Figure:
    """One line of the table: what was measured, over the rounds, and the goal, if there is one."""

    what: str
    values: list[float]
    unit: str
    goal: float | None
    at_least: bool
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        if self.goal is None:
            return True
        return self.median >= self.goal if self.at_least else self.median <= self.goal

    def cells(self) -> list[str]:
        sign = "≥" if self.at_least else "≤"
        return [
            self.what,
            f"{self.median:.3g} {self.unit}".strip(),
            f"{min(self.values):.3g} – {max(self.values):.3g}",
            "" if self.goal is None else f"{sign} {self.goal:g} {self.unit}".strip(),
            "" if self.goal is None else "met" if self.met else "**missed**",
            self.note,
        ]


def paired(alternatives: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Call each alternative once per round, in an order drawn anew; what they return, by name."""
    results: dict[str, list[float]] = {name: [] for name in alternatives}
    for call in alternatives.values():
        call()  # warm-up: caches, allocator, lazy imports
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(alternatives), len(alternatives)):
            results[name].append(alternatives[name]())
    return results


def all_cores() -> tuple[int, ...]:
    """The machine's: the benchmarks' own process is pinned to one core, which its children inherit."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return tuple(this_machine().cores)


def ratios(results: Mapping[str, list[float]], numerator: str, denominator: str) -> list[float]:
    """Ratio of each round."""
    return [a / b for a, b in zip(results[numerator], results[denominator], strict=True)]
