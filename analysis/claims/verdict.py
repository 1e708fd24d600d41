"""Whether a claim holds in the runs at hand: reproduced, refuted or inconclusive; and what would decide it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Literal

import msgspec
import polars as pl

from analysis import text
from analysis.claims.contrasts import effects, is_unreached
from analysis.claims.effects import Effect, usable
from analysis.claims.grammar import EPOCH_COLUMNS, LEARNING, Claim, Expect, written
from analysis.claims.validity import blockers, caveats
from analysis.comparison.policy import canonical
from analysis.configurations import facts
from analysis.stats import difference_interval
from analysis.stats import interval as ratio_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.reader import Runs

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
    """The interval of the effect; None with a single repeat. Steps and time to an accuracy are known to an epoch: it
    reaches from the least to the most that they may be.
    """
    verdict: Verdict
    lacks: str
    """What would decide it; empty where it is decided."""
    runs: tuple[str, ...]
    """The runs behind it."""
    warnings: tuple[str, ...] = ()
    """The warnings of these runs, and the caveats of comparing them."""
    missed: int = 0
    """Further repeats of both sides, without an effect since a run never reached the target."""
    also: float | None = None
    """Median effect on the claim's other metric, in the same runs."""

    @property
    def median(self) -> float:
        """Of the effects."""
        return median(effect for _, effect in self.effects)

    @property
    def enough(self) -> bool:
        """Whether there are repeats enough to contradict or confirm."""
        return len(self.effects) + self.missed >= ENOUGH_REPEATS


@dataclass(frozen=True)
class Judgement:
    """A claim and its verdict in these runs."""

    seed: str
    claim: Claim
    cases: tuple[Case, ...]
    verdict: Verdict
    why: str
    """In how many cases it holds, or what would decide it."""


def judge(runs: Runs, claim: Claim, *, seed: str) -> Judgement:
    """Evaluate one claim."""
    compared = effects(runs, claim)
    if claim.gpus_only:
        compared = [effect for effect in compared if effect.keys["device_type"] == "cuda"]
    others = {_identity(effect): effect for effect in _also(runs, claim)}
    cases = tuple(
        _case(runs, effect, claim, where=where, also=others.get(_identity(effect)))
        for effect, where in zip(compared, _labels(compared), strict=True)
    )
    verdict, why = _overall(cases, claim) if cases else ("inconclusive", _missing(runs, claim))
    return Judgement(seed, claim, cases, verdict, why)


def _also(runs: Runs, claim: Claim) -> list[Effect]:
    if not claim.also:
        return []
    epoch = claim.epoch if claim.also in EPOCH_COLUMNS else None
    return effects(runs, msgspec.structs.replace(claim, metric=claim.also, also=None, target=None, epoch=epoch))


def _identity(effect: Effect) -> str:
    return canonical([effect.keys, effect.steps])


def _case(runs: Runs, effect: Effect, claim: Claim, *, where: str, also: Effect | None) -> Case:
    known = _known(runs)
    ids = dict.fromkeys(run_id for used in effect.runs.values() for run_id in used)
    warnings = [known[run_id][1] for run_id in ids] + list(map(str, caveats(runs, claim, effect)))
    interval = _interval(effect, claim)
    verdict, lacks = _decided(runs, effect, claim, interval)
    low, high = interval or (None, None)
    return Case(
        where=where,
        step=", by ".join(effect.steps),
        device=str(effect.keys.get("device_name") or effect.keys.get("device_type")),
        effects=tuple((repeat, reading.value) for repeat, reading in effect.values.items()),
        low=low,
        high=high,
        verdict=verdict,
        lacks=lacks,
        runs=tuple(known[run_id][0] for run_id in ids),
        warnings=tuple(dict.fromkeys(filter(None, warnings))),
        missed=len(effect.missed),
        also=median(reading.value for reading in also.values.values()) if also else None,
    )


def _decided(runs: Runs, effect: Effect, claim: Claim, interval: tuple[float, float] | None) -> tuple[Verdict, str]:
    """The verdict on an effect, and what would decide it where nothing does."""
    if forbidden := blockers(runs, claim, effect):
        return "inconclusive", "; ".join(map(str, forbidden))
    values = [reading.value for reading in effect.values.values()]
    verdict, lacks = decide(values, interval, claim.expect)
    if verdict == "inconclusive" and decide(values, _ends(values, claim), claim.expect)[0] != "inconclusive":
        lacks = "accuracy is measured too seldom: fewer measure.steps_per_epoch"
    return verdict, lacks


@lru_cache(maxsize=8)
def _known(runs: Runs) -> dict[str, tuple[str, str | None]]:
    """Run id → its folder's name, and what it warns of."""
    return {run_id: (slug, warned) for run_id, slug, warned in runs.run.select("run_id", "slug", "warnings").rows()}


def _interval(effect: Effect, claim: Claim) -> tuple[float, float] | None:
    """From the lower end of the least that the effects may be to the upper end of the most."""
    least = _ends([reading.least for reading in effect.values.values()], claim)
    most = _ends([reading.most for reading in effect.values.values()], claim)
    return (least[0], most[1]) if least and most else None


def _ends(values: Sequence[float], claim: Claim) -> tuple[float, float] | None:
    of = ratio_interval if claim.compare != "difference" and min(values) > 0 else difference_interval
    return of(tuple(values))


def decide(values: Sequence[float], interval: tuple[float, float] | None, expect: Expect) -> tuple[Verdict, str]:
    """The verdict on an effect, and what would decide it where nothing does.

    Reproduced: the interval lies in the region. Refuted: it lies beyond the bound, on the other side. What lies between
    is too small to count, either way. Fewer than `ENOUGH_REPEATS` decide nothing.
    """
    if interval is None or len(values) < ENOUGH_REPEATS:
        return "inconclusive", f"{text.repeats(len(values))} of {ENOUGH_REPEATS}: sweep.repeats={ENOUGH_REPEATS}"
    if expect.region[0] < interval[0] and interval[1] < expect.region[1]:
        return "reproduced", ""
    if interval[1] <= expect.open[0] or interval[0] >= expect.open[1]:
        return "refuted", ""
    return "inconclusive", _undecided(values, interval, expect)


def _undecided(values: Sequence[float], interval: tuple[float, float], expect: Expect) -> str:
    bounds = sorted({*expect.region, *expect.open})
    held = [bound for bound in bounds if interval[0] <= bound <= interval[1]]
    if not held:  # it lies between the bound and what counts
        return f"the difference is below what counts ({expect.by:g})"
    return _more_repeats(len(values), median(values), interval, held)


def _more_repeats(n: int, middle: float, interval: tuple[float, float], held: Sequence[float]) -> str:
    """How many repeats it would take if the median stayed, as intervals narrow with the root of their number."""
    needed = max(_repeats_to_leave(edge, n, middle, interval) for edge in held)
    holds = f"the interval holds {text.listed([f'{edge:g}' for edge in held])}"
    if needed > 100:
        return f"{holds}, too near the median for any feasible number of repeats"
    return f"{holds}: about {max(n + 1, round(needed + 0.5))} repeats, should the median stay"


def _repeats_to_leave(edge: float, n: int, middle: float, interval: tuple[float, float]) -> float:
    reach = interval[1] - middle if edge > middle else middle - interval[0]
    return n * (reach / abs(middle - edge)) ** 2 if middle != edge else float("inf")


def _overall(cases: Sequence[Case], claim: Claim) -> tuple[Verdict, str]:
    """All cases with repeats enough agree, or the claim as a whole is open."""
    judged = [case for case in cases if case.enough] or cases
    few = f"{len(cases) - len(judged)} more with too few repeats" if len(judged) < len(cases) else ""
    verdicts = _together(judged, claim) if claim.together else [case.verdict for case in judged]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    for verdict in ("reproduced", "refuted"):
        if counts[verdict] == len(verdicts):
            return verdict, few
    whole = f"it takes {'; and '.join(map(str, claim.contrasts))}"
    open_ = "it depends on the work" if counts["refuted"] else whole
    lacks = next((case.lacks for case in judged if case.lacks), open_)
    if len(cases) == 1:
        return "inconclusive", lacks
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    of = f"{tally} of {len(verdicts)} {'kinds of work' if claim.together else 'cases'}"
    return "inconclusive", "; ".join(filter(None, [of, few, lacks]))


def _together(cases: Sequence[Case], claim: Claim) -> list[Verdict]:
    """One verdict per kind of work, over all contrasts."""
    works: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        works[case.where].append(case)
    verdicts: list[Verdict] = []
    for found in works.values():
        shown = {case.verdict for case in found}
        whole = shown == {"reproduced"} and len({case.step for case in found}) == len(claim.contrasts)
        verdicts.append("refuted" if "refuted" in shown else "reproduced" if whole else "inconclusive")
    return verdicts


def _missing(runs: Runs, claim: Claim) -> str:
    """Why there is nothing to compare, and what has to be run."""
    if claim.gpus_only and facts(runs).filter(pl.col("device_type") == "cuda").is_empty():
        return f"can't be decided on CPUs: {claim.gpus_only}; it needs {_sweeps(claim)} on GPUs"
    if is_unreached(runs, claim):
        return f"no repeat of both sides reaches {claim.target:g}: more epochs, or another optimizer, would have to"
    with_all = f" {written(claim.where)}" if claim.where else ""
    sides = "; or ".join(map(str, claim.contrasts)) + (f"; and with {claim.more}" if claim.more else "")
    lacks = f"needs runs of the same work{with_all} with {sides}; {ENOUGH_REPEATS} repeats each: {_sweeps(claim)}"
    return lacks + _excluded(runs, claim)


def _sweeps(claim: Claim) -> str:
    return " and ".join(f"sweep={name}" for name in claim.sweeps)


def _excluded(runs: Runs, claim: Claim) -> str:
    gone = facts(runs).join(usable(runs, claim).select("run_id"), on="run_id", how="anti")
    exclusions = gone["exclusion"].drop_nulls().unique(maintain_order=True)
    if claim.metric in LEARNING or exclusions.is_empty():
        return ""
    return f" ({gone.height} runs don't count: {text.listed(exclusions.to_list())})"


def _labels(compared: Sequence[Effect]) -> list[str]:
    """Data and model of each effect, and the keys in which it differs from others of the same."""
    names = {key for effect in compared for key in effect.keys} - {"data.name", "model.name"}
    varying = [
        key
        for key in sorted(names)
        if len({str(effect.keys.get(key)) for effect in compared}) > 1 and not _option(key, compared)
    ]
    return [" · ".join(_label(effect, varying)) for effect in compared]


def _label(effect: Effect, varying: Sequence[str]) -> list[str]:
    keys = effect.keys
    label = [str(keys[key]) for key in ("data.name", "model.name") if key in keys]
    ways = {"strategy.name", "devices"}
    if ways <= keys.keys() and ways & set(varying):
        label.append(f"{keys['strategy.name']} × {keys['devices']}")
        varying = [key for key in varying if key not in ways]
    return label + [_short(key, keys[key]) for key in varying if key in keys]


def _option(key: str, compared: Sequence[Effect]) -> bool:
    """Whether a component's option varies only because the component does."""
    component = key.partition(".")[0]
    name = f"{component}.name"
    if key == name or not any(name in effect.keys for effect in compared):
        return False
    by_name: dict[str, set[str]] = {}
    for effect in compared:
        if name in effect.keys and key in effect.keys:
            by_name.setdefault(effect.keys[name], set()).add(str(effect.keys[key]))
    return all(len(values) == 1 for values in by_name.values())


def _short(key: str, value: object) -> str:
    parent, _, last = key.rpartition(".")
    return f"{(parent if last == 'name' else last).replace('_', ' ')} {value}"
