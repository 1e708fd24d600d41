"""The effects of a claim: runs that differ in the compared keys only, with their metric's values in each repeat."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl
from msgspec import structs

from analysis.claims.claim import (
    EPOCH_COLUMNS,
    FAILURES,
    LAST,
    LEARNING,
    OF_ENGINES,
    OF_PHASES,
    Claim,
    Contrast,
    Level,
    written,
)
from analysis.comparison.configurations import attempted, counted, facts, learned, prepared
from analysis.comparison.pairing import in_both, in_one_sweep
from analysis.comparison.run import compared_runs
from analysis.comparison.work import WAYS, Keyed, definitions, is_baseline, varying_keys, work_label
from analysis.metrics import (
    disturbed_to_accuracy,
    resting_on_disturbed,
    step_to_accuracy,
    steps_to_accuracy,
    time_to_accuracy,
    undisturbed_epochs,
)
from analysis.metrics.epochs import AS_TEXT, gathered, numbered
from analysis.metrics.runs import computation_per_communication, phase_times
from analysis.runs.reader import once
from parallelbench.config.build import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from analysis.comparison.run import ComparedRun
    from analysis.comparison.work import Work
    from analysis.runs.reader import Runs

    StandIn = Callable[[Keyed, Keyed], Keyed]
    Combine = Callable[[float, float, "Effect", "Effect"], float | None]
    Combined = Callable[[Sequence["Effect"], int], "list[Reading | None]"]


_OF_USABLE = ("run_id", "repeat", "train_samples", "parameters", "framework", "best_test_accuracy")


class Reading(NamedTuple):
    """A value and its bounds: accuracy is known at the end of each epoch, and may have been reached during it."""

    value: float
    least: float
    most: float


def usable(runs: Runs, metric: str) -> pl.DataFrame:
    """The runs that a claim about this metric may use, in the order of their ids: some columns of `facts`.

    Metrics of learning also use runs whose times alone are invalid.
    """
    return _usable(runs, usable_for(metric))


def usable_for(metric: str) -> Callable[[Runs], pl.DataFrame]:
    """What finds these runs: the same for many metrics."""
    if metric in OF_ENGINES:
        return prepared
    if metric in FAILURES:
        return attempted
    return learned if metric in LEARNING else counted


def unusable(runs: Runs, metric: str) -> tuple[int, list[str]]:
    """How many runs it may not use, and why, each reason once."""
    return _unusable(runs, usable_for(metric))


@once
def _unusable(runs: Runs, chosen: Callable[[Runs], pl.DataFrame]) -> tuple[int, list[str]]:
    gone = facts(runs).select("run_id", "exclusion").join(_usable(runs, chosen), on="run_id", how="anti")
    return gone.height, gone["exclusion"].drop_nulls().unique(maintain_order=True).to_list()


@once
def _usable(runs: Runs, chosen: Callable[[Runs], pl.DataFrame]) -> pl.DataFrame:
    return chosen(runs).select(_OF_USABLE).sort("run_id")


@once
def steps_of_runs(runs: Runs) -> dict[str, int]:
    """Run id → optimizer steps of a run of all its epochs; epochs of one run have equally many."""
    rows = numbered(runs, "epochs", "steps").unique("run_id", keep="first", maintain_order=True)
    steps = gathered(runs, "epochs", rows).cast(pl.Int64) * rows["steps"]
    return dict(zip(rows.select(AS_TEXT).to_series().to_list(), steps.to_list(), strict=True))


def readings(runs: Runs, metric: str, *, target: float | None, epoch: int | str) -> dict[str, Reading]:
    """Run id → the metric; runs without it are missing, and so are those whose value rests on disturbed epochs."""
    if target is not None:
        read = _to_target(runs, metric, target)
        disturbed = disturbed_to_accuracy(runs, target) if metric == "time_to_accuracy_s" else frozenset()
        return {run_id: reading for run_id, reading in read.items() if run_id not in disturbed}
    if metric in OF_PHASES:
        rows = phase_times(runs) if metric == "bubble_s" else computation_per_communication(runs)
    elif metric in EPOCH_COLUMNS:
        epochs = _epochs(runs, metric)
        rows = epochs.filter(pl.col("epoch") == (pl.col("last") if epoch == LAST else epoch)).with_columns(AS_TEXT)
    else:
        disturbed = resting_on_disturbed(runs).get(metric, frozenset())
        rows = facts(runs).select("run_id", metric).filter(~pl.col("run_id").is_in(list(disturbed)))
    values = rows.select("run_id", pl.col(metric).cast(pl.Float64)).drop_nulls()
    return {run_id: Reading(value, value, value) for run_id, value in values.iter_rows()}


@once
def _epochs(runs: Runs, metric: str) -> pl.DataFrame:
    """All epochs whose metric counts, of numbered runs, with the number of their run's `last`."""
    rows = undisturbed_epochs(runs, metric).select("run_id", "epoch", metric)
    return rows.with_columns(last=gathered(runs, "epochs", rows))


def _to_target(runs: Runs, metric: str, target: float) -> dict[str, Reading]:
    """Steps or time to an accuracy. It was reached at some step of the epoch at whose end it was first seen."""
    reached = steps_to_accuracy if metric == "steps_to_accuracy" else time_to_accuracy
    rows = reached(runs, target).join(step_to_accuracy(runs, target), on="run_id").drop_nulls()
    since = pl.lit(1.0) if metric == "steps_to_accuracy" else pl.col("step_time_s")
    rows = rows.select("run_id", metric, least=pl.col(metric) - (pl.col("steps") - 1) * since)
    return {run_id: Reading(value, least, value) for run_id, value, least in rows.iter_rows()}


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
        """Run id → the metric, see `readings`."""
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


@once
def levels_of(runs: Runs) -> Levels:
    """What the claims on these runs share."""
    return Levels(runs)


EARLIER = {"peak_memory_device_bytes": "gpu_memory_used_max_bytes"}
"""Metric → what stands for it where runs of a comparison have none: of a process that drives several GPUs, older
releases recorded the sum alone. Then it is the fullest GPU of both sides as the driver reports it.
"""


def effects(runs: Runs, claim: Claim) -> list[Effect]:
    """Every effect of the claim. The sides differ in the compared keys only, and have a repeat in common."""
    return [effect for effect in _effects(runs, claim) if effect.values]


def is_unreached(runs: Runs, claim: Claim) -> bool:
    """Whether both sides were run, but no repeat of both reaches the claim's target."""
    if claim.target is None:
        return False
    return any(effect.missed for effect in _effects(runs, claim) if not effect.values)


def _effects(runs: Runs, claim: Claim) -> list[Effect]:
    """The same, and effects without a value, because a run never reached the target.

    Of each comparison that is of the metric, or what stands for it, that more repeats have on both sides.
    """
    found = _on_metric(runs, claim)
    earlier = EARLIER.get(claim.metric)
    if earlier is None:
        return found
    own, other = _by_comparison(found), _by_comparison(_on_metric(runs, structs.replace(claim, metric=earlier)))
    both = ((own.get(key, []), other.get(key, [])) for key in own | other)
    return [effect for sides in both for effect in max(sides, key=lambda of: sum(len(each.values) for each in of))]


def _by_comparison(effects: Iterable[Effect]) -> dict[tuple[object, ...], list[Effect]]:
    """What was compared, whatever the metric → its effects."""
    found: dict[tuple[object, ...], list[Effect]] = defaultdict(list)
    for effect in effects:
        found[effect.of.text, effect.steps, *sorted(effect.facts.items())].append(effect)
    return found


def _on_metric(runs: Runs, claim: Claim) -> list[Effect]:
    levels = [level for level in levels_of(runs).of(claim) if _has(level, claim.where)]
    levels = [replace(level, outside=out) if (out := _outside(level, claim.scope)) else level for level in levels]
    compared: list[Effect] = []
    as_paired = _as_paired(runs, claim)
    for contrast in claim.contrasts:
        looked_at = [level for level in levels if level.facts["epoch"] in claim.epochs(contrast)]
        compared += list(_compare(looked_at, contrast, _COMBINE[claim.compare], as_paired))
    if claim.more is not None:
        combine = _difference if claim.compare == "difference" else _ratio
        compared = list(_compare(compared, claim.more, combine, _as_combined))
    return [replace(effect, metric=claim.metric) for effect in compared]


def _compare(levels: Sequence[Effect], contrast: Contrast, combine: Combine, readings: Combined) -> Iterable[Effect]:
    roots = contrast.roots
    for below, above, step in _sides(levels, contrast):
        effect = Effect(
            above.of.without(roots),
            above.facts,
            steps=(*above.steps, step),
            outside=tuple(dict.fromkeys((*below.outside, *above.outside))),
        )
        for repeat, *_ in in_both(below.values, above.values):
            reading = _combined(combine, readings((below, above), repeat), below, above)
            if reading is None:
                continue
            effect.values[repeat] = reading
            effect.runs[repeat] = (*below.runs[repeat], *above.runs[repeat])
            if candidates := (*below.candidates.get(repeat, ()), *above.candidates.get(repeat, ())):
                effect.candidates[repeat] = candidates
        there = [side.values.keys() | side.missed for side in (below, above)]
        effect.missed.update(there[0] & there[1] & (below.missed | above.missed))
        if effect.values or effect.missed:
            yield effect


def _combined(combine: Combine, readings: Sequence[Reading | None], below: Effect, above: Effect) -> Reading | None:
    """The effect between two values; from the least possible one to the largest."""
    one, other = readings
    if one is None or other is None:
        return None
    value = combine(one.value, other.value, below, above)
    if one.least == one.value == one.most and other.least == other.value == other.most:
        return None if value is None else Reading(value, value, value)
    least, most = combine(one.most, other.least, below, above), combine(one.least, other.most, below, above)
    return None if value is None or least is None or most is None else Reading(value, least, most)


def _as_paired(runs: Runs, claim: Claim) -> Combined:
    """The values of two configurations in a repeat, both as the sweep has measured them that `pairing_of` names."""
    if not runs.sweeps:
        return _as_combined  # each run was measured once
    known = compared_runs(runs)

    def readings(sides: Sequence[Effect], repeat: int) -> list[Reading | None]:
        couple = in_one_sweep([known[run_id] for side in sides for run_id in side.runs[repeat]])
        return [_read(claim, run, side.facts["epoch"]) for run, side in zip(couple, sides, strict=True)]

    return readings


def _read(claim: Claim, run: ComparedRun, epoch: int | str) -> Reading | None:
    """The metric as the run's own sweep has measured it; None where it has no value."""
    return levels_of(run.runs).readings(claim.metric, target=claim.target, epoch=epoch).get(run.run_id)


def _as_combined(sides: Sequence[Effect], repeat: int) -> list[Reading | None]:
    """Two effects in a repeat: each is of values that are paired already."""
    return [side.values[repeat] for side in sides]


def _sides(candidates: Sequence[Effect], contrast: Contrast) -> Iterable[tuple[Effect, Effect, str]]:
    """Pairs of sides that differ in the contrast only, and the two levels in words."""
    groups: dict[tuple[object, ...], list[Effect]] = defaultdict(list)
    roots = contrast.roots
    for effect in candidates:
        epoch = None if "epoch" in roots else effect.facts["epoch"]
        groups[effect.of.without(roots).text, effect.steps, epoch].append(effect)
    for members in groups.values():
        if contrast.rising:
            for below, above in _steps(members, contrast.rising):
                words = [_shown(_level(side, contrast.rising)) for side in (below, above)]
                yield below, above, f"{contrast.rising.replace('_', ' ')} {' → '.join(words)}"
        else:
            from_, to = contrast.from_ or {}, contrast.to or {}
            sides = ([effect for effect in members if _has(effect, level)] for level in (from_, to))
            for below, above in product(*sides):
                if not _same(below, above):
                    words = [_side(below, roots, from_), _side(above, roots, to)]
                    yield below, above, " → ".join(words)


def _same(one: Effect, other: Effect) -> bool:
    """Whether both are one measurement: the last epoch of a run of one epoch is its first."""
    epochs = [side.keys.get("epochs") if side.facts["epoch"] == LAST else side.facts["epoch"] for side in (one, other)]
    return epochs[0] == epochs[1] and one.runs == other.runs


def _steps(candidates: Sequence[Effect], rising: str) -> Iterable[tuple[Effect, Effect]]:
    """Each level and the next higher one: of the claim's scope alone, then those that others lie between or beside."""
    inside = [effect for effect in candidates if not effect.outside]
    yield from _risen(inside, rising)
    if len(inside) < len(candidates):
        yield from ((low, high) for low, high in _risen(candidates, rising) if low.outside or high.outside)


def _risen(candidates: Sequence[Effect], rising: str) -> Iterable[tuple[Effect, Effect]]:
    levels: dict[Any, list[Effect]] = defaultdict(list)
    for effect in candidates:
        if (level := _level(effect, rising)) is not None:
            levels[level].append(effect)
    for low, high in pairwise(sorted(levels)):
        yield from product(levels[low], levels[high])


def _level(effect: Effect, key: str) -> Any:
    """The value of a key: strategy, model and data by name."""
    if key in effect.facts:
        return effect.facts[key]
    return effect.keys.get(f"{key}.name" if key in COMPONENTS else key)


def _has(effect: Effect, level: Level) -> bool:
    return all(_is_among(_level(effect, key), allowed) for key, allowed in level.items())


def _is_among(value: Any, allowed: Any) -> bool:
    return value in allowed if isinstance(allowed, list) else value == allowed


def _outside(effect: Effect, scope: Level) -> tuple[str, ...]:
    """The keys of the scope in which an effect's runs lie beyond it, with their own values."""
    values = {key: _level(effect, key) for key in scope}
    return tuple(written({key: value}) for key, value in values.items() if not _is_among(value, scope[key]))


def _side(effect: Effect, roots: Sequence[str], level: Level) -> str:
    """A side in words: "ddp × 2", "batch size 64"."""
    words = []
    if "strategy" in roots:
        devices = f" × {effect.keys['devices']}" if "devices" in effect.keys else ""
        words.append(f"{effect.keys['strategy.name']}{devices}")
    words += [
        "last epoch" if _level(effect, key) == LAST else f"{_short(key)} {_shown(_level(effect, key))}"
        for key in level
        if key in roots and key != "strategy" and (key != "devices" or "strategy" not in roots)
    ]
    return " ".join(words)


def _short(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _ratio(below: float, above: float, *_: Effect) -> float | None:
    return above / below if below else None


def _difference(below: float, above: float, *_: Effect) -> float | None:
    return above - below


def _efficiency(below: float, above: float, one: Effect, many: Effect) -> float | None:
    ratio = _ratio(below, above)
    return None if ratio is None else ratio * one.keys["devices"] / many.keys["devices"]


_COMBINE: dict[str, Combine] = {
    "ratio": _ratio,
    "difference": _difference,
    "efficiency": _efficiency,
}


def labels(compared: Sequence[Effect]) -> list[str]:
    """Data and model of each effect, and the keys in which it differs from others of the same."""
    works = [effect.keys for effect in compared]
    return [_label(work, varying) for work, varying in zip(works, varying_keys(works), strict=True)]


def _label(work: Work, varying: list[str]) -> str:
    ways = {"strategy.name", "devices"}
    if not (ways <= work.keys() and ways & set(varying)):
        return work_label(work, varying)
    rest = [key for key in varying if key not in ways]
    return work_label(work, rest, way=f"{work['strategy.name']} × {work['devices']}")
