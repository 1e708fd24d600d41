"""The two sides of a claim: which runs are alike in all but what is compared, and the effect in each repeat."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.claims.grammar import EPOCH_COLUMNS, LEARNING, RISING, Claim, Contrast, Level
from analysis.metrics import per_epoch, steps_to_accuracy, time_to_accuracy
from analysis.summary import BASELINE, facts
from analysis.work import works
from parallelbench.config import COMPONENTS
from parallelbench.surroundings import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from analysis.load import Runs

LAST = "last"
"""The level of `epoch` that is each run's last."""
_WAYS = ("strategy", *RISING["devices"])
"""What runs of the same work differ in."""
_TIMING_ONLY = "^(oversubscribed|packed|deterministic|autograd searched)"
"""Reasons for leaving a run out that say nothing against what it has learned, or sent."""


@dataclass(frozen=True)
class Cell:
    """Runs of one configuration, or an effect between two: a value per repeat."""

    keys: dict[str, Any]
    """The flat configuration; cells that agree in it are of the same work."""
    facts: dict[str, Any]
    """What else a level may name: train_samples, parameters, epoch."""
    values: dict[int, float]
    """Repeat → value."""
    runs: dict[int, tuple[str, ...]]
    """Repeat → slugs of the runs behind it."""
    steps: tuple[str, ...] = ()
    """The levels that were compared to get here, in words."""


def usable(runs: Runs, claim: Claim) -> pl.DataFrame:
    """The rows of `facts` that the claim may rest on: of metrics of time and memory, those with valid timing only."""
    rows = facts(runs)
    allowed = pl.col("left_out").is_null()
    if claim.metric in LEARNING:
        trained = (pl.col("outcome") == "ok") & (pl.col("state") == "done")
        allowed |= trained & pl.col("left_out").str.contains(_TIMING_ONLY)
    return rows.filter(allowed)


def effects(runs: Runs, claim: Claim) -> list[Cell]:
    """Every effect that the claim is about, each between cells that are alike in all else; only where both sides have
    a repeat in common.
    """
    found = _cells(runs, claim)
    if any(c.rising == "devices" for c in (*claim.contrasts, claim.more) if c):
        found = _as_every_strategy(found)
    if claim.best_of:
        found = _best(found, claim.best_of)
    found = [cell for cell in found if _has(cell, claim.where)]
    combine = _COMBINE[claim.compare]
    compared = [effect for contrast in claim.contrasts for effect in _compare(found, contrast, combine)]
    if claim.more is None:
        return compared
    between = _COMBINE["difference" if claim.compare == "difference" else "ratio"]
    return list(_compare(compared, claim.more, between))


def _cells(runs: Runs, claim: Claim) -> list[Cell]:
    values = {epoch: _values(runs, claim, epoch) for epoch in sorted(_epochs(claim), key=str)}
    rows = usable(runs, claim).select("run_id", "slug", "repeat", "train_samples", "parameters").sort("run_id")
    merged: dict[str, Cell] = {}
    for run_id, slug, repeat, samples, parameters in rows.iter_rows():
        keys, text = _keys(runs)[run_id]
        for epoch, by_run in values.items():
            value = by_run.get(run_id)
            if value is None:
                continue
            names = {"train_samples": samples, "parameters": parameters, "epoch": LAST if epoch is None else epoch}
            cell = merged.setdefault(f"{text} {names}", Cell(keys, names, {}, {}))
            cell.values.setdefault(repeat, value)
            cell.runs.setdefault(repeat, (slug,))
    return list(merged.values())


@lru_cache(maxsize=8)
def _keys(runs: Runs) -> dict[str, tuple[dict[str, Any], str]]:
    """Run id → its flat configuration, and the same as text."""
    found = {}
    for run_id, config, devices, nodes in runs.run.select("run_id", "config_json", "devices", "nodes").iter_rows():
        keys = works(runs)[run_id] | flatten({"strategy": json.loads(config)["strategy"]})
        keys |= {"devices": devices, "nodes": nodes}
        found[run_id] = keys, _text(keys)
    return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _epochs(claim: Claim) -> set[int | None]:
    """The epochs that are asked for; None: the last one, or no epoch at all."""
    named = [
        level["epoch"]
        for contrast in (*claim.contrasts, claim.more)
        if contrast
        for level in (contrast.from_, contrast.to)
        if level and "epoch" in level
    ]
    if claim.metric not in EPOCH_COLUMNS:
        return {None}
    return {None if epoch == LAST else epoch for epoch in named} or {claim.epoch}


def _values(runs: Runs, claim: Claim, epoch: int | None) -> dict[str, float | None]:
    """Run id → the metric."""
    if claim.metric in EPOCH_COLUMNS:
        rows = per_epoch(runs).join(runs.run.select("run_id", last="epochs"), on="run_id")
        rows = rows.filter(pl.col("epoch") == (pl.col("last") if epoch is None else epoch))
        return dict(rows.select("run_id", claim.metric).rows())
    if claim.target is not None:
        reached = steps_to_accuracy if claim.metric == "steps_to_accuracy" else time_to_accuracy
        return dict(reached(runs, claim.target).rows())
    return dict(facts(runs).select("run_id", claim.metric).rows())


def _as_every_strategy(cells: Sequence[Cell]) -> list[Cell]:
    """One device stands for every strategy at `devices=1`, as in sweeps over devices."""
    found = [cell for cell in cells if not _is_baseline(cell)]
    strategies: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for cell in found:
        strategy = {key: value for key, value in cell.keys.items() if key.startswith("strategy.")}
        strategies[_text(_without(cell.keys, _WAYS))][_text(strategy)] = strategy
    for cell in filter(_is_baseline, cells):
        rest = _without(cell.keys, _WAYS)
        one = {"devices": cell.keys["devices"], "nodes": cell.keys["nodes"]}
        found += [replace(cell, keys=rest | strategy | one) for strategy in strategies[_text(rest)].values()]
    return found


def _is_baseline(cell: Cell) -> bool:
    return (cell.keys["strategy.name"], cell.keys["devices"]) == BASELINE


def _best(cells: Sequence[Cell], key: str) -> list[Cell]:
    """Of cells that differ in `key` only, the smallest value of each repeat."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[_text([_without(cell.keys, (key,)), cell.facts])].append(cell)
    best = []
    for members in groups.values():
        values: dict[int, float] = {}
        used: dict[int, tuple[str, ...]] = {}
        for cell in members:
            for repeat, value in cell.values.items():
                if value < values.get(repeat, float("inf")):
                    values[repeat], used[repeat] = value, cell.runs[repeat]
        best.append(Cell(_without(members[0].keys, (key,)), members[0].facts, values, used))
    return best


def _compare(cells: Sequence[Cell], contrast: Contrast, combine: Callable[..., float | None]) -> Iterable[Cell]:
    for below, above, roots, step in _sides(cells, contrast):
        values = {
            repeat: effect
            for repeat in sorted(below.values.keys() & above.values.keys())
            if (effect := combine(below.values[repeat], above.values[repeat], below, above)) is not None
        }
        if values:
            used = {repeat: (*below.runs[repeat], *above.runs[repeat]) for repeat in values}
            yield Cell(_without(above.keys, roots), above.facts, values, used, (*above.steps, step))


def _sides(cells: Sequence[Cell], contrast: Contrast) -> Iterable[tuple[Cell, Cell, tuple[str, ...], str]]:
    """Pairs of cells that differ in the contrast only, the keys in which they may, and the two levels in words."""
    roots = RISING[contrast.rising] if contrast.rising else _roots(contrast)
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[_text([_without(cell.keys, roots), cell.steps])].append(cell)
    for members in groups.values():
        if contrast.rising:
            for below, above in _steps(members, contrast.rising):
                levels = (_shown(_level(cell, contrast.rising)) for cell in (below, above))
                yield below, above, roots, f"{contrast.rising.replace('_', ' ')} {' → '.join(levels)}"
        else:
            from_, to = contrast.from_ or {}, contrast.to or {}
            sides = ([cell for cell in members if _has(cell, level)] for level in (from_, to))
            for below, above in product(*sides):
                yield below, above, roots, f"{_side(below, roots, from_)} → {_side(above, roots, to)}"


def _steps(cells: Sequence[Cell], rising: str) -> Iterable[tuple[Cell, Cell]]:
    levels: dict[Any, list[Cell]] = defaultdict(list)
    for cell in cells:
        if (level := _level(cell, rising)) is not None:
            levels[level].append(cell)
    for low, high in pairwise(sorted(levels)):
        yield from product(levels[low], levels[high])


def _level(cell: Cell, key: str) -> Any:
    """What a cell has of a key: strategy, model and data by name."""
    if key in cell.facts:
        return cell.facts[key]
    return cell.keys.get(f"{key}.name" if key in COMPONENTS else key)


def _has(cell: Cell, level: Level) -> bool:
    return all(_level(cell, key) in (value if isinstance(value, list) else [value]) for key, value in level.items())


def _roots(contrast: Contrast) -> tuple[str, ...]:
    named = {**(contrast.from_ or {}), **(contrast.to or {})}
    return (*named, "nodes") if "devices" in named else tuple(named)


def _without(keys: dict[str, Any], roots: Iterable[str]) -> dict[str, Any]:
    """The keys that are none of these, nor below one."""
    names = frozenset(roots)
    return {
        key: value
        for key, value in keys.items()
        if not (key in names or key.partition(".")[0] in names or key.rpartition(".")[0] in names)
    }


def _side(cell: Cell, roots: Sequence[str], level: Level) -> str:
    """A side in words: "ddp × 2", "batch size 64"."""
    words = []
    if "strategy" in roots:
        words.append(f"{cell.keys['strategy.name']} × {cell.keys['devices']}")
    words += [
        f"{key.rpartition('.')[2].replace('_', ' ')} {_shown(_level(cell, key))}".replace(f"epoch {LAST}", "last epoch")
        for key in level
        if key not in ("strategy", "devices") or (key == "devices" and "strategy" not in roots)
    ]
    return " ".join(words)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _ratio(below: float, above: float, *_: Cell) -> float | None:
    return above / below if below else None


def _difference(below: float, above: float, *_: Cell) -> float | None:
    return above - below


def _efficiency(below: float, above: float, one: Cell, many: Cell) -> float | None:
    ratio = _ratio(below, above)
    return None if ratio is None else ratio * one.keys["devices"] / many.keys["devices"]


_COMBINE: dict[str, Callable[..., float | None]] = {
    "ratio": _ratio,
    "difference": _difference,
    "efficiency": _efficiency,
}
