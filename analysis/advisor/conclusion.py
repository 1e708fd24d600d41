"""What to do, and why, in one sentence; and beyond how many devices it stops to pay."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from analysis.advisor.advice import Fit, ranked
from analysis.advisor.suite_step import Phases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.advice import Objective, Row

PAYS = 0.7
"""Least scaling efficiency that is worth devices."""
WORDS = {
    "compute_s": "computation",
    "communication_s": "exposed communication",
    "bubble_s": "the bubble",
    "optimizer_s": "the update",
    "data_s": "fetching data",
    "other_s": "fixed costs",
}
"""What the phases are called."""
CAVEATS = {
    Fit.UNKNOWN: "whether it fits is not known, since the memory is not known",
    Fit.TOO_CLOSE: "whether it fits is too close to call",
}
"""What must be said of a choice that may not fit."""
GIB = 2.0**30


def chosen(rows: Sequence[Row], objective: Objective) -> Row | None:
    """The row to take: the best that fits, or may; of those that train like one device. None: there is none."""
    usable = [row for row in rows if row.trains_alike and row.fit is not Fit.TOO_LARGE]
    return ranked(usable, objective)[0] if usable else None


def best_per_devices(rows: Sequence[Row], objective: Objective) -> dict[int, Row]:
    """The best usable row of each number of devices."""
    found: dict[int, Row] = {}
    for row in ranked(rows, objective):
        if row.trains_alike and row.fit is not Fit.TOO_LARGE:
            found.setdefault(row.devices, row)
    return dict(sorted(found.items()))


def efficiency(rows: Sequence[Row]) -> dict[int, float]:
    """Throughput per device ÷ that on the fewest devices, of the fastest row of each number."""
    best = best_per_devices(rows, "time")
    if not best:
        return {}
    first = next(iter(best.values()))
    return {count: first.device_s / row.device_s for count, row in best.items()}


def sentence(rows: Sequence[Row], objective: Objective) -> str:
    """One sentence: the choice, its time, and what speaks against the others."""
    choice = chosen(rows, objective)
    if choice is None:
        return _nothing(rows)
    said = (CAVEATS.get(choice.fit), _rival(rows, choice, objective), _too_large(rows, choice), _knee(rows))
    reasons = [text for text in said if text]
    what = f"Train with {_named(choice)} on {choice.devices} device{'s' * (choice.devices > 1)}"
    how = "measured" if choice.measured else f"90 %: {_time(choice.low_s)} to {_time(choice.high_s)}"
    return f"{what}: {_time(choice.step_s)} per step ({how}); {'; '.join(reasons) or 'nothing else is possible'}."


def _nothing(rows: Sequence[Row]) -> str:
    if not rows:
        return "No layout is possible on these devices: the reasons are listed."
    alike = [row for row in rows if row.trains_alike]
    if not alike:
        return "No layout trains like one device: choose other strategies."
    # What trains alike and isn't chosen doesn't fit, so its memory is known.
    least = min(alike, key=lambda row: row.memory_bytes or 0.0)
    assert least.memory_bytes is not None
    assert least.capacity_bytes is not None
    return (
        f"Nothing fits: even {_named(least)} on {least.devices} devices needs {least.memory_bytes / GIB:.3g} GiB of "
        f"{least.capacity_bytes / GIB:.3g} on each: take more devices, a smaller batch, or recompute activations."
    )


def _named(row: Row) -> str:
    return f"{row.strategy} ({', '.join(row.options)})" if row.options else row.strategy


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _rival(rows: Sequence[Row], choice: Row, objective: Objective) -> str:
    """The best of another strategy on as many devices, and by what it loses: in a step, by which phase."""
    others = [row for row in rows if row.devices == choice.devices and row.strategy != choice.strategy]
    rival = chosen(others, objective)
    if rival is None:
        return ""
    if objective in ("memory", "energy"):
        ours_costs, theirs_costs = choice.cost(objective), rival.cost(objective)
        known = math.isfinite(ours_costs + theirs_costs)
        return f"{rival.strategy} takes {theirs_costs / ours_costs:.2f} times as much {objective}" if known else ""
    if rival.low_s <= choice.high_s and not (choice.measured and rival.measured):
        share = max(0.0, rival.step_s / choice.step_s - 1.0)
        return f"{rival.strategy} should take {100 * share:.0f} % longer, but the intervals overlap: measure both"
    ours, theirs = choice.phases, rival.phases
    slower = {each.name: getattr(theirs, each.name) - getattr(ours, each.name) for each in fields(Phases)}
    worst = max(slower, key=lambda name: slower[name])
    return f"{rival.strategy} takes {rival.step_s / choice.step_s:.2f} times as long, most of it {WORDS[worst]}"


def _too_large(rows: Sequence[Row], choice: Row) -> str:
    """A strategy that does not fit on as many devices."""
    large = [row for row in rows if row.devices == choice.devices and row.fit is Fit.TOO_LARGE]
    apart = [row for row in large if row.strategy != choice.strategy]
    least = min(apart, key=lambda row: row.memory_bytes or 0.0, default=None)
    if least is None or least.memory_bytes is None or least.capacity_bytes is None:
        return ""
    return f"{least.strategy} needs {least.memory_bytes / GIB:.3g} GiB of {least.capacity_bytes / GIB:.3g}"


def _knee(rows: Sequence[Row]) -> str:
    """From how many devices on the efficiency stays under `PAYS`, and what it is lost to."""
    found = efficiency(rows)
    paying = [count for count, share in found.items() if share >= PAYS]
    if not paying or max(paying) == max(found):
        return ""
    beyond = min(count for count in found if count > max(paying))
    row = best_per_devices(rows, "time")[beyond]
    lost = {each.name: getattr(row.phases, each.name) for each in fields(Phases) if each.name != "compute_s"}
    worst = max(lost, key=lambda name: lost[name])
    reason = WORDS[worst] if lost[worst] > 0.1 * row.step_s else "smaller pieces of work"
    return f"beyond {max(paying)} devices the efficiency is under {100 * PAYS:.0f} %, because of {reason}"
