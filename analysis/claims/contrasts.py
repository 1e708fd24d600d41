"""The effects of a claim: runs that differ in the compared keys only, and the effect in each repeat."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from msgspec import structs

from analysis.claims.effects import Effect
from analysis.claims.grammar import LAST, Claim, Contrast, Level, written
from analysis.claims.levels import levels_of
from analysis.claims.readings import Reading
from analysis.comparison.compared_run import compared_runs
from analysis.comparison.groups import varying_keys, work_label
from analysis.comparison.repeats import in_both
from analysis.comparison.sweeps import in_one_sweep
from parallelbench.config.build import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from analysis.comparison.compared_run import ComparedRun
    from analysis.comparison.work import Work
    from analysis.reader import Runs

    Combine = Callable[[float, float, Effect, Effect], float | None]
    Combined = Callable[[Sequence[Effect], int], list[Reading | None]]


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
