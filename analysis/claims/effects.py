"""The values of a claim's metric, repeat by repeat: of one configuration, or of an effect between two."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from analysis.comparison.policy import WAYS, is_baseline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from analysis.claims.readings import Reading
    from analysis.comparison.work import Keyed, Work

    StandIn = Callable[[Keyed, Keyed], Keyed]


@dataclass(frozen=True)
class Effect:
    """A value per repeat: of the runs of one configuration, or of the effect between two. What is in it never changes
    once it is made: claims share it.
    """

    of: Keyed
    """The flat configuration; equal ones are of the same work."""
    facts: dict[str, Any]
    """Further quantities that a level may name: train_samples, parameters, epoch; steps of the whole run."""
    values: dict[int, Reading] = field(default_factory=dict)
    """Repeat → value."""
    runs: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Repeat → ids of the runs behind it, those of one side before those of the other."""
    candidates: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Repeat → ids of all runs that the smallest value was chosen from; empty without a choice."""
    missed: set[int] = field(default_factory=set)
    """Repeats that were run, but never reached the claim's target."""
    steps: tuple[str, ...] = ()
    """The levels that were compared, in words."""
    metric: str = ""
    """What its values are."""
    outside: tuple[str, ...] = ()
    """In what its runs are not those of the claim's scope: "data=digits"; empty where they are."""

    @property
    def keys(self) -> Work:
        """Of its configuration."""
        return self.of.keys


def as_every_strategy(effects: Sequence[Effect], stand_in: StandIn) -> list[Effect]:
    """One device stands for every strategy of its framework at `devices=1`, as in sweeps over devices.

    `stand_in`: what a configuration is with this strategy.
    """
    several = [effect for effect in effects if not _is_of_baseline(effect)]
    strategies: dict[tuple[str, str], dict[str, Keyed]] = defaultdict(dict)
    for effect in several:
        strategy = effect.of.below("strategy")
        strategies[_alike(effect)].setdefault(strategy.text, strategy)
    stand_ins = [
        replace(effect, of=stand_in(effect.of, strategy))
        for effect in filter(_is_of_baseline, effects)
        for strategy in strategies[_alike(effect)].values()
    ]
    return several + stand_ins


def _alike(effect: Effect) -> tuple[str, str]:
    """Work and framework: what one device shares with the strategies that it stands for."""
    return effect.of.without(WAYS).text, effect.facts.get("framework", "torch")


def _is_of_baseline(effect: Effect) -> bool:
    return is_baseline(effect.keys["strategy.name"], effect.keys["devices"])


def best(effects: Sequence[Effect], key: str) -> list[Effect]:
    """Of effects that differ in `key` only, the smallest value of each repeat."""
    groups: dict[tuple[object, ...], list[Effect]] = defaultdict(list)
    for effect in effects:
        groups[effect.of.without((key,)).text, *sorted(effect.facts.items())].append(effect)
    smallest = []
    for members in groups.values():
        one = Effect(members[0].of.without((key,)), members[0].facts)
        for effect in members:
            for repeat, reading in effect.values.items():
                one.candidates[repeat] = (*one.candidates.get(repeat, ()), *effect.runs[repeat])
                if repeat not in one.values or reading.value < one.values[repeat].value:
                    one.values[repeat], one.runs[repeat] = reading, effect.runs[repeat]
        one.missed.update(set().union(*(effect.missed for effect in members)) - one.values.keys())
        smallest.append(one)
    return smallest
