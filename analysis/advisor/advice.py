"""What the advisor answers with: a row per layout, one sentence, and which layouts to measure next within a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import yaml

from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.layouts import Impossible
    from analysis.advisor.step import Phases


Objective = Literal["time", "energy", "gpu_hours", "memory"]
"""What the best layout has least of: time per epoch, energy, devices × hours, or memory per device."""


class Fit(StrEnum):
    """Whether a layout fits into a device's memory; the best first."""

    FITS = "fits"
    TOO_CLOSE = "too close to call"
    UNKNOWN = "not known"
    TOO_LARGE = "does not fit"


MEMORY_MARGIN = 0.15
"""How far predicted peaks may be off, an assumption that holds torchtitan's six figures; within it nobody can say."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout on so many devices, predicted, or measured where there was a measurement."""

    strategy: str
    options: tuple[str, ...]
    """Overrides that make it: `strategy.tensor=2`."""
    devices: int
    nodes: int
    phases: Phases[float]
    low_s: float
    high_s: float
    """Ends of the 90 % interval of a step."""
    samples_per_step: int
    steps_per_epoch: int | None
    """None: the size of the data is not known."""
    memory_bytes: float | None
    """Predicted peak of the fullest device."""
    capacity_bytes: float | None
    """Memory of a device, less what libraries take."""
    mfu: float | None
    """Model FLOPs ÷ what the devices can do by the data sheet; None: no peak is known."""
    power_w: float | None
    """Of one device while it trains; None: never measured."""
    measured: bool
    """Whether the step was measured instead of predicted."""
    extrapolates: tuple[str, ...]
    """In which respects nothing measured is like it."""
    trains_alike: bool = True
    """Whether it computes the same as one device; others are never advised."""

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.phases.step_s

    @property
    def epoch_s(self) -> float | None:
        """Time of an epoch."""
        return None if self.steps_per_epoch is None else self.step_s * self.steps_per_epoch

    @property
    def samples_per_s(self) -> float:
        """Throughput of all devices."""
        return self.samples_per_step / self.step_s

    @property
    def device_s(self) -> float:
        """Devices × seconds per sample."""
        return self.devices / self.samples_per_s

    @property
    def energy_j(self) -> float | None:
        """Per sample."""
        return None if self.power_w is None else self.power_w * self.device_s

    @property
    def fit(self) -> Fit:
        """Whether it fits into memory."""
        if self.memory_bytes is None or self.capacity_bytes is None:
            return Fit.UNKNOWN
        if self.capacity_bytes <= 0:  # libraries alone take more
            return Fit.TOO_LARGE
        share = self.memory_bytes / self.capacity_bytes
        if abs(share - 1.0) <= MEMORY_MARGIN:
            return Fit.TOO_CLOSE
        return Fit.FITS if share < 1.0 else Fit.TOO_LARGE

    @property
    def usable(self) -> bool:
        """Whether it may be advised: it trains like one device, and may fit."""
        return self.trains_alike and self.fit is not Fit.TOO_LARGE

    def cost(self, objective: Objective) -> float:
        """What an objective minimises, per sample; a number that isn't known is infinite."""
        found = {
            "time": 1.0 / self.samples_per_s,
            "gpu_hours": self.device_s,
            "energy": self.energy_j,
            "memory": self.memory_bytes,
        }[objective]
        return float("inf") if found is None else found

    def cost_ends(self, objective: Objective) -> tuple[float, float]:
        """Ends of the cost's interval: memory has its own, all others follow from the step's."""
        cost = self.cost(objective)
        if objective == "memory":
            return (1.0 - MEMORY_MARGIN) * cost, (1.0 + MEMORY_MARGIN) * cost
        return cost * self.low_s / self.step_s, cost * self.high_s / self.step_s

    def as_dict(self) -> dict[str, Any]:
        """For programs: seconds, bytes, joules, shares; null where not known."""
        steps = self.steps_per_epoch
        per_epoch = None if steps is None else steps * self.samples_per_step
        hours = None if per_epoch is None else self.device_s * per_epoch / 3600.0
        energy_j = None if per_epoch is None or self.energy_j is None else self.energy_j * per_epoch
        memory = (None, None) if self.memory_bytes is None else self.cost_ends("memory")
        slower, faster = self.high_s / self.step_s, self.low_s / self.step_s
        return {
            "strategy": self.strategy,
            "options": list(self.options),
            "devices": self.devices,
            "nodes": self.nodes,
            "step_s": self.step_s,
            "step_low_s": self.low_s,
            "step_high_s": self.high_s,
            "epoch_s": self.epoch_s,
            "epoch_low_s": None if steps is None else steps * self.low_s,
            "epoch_high_s": None if steps is None else steps * self.high_s,
            **_with_ends("samples_per_s", self.samples_per_s, 1.0 / slower, 1.0 / faster),
            **_with_ends("mfu", self.mfu, 1.0 / slower, 1.0 / faster),
            "memory_bytes": self.memory_bytes,
            "memory_low_bytes": memory[0],
            "memory_high_bytes": memory[1],
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fit,
            **_with_ends("device_hours_per_epoch", hours, faster, slower),
            **_with_ends("energy_per_epoch_j", energy_j, faster, slower),
            "phases": dict(vars(self.phases)),
            "measured": self.measured,
            "extrapolates": list(self.extrapolates),
            "trains_alike": self.trains_alike,
        }


def _with_ends(name: str, value: float | None, low: float, high: float) -> dict[str, float | None]:
    """A figure that follows from the step's time, with the ends of its interval, which are factors of it."""
    ends = (None, None) if value is None else (low * value, high * value)
    return {name: value, f"{name}_low": ends[0], f"{name}_high": ends[1]}


def ranked(rows: Sequence[Row], objective: Objective) -> list[Row]:
    """Best first; what fits goes before what may, what may before what doesn't; who trains otherwise stands last."""
    order = list(Fit)
    return sorted(rows, key=lambda row: (not row.trains_alike, order.index(row.fit), row.cost(objective)))


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
COUNTED: dict[Objective, str] = {"time": "time", "gpu_hours": "time", "energy": "energy", "memory": "memory"}
"""What an objective counts, of equally many devices."""
GIB = 2.0**30


def chosen(rows: Sequence[Row], objective: Objective) -> Row | None:
    """The row to take: the best that fits, or may; of those that train like one device. None: there is none."""
    return next((row for row in ranked(rows, objective) if row.usable), None)


def one_each(rows: Sequence[Row]) -> list[Row]:
    """The first row of each strategy on each number of devices, in the order of the rows."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        found.setdefault((row.strategy, row.devices), row)
    return list(found.values())


def fastest(rows: Sequence[Row]) -> dict[int, Row]:
    """The best usable row of each number of devices."""
    best = {row.devices: row for row in reversed(ranked(rows, "time")) if row.usable}
    return dict(sorted(best.items()))


def efficiency(rows: Sequence[Row]) -> dict[int, float]:
    """Throughput per device ÷ that on the fewest devices, of the fastest row of each number."""
    best = fastest(rows)
    return {count: best[min(best)].device_s / row.device_s for count, row in best.items()}


def sentence(rows: Sequence[Row], objective: Objective, impossible: Sequence[Impossible] = ()) -> str:
    """One sentence: the choice, its time, and what speaks against the others."""
    choice = chosen(rows, objective)
    if choice is None:
        return nothing(rows, impossible)
    reasons = [*doubts(rows, choice, objective), *limits(rows, choice)]
    return f"{what_to_do(choice)} ({how_long(choice)}); {'; '.join(reasons) or 'nothing else is possible'}."


def what_to_do(choice: Row) -> str:
    """The choice, its time and its memory."""
    memory = "" if choice.memory_bytes is None else f", {size_of(choice.memory_bytes)} of memory on each"
    where = count_of(choice.devices, "device")
    return f"Train with {_named(choice)} on {where}: {_time(choice.step_s)} per step{memory}"


def how_long(choice: Row) -> str:
    """Between which times a step lies."""
    return "measured" if choice.measured else f"90 %: {_time(choice.low_s)} to {_time(choice.high_s)}"


def doubts(rows: Sequence[Row], choice: Row, objective: Objective) -> list[str]:
    """What speaks against the choice: its memory, and the best of another strategy."""
    said = CAVEATS.get(choice.fit), _rival(rows, choice, objective), _faster(rows, choice, objective)
    return [text for text in said if text]


def limits(rows: Sequence[Row], choice: Row) -> list[str]:
    """What does not fit, and where more devices stop to pay."""
    return [text for text in (_too_large(rows, choice), _knee(rows, choice)) if text]


def nothing(rows: Sequence[Row], impossible: Sequence[Impossible] = ()) -> str:
    """Why no row can be chosen; `impossible`: what there is no row for."""
    if not rows and (unknown := list(dict.fromkeys(each.strategy for each in impossible if each.trains))):
        return f"No formula predicts {', '.join(unknown)} here, which can be trained: measure it with `submit`."
    if not rows:
        return "No layout is possible on these devices: the reasons are listed."
    alike = [row for row in rows if row.trains_alike]
    if not alike:
        return "No layout trains like one device: choose other strategies."
    # What trains alike and isn't chosen doesn't fit, so its memory is known.
    least = min(alike, key=lambda row: row.memory_bytes or 0.0)
    return (
        f"Nothing fits: even {_named(least)} on {least.devices} devices needs {_of_capacity(least)} on each: take more "
        "devices, a smaller batch, or recompute activations."
    )


def _of_capacity(row: Row) -> str:
    """The memory that a row needs, of what there is; both are known of a row that doesn't fit."""
    assert row.memory_bytes is not None
    assert row.capacity_bytes is not None
    return f"{row.memory_bytes / GIB:.3g} GiB of {max(row.capacity_bytes, 0.0) / GIB:.3g}"


def size_of(size_bytes: float) -> str:
    """ "1.5 GiB", "20.4 MiB"."""
    return f"{size_bytes / GIB:.3g} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:,.1f} MiB"


def _named(row: Row) -> str:
    return f"{row.strategy} ({', '.join(row.options)})" if row.options else row.strategy


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _rival(rows: Sequence[Row], choice: Row, objective: Objective) -> str:
    """The best of another strategy on as many devices, and by what it loses: in a step, by which phase."""
    others = [row for row in rows if row.devices == choice.devices and row.strategy != choice.strategy]
    rival = chosen([row for row in others if not _clearly_less(row, choice, objective)], objective)
    if rival is None:
        return ""
    if objective in ("memory", "energy"):
        ours_costs, theirs_costs = choice.cost(objective), rival.cost(objective)
        known = math.isfinite(ours_costs + theirs_costs)
        return f"{rival.strategy} takes {theirs_costs / ours_costs:.2f} times as much {objective}" if known else ""
    times = rival.step_s / choice.step_s
    if rival.low_s <= choice.high_s and not (choice.measured and rival.measured):
        if times < 1.005:
            return f"{rival.strategy} is as fast, as far as can be told: measure both"
        return f"{rival.strategy} should take {times:.2f} times as long, but the intervals overlap: measure both"
    ours, theirs = vars(choice.phases), vars(rival.phases)
    worst = max(ours, key=lambda name: theirs[name] - ours[name])
    return f"{rival.strategy} takes {times:.2f} times as long, most of it {WORDS[worst]}"


def _faster(rows: Sequence[Row], choice: Row, objective: Objective) -> str:
    """What would be better than the choice on as many devices, if only it was known to fit."""
    unsure = [row for row in rows if row.devices == choice.devices and row.fit in (Fit.TOO_CLOSE, Fit.UNKNOWN)]
    better = [row for row in unsure if row.trains_alike and _clearly_less(row, choice, objective)]
    best = min(better, key=lambda row: row.cost(objective), default=None)
    if best is None:
        return ""
    share = best.cost(objective) / choice.cost(objective)
    return f"{_named(best)} would take {share:.2f} times as much {COUNTED[objective]}, but {CAVEATS[best.fit]}"


def _clearly_less(row: Row, choice: Row, objective: Objective) -> bool:
    return row.cost_ends(objective)[1] < choice.cost_ends(objective)[0]


def _too_large(rows: Sequence[Row], choice: Row) -> str:
    """A strategy that does not fit on as many devices."""
    others = [row for row in rows if row.devices == choice.devices and row.strategy != choice.strategy]
    large = [row for row in others if row.fit is Fit.TOO_LARGE]
    least = min(large, key=lambda row: row.memory_bytes or 0.0, default=None)
    return "" if least is None else f"{least.strategy} needs {_of_capacity(least)}"


def _knee(rows: Sequence[Row], choice: Row) -> str:
    """From how many devices on the efficiency stays under `PAYS`, and what it is lost to.

    Where the choice is beyond that: how much its own number of devices has.
    """
    found = efficiency(rows)
    paying = [count for count, share in found.items() if share >= PAYS]
    if not paying or max(paying) == max(found):
        return ""
    chosen_so = choice.devices > max(paying)
    beyond = choice.devices if chosen_so else min(count for count in found if count > max(paying))
    row = fastest(rows)[beyond]
    lost = {name: part_s for name, part_s in vars(row.phases).items() if name != "compute_s"}
    worst = max(lost, key=lambda name: lost[name])
    reason = WORDS[worst] if lost[worst] > 0.1 * row.step_s else "smaller pieces of work"
    if chosen_so:
        return f"the efficiency of {count_of(beyond, 'device')} is {100 * found[beyond]:.0f} %, because of {reason}"
    return f"beyond {count_of(max(paying), 'device')} the efficiency is under {100 * PAYS:.0f} %, because of {reason}"


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
    usable = [row for row in rows if row.usable and (most_devices is None or row.devices <= most_devices)]
    open_rows = [row for row in usable if not row.measured and _may_be_best(row, usable, objective)]
    base = min((row for row in usable if row.devices == 1 and not row.measured), key=cost_s, default=None)
    order = ([base] if base else []) + [row for row in one_each(ranked(open_rows, objective)) if row is not base]
    taken: list[Row] = []
    spent = 0.0
    for row in order[:MOST_RUNS]:
        if spent + cost_s(row) <= budget_s:
            taken.append(row)
            spent += cost_s(row)
    if order and not taken:
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
        options = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in row.options)}
        grid = common | {"strategy": row.strategy, "devices": row.devices, "nodes": row.nodes} | options
        if (row.steps_per_epoch or STEPS) > STEPS:
            grid["measure.steps_per_epoch"] = STEPS
        blocks.append({"grid": {key: [value] for key, value in grid.items()}})
    return {"name": name, "repeats": REPEATS, "order": "interleaved", "blocks": blocks}
