"""The effects of a claim: what was measured of two configurations of the campaign that differ in the compared keys
only, repeat by repeat.

`Measured` is one configuration at an epoch, or the effect between two. A claim's second contrast compares effects as
its first one compares configurations.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis.claims.claim import (
    EPOCH_COLUMNS,
    FAILURES,
    LAST,
    LEARNING,
    OF_ENGINES,
    OF_PHASES,
    PER_EPOCH,
    Claim,
    Contrast,
    Level,
)
from analysis.comparison.campaign import Configuration, campaign
from analysis.comparison.summary import attempted, counted, facts, learned, prepared
from analysis.comparison.work import WAYS, canonical, is_below, varying_keys, without, work_label
from analysis.metrics.disturbance import is_disturbed, undisturbed_epochs
from analysis.metrics.epochs import AS_TEXT, gathered, numbered
from analysis.metrics.runs import (
    computation_per_communication,
    phase_times,
    step_to_accuracy,
    steps_to_accuracy,
    time_to_accuracy,
)
from analysis.runs.reader import once
from parallelbench.config.build import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from analysis.comparison.work import Work
    from analysis.runs.reader import Runs


class Usable(NamedTuple):
    """What is known of a run that a claim may use."""

    train_samples: int | None
    parameters: int | None
    best_test_accuracy: float | None


def usable(runs: Runs, metric: str) -> dict[str, Usable]:
    """Id → each run that a claim about this metric may use.

    Metrics of learning also use runs whose times alone are invalid.
    """
    return _usable(runs, _choice_for(metric))


def _choice_for(metric: str) -> Callable[[Runs], pl.DataFrame]:
    if metric in OF_ENGINES or metric in FAILURES:
        return prepared if metric in OF_ENGINES else attempted
    return learned if metric in LEARNING else counted


@once  # many metrics use the same runs
def _usable(runs: Runs, chosen: Callable[[Runs], pl.DataFrame]) -> dict[str, Usable]:
    return {run_id: Usable(*known) for run_id, *known in chosen(runs).select("run_id", *Usable._fields).rows()}


def unusable(runs: Runs, metric: str) -> tuple[int, list[str]]:
    """How many runs it may not use, and why, each reason once."""
    return _unusable(runs, _choice_for(metric))


@once
def _unusable(runs: Runs, chosen: Callable[[Runs], pl.DataFrame]) -> tuple[int, list[str]]:
    rows, known = facts(runs).select("run_id", "exclusion").rows(), _usable(runs, chosen)
    gone = [exclusion for run_id, exclusion in rows if run_id not in known]
    return len(gone), list(dict.fromkeys(exclusion for exclusion in gone if exclusion is not None))


class Value(NamedTuple):
    """A metric, or an effect on it, in one repeat."""

    value: float
    least: float
    """The least that it may be: an accuracy is known at the end of each epoch, and may have been reached during it."""
    most: float


@once
def values(runs: Runs, metric: str, target: float | None, epoch: int | str) -> dict[str, Value]:
    """Run id → the metric. Runs without it are missing, and so are those that were disturbed in its window."""
    rows = _values(runs, metric, target, epoch).select("run_id", *Value._fields).drop_nulls()
    return {run_id: Value(*known) for run_id, *known in rows.rows()}


def _values(runs: Runs, metric: str, target: float | None, epoch: int | str) -> pl.DataFrame:
    quiet = ~pl.col("run_id").is_in(list(is_disturbed(runs, metric)))
    if target is not None:
        return _to_target(runs, metric, target).filter(quiet)
    if metric in OF_PHASES:
        rows = phase_times(runs) if metric == "bubble_s" else computation_per_communication(runs)
    elif metric in EPOCH_COLUMNS:
        epochs = _epochs(runs, metric)
        rows = epochs.filter(pl.col("epoch") == (pl.col("last") if epoch == LAST else epoch)).with_columns(AS_TEXT)
    else:
        rows = facts(runs).select("run_id", metric).filter(quiet)
    value = pl.col(metric).cast(pl.Float64)
    return rows.select("run_id", value=value, least=value, most=value)


@once
def _epochs(runs: Runs, metric: str) -> pl.DataFrame:
    """All epochs whose metric counts, of numbered runs, with the number of their run's `last`.

    A resumed run warms up anew in an epoch that is a warm one in other runs: what this took says nothing about it.
    """
    rows = undisturbed_epochs(runs, metric)
    if metric in PER_EPOCH and metric != "training_time_s":  # which resumed runs don't have
        rows = rows.filter(~pl.col("warm_up") | (pl.col("epoch") == 1))
    rows = rows.select("run_id", "epoch", metric)
    return rows.with_columns(last=gathered(runs, "epochs", rows))


def _to_target(runs: Runs, metric: str, target: float) -> pl.DataFrame:
    """Steps or time to an accuracy. It was reached at some step of the epoch at whose end it was first seen."""
    reached = steps_to_accuracy if metric == "steps_to_accuracy" else time_to_accuracy
    rows = reached(runs, target).join(step_to_accuracy(runs, target), on="run_id").drop_nulls()
    since = pl.lit(1.0) if metric == "steps_to_accuracy" else pl.col("step_time_s")
    value = pl.col(metric).cast(pl.Float64)
    return rows.select("run_id", value=value, least=value - (pl.col("steps") - 1) * since, most=value)


class Reading(NamedTuple):
    """One repeat of `Measured`."""

    value: Value | None
    """None: it was run, but never reached the claim's target."""
    also: float | None
    """The claim's other metric of the same runs; None where it was not measured."""
    runs: tuple[str, ...]
    """Ids of the runs behind it, those of one side before those of the other."""
    candidates: tuple[str, ...] = ()
    """Ids of all runs that the smallest value was chosen from; empty without a choice."""


@dataclass(frozen=True, eq=False)
class Measured:
    """A configuration at an epoch, or the effect between two, with what was measured in each repeat."""

    configurations: tuple[Configuration, ...]
    """The one; of an effect those of one side before those of the other. All are alike but for the `compared` keys."""
    strategy: Work
    """The keys of its strategy: its own, or of one device those of a strategy that it stands for."""
    facts: Work
    """What no configuration says: train_samples, parameters, framework, epoch and steps."""
    readings: Mapping[int, Reading]
    """By repeat."""
    compared: tuple[str, ...] = ()
    """The keys in which its sides differ, or below which they do."""
    step: str = ""
    """What was compared, in words; empty before anything was."""

    def __getitem__(self, key: str) -> Any:
        """The value of a key that its sides share, else None. Strategy, model and data are their names."""
        name = f"{key}.name" if key in COMPONENTS else key
        if name in self.facts:
            return self.facts[name]
        if is_below(name, self.compared):
            return None
        return (self.strategy if is_below(name, _STRATEGY) else self._definition).get(name)

    @property
    def _definition(self) -> Work:
        return self.configurations[-1].definition

    @cached_property
    def keys(self) -> Work:
        """The flat configuration that its sides have in common."""
        return without(without(self._definition, _STRATEGY) | self.strategy, self.compared)

    def has(self, wanted: Level) -> bool:
        """Whether it has one of the values of each key."""
        return all(self[key] in some if isinstance(some, list) else self[key] == some for key, some in wanted.items())

    @cached_property
    def known(self) -> dict[int, Value]:
        """The repeats that have a value."""
        return {repeat: reading.value for repeat, reading in self.readings.items() if reading.value is not None}

    @property
    def measurement(self) -> tuple[object, ...]:
        """What tells two measurements apart: the last epoch of a run of one epoch is its first."""
        epoch = self.facts["epoch"]
        return (self["epochs"] if epoch == LAST else epoch, *(reading.runs for reading in self.readings.values()))


_STRATEGY = ("strategy",)


def _configurations_of(runs: Runs, claim: Claim, *, devices: bool) -> list[Measured]:
    """What was measured, at the epochs that its contrasts look at, of the works that a claim is about: of most sweeps
    few claims are about any. `devices`: it compares numbers of devices, but not strategies.
    """
    epochs = frozenset[int | str]().union(*(claim.epochs(each) for each in claim.contrasts))
    levels = [_of_work(level, claim) for level in (claim.where, claim.scope)]
    found = [
        measured
        for members in campaign(runs).groups.values()
        if all(Measured(members[:1], {}, {}, {}).has(level) for level in levels)
        for configuration in members
        for epoch in sorted(epochs, key=str)
        for measured in _at_epoch(runs, configuration, claim.metric, claim.target, epoch, also=claim.also)
    ]
    if devices:
        found = _as_every_strategy(runs, found)
    return _best(runs, found, claim.best_of) if claim.best_of else found


def _of_work(level: Level, claim: Claim) -> Level:
    """The keys of a level that are the same for all configurations of a work, whatever is chosen among these."""
    others = (*WAYS, *_FACTS, *([claim.best_of] if claim.best_of else []))
    return {key: wanted for key, wanted in level.items() if not is_below(key, others)}


_FACTS = ("train_samples", "parameters", "framework", "epoch", "steps")
"""Keys of `Measured.facts`."""


@once  # many claims are about the same configurations
def _at_epoch(
    runs: Runs, configuration: Configuration, metric: str, target: float | None, epoch: int | str, *, also: str | None
) -> list[Measured]:
    """A configuration's repeats; those with other numbers of samples or parameters by themselves."""
    may, found = usable(runs, metric), values(runs, metric, target, epoch)
    besides = {} if also is None else values(runs, also, None, epoch)
    alike: dict[tuple[int | None, int | None], dict[int, Reading]] = defaultdict(dict)
    for run in configuration.every:
        known, value = may.get(run.run_id), found.get(run.run_id)
        if known is None or (value is None and not _missed(known, target)):
            continue
        other = besides.get(run.run_id) if also is not None and run.run_id in usable(runs, also) else None
        reading = Reading(value, None if other is None else other.value, (run.run_id,))
        # A second run of a repeat doesn't count.
        alike[known.train_samples, known.parameters].setdefault(run.repeat, reading)
    several = []
    for (train_samples, parameters), readings in alike.items():
        steps = [_steps(runs).get(run_id) for reading in readings.values() for run_id in reading.runs]
        own = (train_samples, parameters, configuration.framework, epoch, next(filter(None, steps), steps[-1]))
        facts_of = dict(zip(_FACTS, own, strict=True))
        several.append(Measured((configuration,), _strategy(runs, configuration), facts_of, readings))
    return several


def _missed(run: Usable, target: float | None) -> bool:
    return target is not None and run.best_test_accuracy is not None and run.best_test_accuracy < target


@once
def _steps(runs: Runs) -> dict[str, int]:
    """Run id → the optimizer steps of a run of all its epochs; epochs of one run have equally many."""
    rows = numbered(runs, "epochs", "steps").unique("run_id", keep="first", maintain_order=True)
    return dict(rows.select(AS_TEXT, gathered(runs, "epochs", rows).cast(pl.Int64) * pl.col("steps")).rows())


@once
def _strategy(runs: Runs, configuration: Configuration) -> Work:
    return {key: value for key, value in configuration.definition.items() if is_below(key, _STRATEGY)}


def _as_every_strategy(runs: Runs, every: Sequence[Measured]) -> list[Measured]:
    """One device stands for every strategy of its framework at `devices=1`, as in sweeps over devices, unless the
    strategy was run on one device itself.
    """
    one_of = {each.configurations[0]: campaign(runs).one_device_of(each.configurations[0]) for each in every}
    stand_ins: dict[Configuration, dict[str, Work]] = defaultdict(dict)
    alone = set()
    for configuration, one in one_of.items():
        if one is not None and one is not configuration:
            strategy = _strategy(runs, configuration)
            stand_ins[one][text := canonical(strategy)] = strategy
            alone |= {(one, text)} if configuration.devices == 1 else set()
    found = []
    for each in every:
        (one,) = each.configurations
        strategies = stand_ins[one].items() if one_of[one] is one else [("", each.strategy)]
        found += [replace(each, strategy=strategy) for text, strategy in strategies if (one, text) not in alone]
    return found


def _best(runs: Runs, every: Sequence[Measured], key: str) -> list[Measured]:
    """Of configurations that differ in `key` only, the smallest value of each repeat."""
    alike: dict[object, list[Measured]] = defaultdict(list)
    for each in every:
        alike[(*_alike_but(runs, each, (key,)), *each.facts.values())].append(each)
    return [_smallest(several, key) for several in alike.values()]


def _smallest(several: Sequence[Measured], key: str) -> Measured:
    chosen: dict[int, Reading] = {}
    by: dict[Configuration, None] = {}
    for repeat in sorted({repeat for each in several for repeat in each.readings}):
        of_repeat = [(each.readings[repeat], each) for each in several if repeat in each.readings]
        known = [(reading.value.value, place) for place, (reading, _) in enumerate(of_repeat) if reading.value]
        reading, whose = of_repeat[min(known)[1] if known else 0]
        chosen[repeat] = reading._replace(
            candidates=tuple(run for _, place in known for run in of_repeat[place][0].runs)
        )
        by |= dict.fromkeys(whose.configurations)
    return replace(several[0], configurations=tuple(by), readings=chosen, compared=(key,))


def effects(runs: Runs, claim: Claim) -> list[Measured]:
    """Every effect of the claim. The sides differ in the compared keys only, and have a repeat in common."""
    return [effect for effect in _compared(runs, claim) if effect.known]


def is_unreached(runs: Runs, claim: Claim) -> bool:
    """Whether both sides were run, but no repeat of both reaches the claim's target."""
    return claim.target is not None and any(not effect.known for effect in _compared(runs, claim))


def _compared(runs: Runs, claim: Claim) -> list[Measured]:
    """The effects of all contrasts, with those that have no value, as a run never reached the target."""
    contrasts = (*claim.contrasts, *([claim.more] if claim.more else []))
    devices = any("devices" in each.roots and "strategy" not in each.roots for each in contrasts)
    measured = _configurations_of(runs, claim, devices=devices)
    measured = [each for each in measured if each.has(claim.where) and each.has(claim.scope)]
    found = []
    for contrast in claim.contrasts:
        looked_at = [each for each in measured if each.facts["epoch"] in claim.epochs(contrast)]
        found += _contrasted(runs, looked_at, contrast, claim.compare)
    if claim.more is not None:
        found = _contrasted(runs, found, claim.more, "difference" if claim.compare == "difference" else "ratio")
    return found


def _contrasted(runs: Runs, every: Sequence[Measured], contrast: Contrast, how: str) -> list[Measured]:
    """The effects between all that differ in the contrast only."""
    groups: dict[object, list[Measured]] = defaultdict(list)
    for each in every:
        epoch = None if "epoch" in contrast.roots else each.facts["epoch"]
        groups[(epoch, *_alike_but(runs, each, contrast.roots))].append(each)
    return [
        effect
        for group in groups.values()
        for below, above, words in _sides(group, contrast)
        if below.measurement != above.measurement and (effect := _effect(below, above, contrast, how, words)).readings
    ]


def _alike_but(runs: Runs, measured: Measured, roots: tuple[str, ...]) -> tuple[object, ...]:
    """What is equal for all that were compared alike, and differ in these keys, or below them, only."""
    compared = (*measured.compared, *roots)
    alike = _classes(runs, (*compared, *_STRATEGY))[measured.configurations[-1]]
    return measured.step, compared, alike, canonical(without(measured.strategy, compared))


@once
def _classes(runs: Runs, keys: tuple[str, ...]) -> dict[Configuration, int]:
    """Configuration → the number of its class in `Campaign.alike_but`."""
    return {each: number for number, alike in enumerate(campaign(runs).alike_but(keys)) for each in alike}


def _sides(group: Sequence[Measured], contrast: Contrast) -> Iterator[tuple[Measured, Measured, str]]:
    """Both sides of each effect, and what is compared, in words."""
    if contrast.rising is None:
        one, other = contrast.from_ or {}, contrast.to or {}
        sides = ([each for each in group if each.has(wanted)] for wanted in (one, other))
        for below, above in product(*sides):
            yield below, above, f"{_words(below, contrast, one)} → {_words(above, contrast, other)}"
        return
    levels: dict[float, list[Measured]] = defaultdict(list)
    for each in group:
        if each[contrast.rising] is not None:
            levels[each[contrast.rising]].append(each)
    rising = sorted(levels)
    for low, high in pairwise(rising):
        words = f"{contrast.rising.replace('_', ' ')} {_shown(low)} → {_shown(high)}"
        yield from ((below, above, words) for below, above in product(levels[low], levels[high]))


def _effect(below: Measured, above: Measured, contrast: Contrast, how: str, words: str) -> Measured:
    combine = _COMBINE[how]
    share = below["devices"] / above["devices"] if how == "efficiency" else 1.0
    readings = {}
    for repeat in sorted(below.readings.keys() & above.readings.keys()):
        one, other = below.readings[repeat], above.readings[repeat]
        value = None
        if one.value is not None and other.value is not None:
            # The least effect is that of the most below and the least above.
            ends = [
                combine(one.value.value, other.value.value),
                combine(one.value.most, other.value.least),
                combine(one.value.least, other.value.most),
            ]
            known = [share * end for end in ends if end is not None]
            if len(known) < len(ends):
                continue
            value = Value(*known)
        also = None if one.also is None or other.also is None else combine(one.also, other.also)
        readings[repeat] = Reading(
            value, None if also is None else share * also, one.runs + other.runs, one.candidates + other.candidates
        )
    return replace(
        above,
        configurations=below.configurations + above.configurations,
        readings=readings,
        compared=(*above.compared, *contrast.roots),
        step=f"{above.step}, by {words}" if above.step else words,
    )


def _ratio(below: float, above: float) -> float | None:
    return above / below if below else None


_COMBINE: dict[str, Callable[[float, float], float | None]] = {
    "ratio": _ratio,
    "difference": lambda below, above: above - below,
    "efficiency": _ratio,
}


def _words(measured: Measured, contrast: Contrast, side: Level) -> str:
    """A side in words: "ddp × 2", "batch size 64"."""
    roots, words = contrast.roots, []
    if "strategy" in roots:
        devices = measured["devices"]
        words.append(f"{measured['strategy']}" + ("" if devices is None else f" × {devices}"))
    for key in side:
        if key in roots and key != "strategy" and (key != "devices" or "strategy" not in roots):
            words.append(_said(measured[key], key))
    return " ".join(words)


def _said(value: Any, key: str) -> str:
    return "last epoch" if value == LAST else f"{key.rpartition('.')[2].replace('_', ' ')} {_shown(value)}"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def labels(compared: Sequence[Measured]) -> list[str]:
    """Data and model of each effect, and the keys in which it differs from others of the same; weak scaling always."""
    works = [effect.keys for effect in compared]
    weak = [["scaling"] if work.get("scaling") == "weak" else [] for work in works]
    told = zip(works, varying_keys(works), weak, strict=True)
    return [_label(work, list(dict.fromkeys([*varying, *more]))) for work, varying, more in told]


def _label(work: Work, varying: list[str]) -> str:
    ways = {"strategy.name", "devices"}
    if not (ways <= work.keys() and ways & set(varying)):
        return work_label(work, varying)
    rest = [key for key in varying if key not in ways]
    return work_label(work, rest, way=f"{work['strategy.name']} × {work['devices']}")
