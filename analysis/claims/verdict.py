"""Whether a claim holds in the runs at hand: reproduced, refuted or inconclusive; and what would decide it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

import msgspec
import polars as pl

from analysis import text
from analysis.claims.grammar import LEARNING, Claim, written
from analysis.claims.pairs import Cell, effects, usable
from analysis.stats import difference_interval
from analysis.stats import interval as ratio_interval
from analysis.summary import facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.load import Runs

Verdict = Literal["reproduced", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "refuted", "inconclusive")

ENOUGH_REPEATS = 6
"""Before a publication is contradicted or confirmed: with fewer, an interval rests on the shape of the noise."""


@dataclass(frozen=True)
class Case:
    """The effect in one kind of work: on one model and data set, between two levels."""

    where: str
    """Data, model and what else sets it apart from the other cases."""
    step: str
    """The levels that are compared."""
    device: str
    """What it ran on."""
    effects: tuple[tuple[int, float], ...]
    """(repeat, effect) of every repeat that both sides have."""
    low: float | None
    high: float | None
    """The interval of the effect; None with a single repeat."""
    verdict: Verdict
    lacks: str
    """What would decide it; empty where it is decided."""
    runs: tuple[str, ...]
    """The runs behind it."""
    warnings: tuple[str, ...] = ()
    """What these runs warn of."""
    also: float | None = None
    """Median effect on the claim's other metric, in the same runs."""

    @property
    def median(self) -> float:
        """Of the effects."""
        return median(effect for _, effect in self.effects)


@dataclass(frozen=True)
class Finding:
    """A claim, and what the runs say of it."""

    seed: str
    claim: Claim
    cases: tuple[Case, ...]
    verdict: Verdict
    why: str
    """In how many cases it holds; or what would decide it."""


def judge(runs: Runs, claim: Claim, *, seed: str) -> Finding:
    """Evaluate one claim."""
    found = effects(runs, claim)
    if claim.gpus_only:
        found = [cell for cell in found if cell.keys["device_type"] == "cuda"]
    others = {_identity(cell): cell for cell in _also(runs, claim)}
    labels = _labels(found)
    warnings = dict(runs.run.select("slug", "warnings").rows())
    cases = tuple(
        _case(cell, claim, where=where, also=others.get(_identity(cell)), warnings=warnings)
        for cell, where in zip(found, labels, strict=True)
    )
    verdict, why = _overall(cases) if cases else ("inconclusive", _missing(runs, claim))
    return Finding(seed, claim, cases, verdict, why)


def _also(runs: Runs, claim: Claim) -> list[Cell]:
    return effects(runs, msgspec.structs.replace(claim, metric=claim.also, also=None)) if claim.also else []


def _identity(cell: Cell) -> str:
    return msgspec.json.encode([cell.keys, cell.steps], order="sorted").decode()


def _case(cell: Cell, claim: Claim, *, where: str, also: Cell | None, warnings: Mapping[str, str | None]) -> Case:
    values = tuple(cell.values.values())
    slugs = tuple(dict.fromkeys(slug for used in cell.runs.values() for slug in used))
    of = ratio_interval if claim.compare != "difference" and min(values) > 0 else difference_interval
    low, high = of(values) or (None, None)
    verdict, lacks = decide(values, (low, high) if low is not None and high is not None else None, claim.expect.region)
    return Case(
        where=where,
        step=", by ".join(cell.steps),
        device=str(cell.keys.get("device_name") or cell.keys.get("device_type")),
        effects=tuple(cell.values.items()),
        low=low,
        high=high,
        verdict=verdict,
        lacks=lacks,
        runs=slugs,
        warnings=tuple(dict.fromkeys(warning for slug in slugs if (warning := warnings[slug]))),
        also=median(also.values.values()) if also else None,
    )


def decide(
    values: Sequence[float], interval: tuple[float, float] | None, region: tuple[float, float]
) -> tuple[Verdict, str]:
    """The verdict on an effect, and what would decide it where nothing does.

    Reproduced: the interval lies in the region. Refuted: it lies outside. Fewer than `ENOUGH_REPEATS` decide nothing.
    """
    if interval is None or len(values) < ENOUGH_REPEATS:
        return "inconclusive", f"{text.repeats(len(values))} of {ENOUGH_REPEATS}: sweep.repeats={ENOUGH_REPEATS}"
    low, high = region
    if low < interval[0] and interval[1] < high:
        return "reproduced", ""
    if interval[1] <= low or interval[0] >= high:
        return "refuted", ""
    return "inconclusive", _more_repeats(values, interval, region)


def _more_repeats(values: Sequence[float], interval: tuple[float, float], region: tuple[float, float]) -> str:
    """How many repeats it would take if the median stayed, as intervals narrow with the root of their number."""
    middle = median(values)
    edge = min(region, key=lambda bound: abs(middle - bound))
    reach = interval[1] - middle if edge > middle else middle - interval[0]
    needed = len(values) * (reach / abs(middle - edge)) ** 2 if middle != edge else float("inf")
    holds = f"the interval holds {edge:g}"
    if needed > 100:
        return f"{holds}, too near the median for any feasible number of repeats"
    return f"{holds}: about {max(len(values) + 1, round(needed + 0.5))} repeats, should the median stay"


def _overall(cases: Sequence[Case]) -> tuple[Verdict, str]:
    """All cases with repeats enough agree, or the claim as a whole is open."""
    enough = [case for case in cases if len(case.effects) >= ENOUGH_REPEATS]
    judged = enough or cases
    few = f"{len(cases) - len(judged)} more with too few repeats" if len(judged) < len(cases) else ""
    counts = {verdict: sum(case.verdict == verdict for case in judged) for verdict in VERDICTS}
    for verdict in ("reproduced", "refuted"):
        if counts[verdict] == len(judged):
            return verdict, few
    lacks = next((case.lacks for case in judged if case.lacks), "it depends on the work")
    if len(cases) == 1:
        return "inconclusive", lacks
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "inconclusive", "; ".join(filter(None, [f"{tally} of {len(judged)} cases", few, lacks]))


def _missing(runs: Runs, claim: Claim) -> str:
    """Why there is nothing to compare, and what has to be run."""
    if claim.gpus_only and facts(runs).filter(pl.col("device_type") == "cuda").is_empty():
        return f"can't be decided on CPUs: {claim.gpus_only}; it needs sweep={claim.sweep} on GPUs"
    with_all = f" {written(claim.where)}" if claim.where else ""
    sides = "; or ".join(map(str, claim.contrasts)) + (f"; and with {claim.more}" if claim.more else "")
    lacks = f"needs runs of the same work{with_all} with {sides}; {ENOUGH_REPEATS} repeats each: sweep={claim.sweep}"
    return lacks + _left_out(runs, claim)


def _left_out(runs: Runs, claim: Claim) -> str:
    gone = facts(runs).join(usable(runs, claim).select("run_id"), on="run_id", how="anti")
    reasons = gone["left_out"].drop_nulls().str.split(":").list.first().unique(maintain_order=True)
    if claim.metric in LEARNING or reasons.is_empty():
        return ""
    return f" ({gone.height} runs are left out: {text.listed(reasons.to_list())})"


def _labels(cells: Sequence[Cell]) -> list[str]:
    """Data and model of each effect, and the keys in which it differs from others of the same."""
    names = {key for cell in cells for key in cell.keys} - {"data.name", "model.name"}
    varying = [
        key for key in sorted(names) if len({str(cell.keys.get(key)) for cell in cells}) > 1 and not _option(key, cells)
    ]
    return [" · ".join(_label(cell, varying)) for cell in cells]


def _label(cell: Cell, varying: Sequence[str]) -> list[str]:
    keys = cell.keys
    label = [str(keys[key]) for key in ("data.name", "model.name") if key in keys]
    ways = {"strategy.name", "devices"}
    if ways <= keys.keys() and ways & set(varying):
        label.append(f"{keys['strategy.name']} × {keys['devices']}")
        varying = [key for key in varying if key not in ways]
    return label + [_short(key, keys[key]) for key in varying if key in keys]


def _option(key: str, cells: Sequence[Cell]) -> bool:
    """Whether a component's option varies only because the component does."""
    component = key.partition(".")[0]
    name = f"{component}.name"
    if key == name or not any(name in cell.keys for cell in cells):
        return False
    by_name: dict[str, set[str]] = {}
    for cell in cells:
        if name in cell.keys and key in cell.keys:
            by_name.setdefault(cell.keys[name], set()).add(str(cell.keys[key]))
    return all(len(values) == 1 for values in by_name.values())


def _short(key: str, value: object) -> str:
    parent, _, last = key.rpartition(".")
    return f"{(parent if last == 'name' else last).replace('_', ' ')} {value}"
