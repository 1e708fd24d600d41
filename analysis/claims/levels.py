"""The levels that claims compare: configurations with a metric's values, made once for all claims on these runs."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis.claims.effects import Effect, as_every_strategy, best
from analysis.claims.readings import Reading, readings, steps_of_runs, usable, usable_for
from analysis.comparison.groups import definitions
from analysis.comparison.policy import WAYS
from analysis.comparison.work import Keyed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from analysis.claims.grammar import Claim, Contrast
    from analysis.reader import Runs


_NAMED = ("data", "model")
"""Keys by whose names a level may choose runs, and which no stand-in changes."""


class Member(NamedTuple):
    """A run of a kind."""

    place: int
    """Among all runs, in the order of their ids."""
    ids: tuple[str]
    """Its id."""
    repeat: int


class Kind(NamedTuple):
    """Runs of one configuration, of one size of the data and of the model."""

    of: Keyed
    facts: dict[str, Any]
    members: list[Member]
    """In the order of their ids."""


class Levels:
    """What the claims on these runs share. All runs are walked once for each metric, epoch and target."""

    def __init__(self, runs: Runs) -> None:
        """Nothing is computed before it is asked for."""
        self._runs = runs
        self._kinds: dict[Callable[[Runs], pl.DataFrame], list[Kind]] = {}
        self._readings: dict[tuple[str, float | None, int | str], dict[str, Reading]] = {}
        self._levels: dict[tuple[object, ...], list[Effect]] = {}
        self._stand_ins: dict[tuple[Keyed, str], Keyed] = {}

    def of(self, claim: Claim) -> list[Effect]:
        """The values per configuration, and per epoch that the claim names."""
        epochs = frozenset[int | str]().union(
            *(claim.epochs(each) for each in claim.contrasts if self._has_sides(each))
        )
        of_devices = any(
            "devices" in c.roots and "strategy" not in c.roots for c in (*claim.contrasts, claim.more) if c
        )
        key = claim.metric, claim.target, epochs, of_devices, claim.best_of
        if key not in self._levels:
            levels = self._measured(claim.metric, claim.target, epochs)
            if of_devices:
                levels = as_every_strategy(levels, self._stand_in)
            self._levels[key] = best(levels, claim.best_of) if claim.best_of else levels
        return self._levels[key]

    def readings(self, metric: str, *, target: float | None, epoch: int | str) -> dict[str, Reading]:
        """Run id → the metric, see `readings.readings`."""
        key = metric, target, epoch
        if key not in self._readings:
            self._readings[key] = readings(self._runs, metric, target=target, epoch=epoch)
        return self._readings[key]

    def _has_sides(self, contrast: Contrast) -> bool:
        """Whether any run has the data and the model of each side: what no run has need not be read."""
        named = ((key, side[key]) for side in (contrast.from_, contrast.to) if side for key in _NAMED if key in side)
        return all(self._names[key].intersection(value if isinstance(value, list) else [value]) for key, value in named)

    @cached_property
    def _names(self) -> dict[str, set[Any]]:
        return {key: {of.keys.get(f"{key}.name") for of in self._keyed.values()} for key in _NAMED}

    def _measured(self, metric: str, target: float | None, epochs: frozenset[int | str]) -> list[Effect]:
        by_epoch = {epoch: self.readings(metric, target=target, epoch=epoch) for epoch in sorted(epochs, key=str)}
        missed = set()
        if target is not None:
            missed = set(usable(self._runs, metric).filter(pl.col("best_test_accuracy") < target)["run_id"])
        found: list[tuple[int, int, Effect]] = []
        for kind in self._kinds_for(metric):
            for number, (epoch, by_run) in enumerate(by_epoch.items()):
                known = [each for each in kind.members if each.ids[0] in by_run or each.ids[0] in missed]
                if known:
                    found.append((known[0].place, number, self._effect(kind._replace(members=known), epoch, by_run)))
        # As their first runs come.
        return [effect for *_, effect in sorted(found, key=itemgetter(0, 1))]

    def _effect(self, kind: Kind, epoch: int | str, by_run: Mapping[str, Reading]) -> Effect:
        of_runs = steps_of_runs(self._runs)
        steps = [of_runs.get(each.ids[0]) for each in kind.members]
        effect = Effect(kind.of, kind.facts | {"epoch": epoch, "steps": next(filter(None, steps), steps[-1])})
        for _, ids, repeat in kind.members:
            if repeat in effect.values or repeat in effect.missed:
                continue  # a second run of this repeat
            if reading := by_run.get(ids[0]):
                effect.values[repeat], effect.runs[repeat] = reading, ids
            else:
                effect.missed.add(repeat)
        return effect

    def _kinds_for(self, metric: str) -> list[Kind]:
        chosen = usable_for(metric)
        if chosen not in self._kinds:
            columns = ("train_samples", "parameters", "framework", "run_id", "repeat")
            members: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
            for place, row in enumerate(usable(self._runs, metric).select(columns).iter_rows()):
                samples, parameters, framework, run_id, repeat = row
                key = self._keyed[run_id], samples, parameters, framework or "torch"
                members[key].append(Member(place, (run_id,), repeat))
            names = ("train_samples", "parameters", "framework")
            self._kinds[chosen] = [
                Kind(of, dict(zip(names, facts, strict=True)), each) for (of, *facts), each in members.items()
            ]
        return self._kinds[chosen]

    @cached_property
    def _keyed(self) -> dict[str, Keyed]:
        """Run id → its definition; equal ones are one object."""
        shared: dict[str, Keyed] = {}
        known: dict[int, Keyed] = {}
        for definition in definitions(self._runs).values():
            if id(definition) not in known:
                keyed = Keyed(definition)
                known[id(definition)] = shared.setdefault(keyed.text, keyed)
        return {run_id: known[id(definition)] for run_id, definition in definitions(self._runs).items()}

    def _stand_in(self, of: Keyed, strategy: Keyed) -> Keyed:
        """A configuration of one device, as if it were of this strategy."""
        key = of, strategy.text
        if key not in self._stand_ins:
            one = {"devices": of.keys["devices"], "nodes": of.keys["nodes"]}
            self._stand_ins[key] = Keyed(of.without(WAYS).keys | strategy.keys | one)
        return self._stand_ins[key]


@lru_cache(maxsize=8)
def levels_of(runs: Runs) -> Levels:
    """What the claims on these runs share."""
    return Levels(runs)
