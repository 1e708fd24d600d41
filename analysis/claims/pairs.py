"""The two sides of a claim: which runs are alike in all but what is compared, and the effect in each repeat."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from analysis.claims.cells import Cell, Reading, as_every_strategy, as_text, best, measured, without
from analysis.claims.grammar import LAST, Claim, Contrast, Level
from parallelbench.spec.mapping import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from analysis.load import Runs

    Combine = Callable[[float, float, Cell, Cell], float | None]


def effects(runs: Runs, claim: Claim) -> list[Cell]:
    """Every effect that the claim is about, each between cells that are alike in all else; only where both sides have
    a repeat in common.
    """
    return [effect for effect in _effects(runs, claim) if effect.values]


def is_unreached(runs: Runs, claim: Claim) -> bool:
    """Whether both sides were run, but no repeat of both reaches the claim's target."""
    return any(effect.missed for effect in _effects(runs, claim) if not effect.values)


def _effects(runs: Runs, claim: Claim) -> list[Cell]:
    """Also those without a value, where a run never reached the target."""
    found = measured(runs, claim)
    if any("devices" in c.roots and "strategy" not in c.roots for c in (*claim.contrasts, claim.more) if c):
        found = as_every_strategy(found)
    if claim.best_of:
        found = best(found, claim.best_of)
    found = [cell for cell in found if _has(cell, claim.where)]
    compared = []
    for contrast in claim.contrasts:
        looked_at = [cell for cell in found if cell.facts["epoch"] in claim.epochs(contrast)]
        compared += list(_compare(looked_at, contrast, _COMBINE[claim.compare]))
    if claim.more is None:
        return compared
    return list(_compare(compared, claim.more, _difference if claim.compare == "difference" else _ratio))


def _compare(cells: Sequence[Cell], contrast: Contrast, combine: Combine) -> Iterable[Cell]:
    for below, above, step in _sides(cells, contrast):
        effect = Cell(without(above.keys, contrast.roots), above.facts, steps=(*above.steps, step))
        for repeat in sorted(below.values.keys() & above.values.keys()):
            one, other = below.values[repeat], above.values[repeat]
            value, least, most = (
                combine(*values, below, above)
                for values in ((one.value, other.value), (one.most, other.least), (one.least, other.most))
            )
            if value is not None and least is not None and most is not None:
                effect.values[repeat] = Reading(value, least, most)
                effect.runs[repeat] = (*below.runs[repeat], *above.runs[repeat])
        there = [cell.values.keys() | cell.missed for cell in (below, above)]
        effect.missed.update(there[0] & there[1] & (below.missed | above.missed))
        if effect.values or effect.missed:
            yield effect


def _sides(cells: Sequence[Cell], contrast: Contrast) -> Iterable[tuple[Cell, Cell, str]]:
    """Pairs of cells that differ in the contrast only, and the two levels in words."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        epoch = None if "epoch" in contrast.roots else cell.facts["epoch"]
        groups[as_text([without(cell.keys, contrast.roots), cell.steps, epoch])].append(cell)
    for members in groups.values():
        if contrast.rising:
            for below, above in _steps(members, contrast.rising):
                levels = (_shown(_level(cell, contrast.rising)) for cell in (below, above))
                yield below, above, f"{contrast.rising.replace('_', ' ')} {' → '.join(levels)}"
        else:
            from_, to = contrast.from_ or {}, contrast.to or {}
            sides = ([cell for cell in members if _has(cell, level)] for level in (from_, to))
            for below, above in product(*sides):
                if not _same(below, above):
                    words = (_side(below, contrast.roots, from_), _side(above, contrast.roots, to))
                    yield below, above, " → ".join(words)


def _same(one: Cell, other: Cell) -> bool:
    """Whether both are one measurement: the last epoch of a run of one epoch is its first."""
    epochs = [cell.keys.get("epochs") if cell.facts["epoch"] == LAST else cell.facts["epoch"] for cell in (one, other)]
    return one.runs == other.runs and epochs[0] == epochs[1]


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


def _side(cell: Cell, roots: Sequence[str], level: Level) -> str:
    """A side in words: "ddp × 2", "batch size 64"."""
    words = []
    if "strategy" in roots:
        devices = f" × {cell.keys['devices']}" if "devices" in cell.keys else ""
        words.append(f"{cell.keys['strategy.name']}{devices}")
    words += [
        f"{key.rpartition('.')[2].replace('_', ' ')} {_shown(_level(cell, key))}".replace(f"epoch {LAST}", "last epoch")
        for key in level
        if key in roots and key != "strategy" and (key != "devices" or "strategy" not in roots)
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


_COMBINE: dict[str, Combine] = {
    "ratio": _ratio,
    "difference": _difference,
    "efficiency": _efficiency,
}
