"""Which layouts to measure next within a budget of device-hours, and the sweep that measures them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from analysis.advisor.advice import Fit, chosen, one_each, ranked
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.advice import Objective, Row


START_S = 60.0
"""What a run takes besides its training, checks and evaluation included: an assumption."""
EPOCHS, STEPS, REPEATS = 3, 200, 3
"""Of a proposed run: short, since a step is what must be known."""
MOST_RUNS = 12
"""Configurations that are proposed at once."""


@dataclass(frozen=True)
class Proposal:
    """Rows to measure, and what that costs."""

    rows: list[Row]
    device_s: float
    """Devices × seconds of all runs together, repeats included."""
    left_out: int
    """Rows that the budget leaves out."""


def cost_s(row: Row) -> float:
    """Devices × seconds of measuring a row."""
    steps = min(STEPS, row.steps_per_epoch or STEPS)
    return REPEATS * row.devices * (START_S + EPOCHS * steps * row.high_s)


def proposed(rows: Sequence[Row], objective: Objective, *, budget_s: float, most_devices: int | None) -> Proposal:
    """Rows whose interval reaches below the best's upper end, best first; before them the cheapest run of one device.

    One device is the baseline of every comparison. Raises `ConfigError` where the budget is under the cheapest run.
    """
    usable = [row for row in rows if row.fit is not Fit.TOO_LARGE and row.trains_alike]
    usable = [row for row in usable if most_devices is None or row.devices <= most_devices]
    open_rows = [row for row in usable if not row.measured and _may_be_best(row, usable, objective)]
    base = min((row for row in usable if row.devices == 1 and not row.measured), key=cost_s, default=None)
    order = ([base] if base else []) + [row for row in one_each(ranked(open_rows, objective)) if row is not base]
    if not order:
        return Proposal([], 0.0, 0)
    taken: list[Row] = []
    spent = 0.0
    for row in order[:MOST_RUNS]:
        if spent + cost_s(row) <= budget_s:
            taken.append(row)
            spent += cost_s(row)
    if not taken:
        cheapest = min(map(cost_s, order))
        raise ConfigError(
            f"--budget {budget_s / 3600:.3g}h is under the cheapest run that would tell something: "
            f"{cheapest / 3600:.3g} device-hours; give at least --budget {_up(cheapest / 3600):g}h"
        )
    return Proposal(taken, spent, len(order) - len(taken))


def _up(hours: float) -> float:
    """The number rounded up to one decimal, or to hundredths where it is small."""
    digits = 1 if hours >= 0.1 else 3
    return float(round(hours + 0.5 * 10.0**-digits, digits))


def _may_be_best(row: Row, rows: Sequence[Row], objective: Objective) -> bool:
    """Whether its interval reaches below the upper end of the best row's on as many devices."""
    best = chosen([each for each in rows if each.devices == row.devices], objective)
    return best is None or row.cost_ends(objective)[0] <= best.cost_ends(objective)[1]


def sweep_of(proposal: Proposal, overrides: Sequence[tuple[str, Any]], *, name: str) -> dict[str, Any]:
    """A sweep file's content: one block per row, with what was asked for."""
    common = dict(overrides) | {"epochs": EPOCHS, "measure.attribution_steps": 20}
    blocks = []
    for row in proposal.rows:
        grid: dict[str, Any] = common | {"strategy": row.strategy, "devices": row.devices, "nodes": row.nodes}
        for option in row.options:
            key, _, value = option.partition("=")
            grid[key] = yaml.safe_load(value)
        if (row.steps_per_epoch or STEPS) > STEPS:
            grid["measure.steps_per_epoch"] = STEPS
        blocks.append({"grid": {key: [value] for key, value in grid.items()}})
    return {"name": name, "repeats": REPEATS, "order": "interleaved", "blocks": blocks}
