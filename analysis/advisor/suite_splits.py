"""Which steps of the suite's own sweeps a fit sees and which it is judged by: fixed before anything was fitted.

A split names each step's group. Each group is predicted by a fit of all other groups.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from analysis.advisor.sweep_evidence import MeasuredStep

FOLDS = 5


def fold_of(step: MeasuredStep) -> str:
    """By a hash of what was asked, never of what was measured."""
    key = f"{step.work}|{step.strategy}|{step.run.devices}|{step.run.nodes}"
    return f"fold {int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % FOLDS}"


SPLITS: Mapping[str, Callable[[MeasuredStep], str]] = {
    "leave_one_strategy_out": lambda step: step.strategy,
    "leave_one_model_out": lambda step: step.run.model.name,
    "folds": fold_of,
}
"""Name of a split → the group of a step."""
ALWAYS_SEEN = {"leave_one_strategy_out": frozenset({"single"})}
"""Groups that no fit lacks and that are not judged: one device is what everybody measures first, and no strategy."""


def left_out(steps: Sequence[MeasuredStep], split: str) -> dict[str, list[int]]:
    """Group → its places, of the groups that are predicted by the others."""
    groups: dict[str, list[int]] = {}
    for place, step in enumerate(steps):
        groups.setdefault(SPLITS[split](step), []).append(place)
    seen = ALWAYS_SEEN.get(split, frozenset())
    return {name: places for name, places in groups.items() if name not in seen and len(places) < len(steps)}


def most_devices(steps: Sequence[MeasuredStep]) -> list[int]:
    """Places of the steps on the most devices; empty where all are."""
    most = max(step.run.devices for step in steps)
    found = [place for place, step in enumerate(steps) if step.run.devices == most]
    return found if len(found) < len(steps) else []
