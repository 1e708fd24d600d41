"""Whether a claim holds in the runs at hand: reproduced, refuted or inconclusive; and what would decide it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from analysis import text
from analysis.claims.contrasts import effects, is_unreached, labels
from analysis.claims.decision import VERDICTS, Verdict, decide, verdict_on
from analysis.claims.effects import Effect, usable
from analysis.claims.grammar import EPOCH_COLUMNS, LEARNING, OF_SAMPLES, Claim, written
from analysis.comparison.compared_run import compared_runs
from analysis.comparison.pairing import Pairing, RepeatPair
from analysis.comparison.policy import Blocker, Issue
from analysis.comparison.work import canonical
from analysis.configurations import facts
from analysis.metrics import resting_on_disturbed
from analysis.stats import ENOUGH_REPEATS, ERROR, Ends, difference_interval, error_of_each, ratio_median
from analysis.stats import interval as ratio_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.reader import Runs


@dataclass(frozen=True)
class Case:
    """The effect in one kind of work: on one model and data set, between two levels."""

    where: str
    """Data, model and the other keys in which it differs from the other cases."""
    step: str
    """The levels that are compared."""
    device: str
    """The device that it was measured on."""
    effects: tuple[tuple[int, float], ...]
    """(repeat, effect) of every repeat that both sides have."""
    median: float
    """Of the effects; in logarithms where they are ratios."""
    low: float | None
    high: float | None
    """The interval of the effect; None with too few repeats, or where the sides were not interleaved. Steps and time to
    an accuracy are known to an epoch only, so the interval reaches from their least to their largest possible value.
    """
    verdict: Verdict
    lacks: str
    """What is missing for a verdict; empty where there is one."""
    runs: tuple[str, ...]
    """The runs behind it."""
    warnings: tuple[str, ...] = ()
    """The warnings of these runs, and the caveats of comparing them."""
    missed: int = 0
    """Further repeats of both sides that have no effect, because a run never reached the target."""
    also: float | None = None
    """Median effect on the claim's other metric, in the same runs."""

    @property
    def enough(self) -> bool:
        """Whether there are enough repeats for a verdict."""
        return len(self.effects) + self.missed >= ENOUGH_REPEATS


@dataclass(frozen=True)
class Judgement:
    """A claim and its verdict in these runs."""

    seed: str
    claim: Claim
    cases: tuple[Case, ...]
    verdict: Verdict
    why: str
    """In how many cases it holds, or what is missing for a verdict."""


@dataclass(frozen=True)
class _Compared:
    """An effect, and the runs behind it."""

    effect: Effect
    claim: Claim
    pairing: Pairing
    choice: Pairing
    """Of the runs that the smallest value was chosen from: choosing compares, too."""

    @property
    def of_times(self) -> bool:
        """Whether it depends on the machine, and on when it was measured."""
        return self.claim.metric not in LEARNING

    @cached_property
    def forbidden(self) -> str:
        """Why the effect decides nothing, whatever it is; empty where it may."""
        kinds = {"of_times": self.of_times, "per_epoch": self.claim.metric in OF_SAMPLES}
        issues = next(filter(None, (pairing.blockers(**kinds) for pairing in (self.pairing, self.choice))), ())
        if missed := self.effect.missed:
            repeats = len(missed | self.effect.values.keys())
            issues = (Issue(Blocker.UNREACHED, {f"{self.claim.target:g}": (len(missed), repeats)}), *issues)
        return "; ".join(map(str, issues))

    @property
    def median(self) -> float:
        """Of the effects."""
        return ratio_median(self._values) if self._is_ratio(self._values) else median(self._values)

    def _is_ratio(self, values: Sequence[float]) -> bool:
        return self.claim.compare != "difference" and min(values) > 0

    def interval(self, error: float, more: int = 0) -> Ends | None:
        """From the lower end of the least possible effects to the upper end of the largest possible ones."""
        readings = self.effect.values.values()
        least = self._ends([reading.least for reading in readings], error, more)
        most = self._ends([reading.most for reading in readings], error, more)
        return (least[0], most[1]) if least and most else None

    def decided(self, error: float) -> tuple[Verdict, str]:
        """The verdict, and what would decide it where nothing does."""
        if self.forbidden:
            return "inconclusive", self.forbidden
        expect = self.claim.expect
        verdict, lacks = decide(
            self._values, self.interval(error), expect, after=lambda more: self.interval(error, more)
        )
        exact = self._ends(self._values, error, 0)
        if verdict == "inconclusive" and verdict_on(self._values, exact, expect) != "inconclusive":
            lacks = "accuracy is measured too rarely: lower measure.steps_per_epoch"
        return verdict, lacks

    def is_decided(self, error: float) -> bool:
        """Whether there is a verdict."""
        return (
            not self.forbidden and verdict_on(self._values, self.interval(error), self.claim.expect) != "inconclusive"
        )

    @property
    def _values(self) -> list[float]:
        return [reading.value for reading in self.effect.values.values()]

    def _ends(self, values: Sequence[float], error: float, more: int) -> Ends | None:
        of = ratio_interval if self._is_ratio(values) else difference_interval
        return of(values, self.pairing.pools if self.of_times else (), error=error, more=more)


def judge(runs: Runs, claim: Claim, *, seed: str) -> Judgement:
    """Evaluate one claim."""
    (judgement,) = judge_together(runs, [(seed, claim)])
    return judgement


def judge_together(runs: Runs, claims: Sequence[tuple[str, Claim]]) -> list[Judgement]:
    """Evaluate claims with the numbers of their publications; the intervals allow for all of their verdicts."""
    of_claims = [_compared(runs, claim) for _, claim in claims]
    able = [case for cases in of_claims for case in cases if not case.forbidden and case.interval(ERROR) is not None]
    error = error_of_each([case.is_decided for case in able])
    return [
        _judge(runs, claim, cases, seed=seed, error=error)
        for (seed, claim), cases in zip(claims, of_claims, strict=True)
    ]


def _compared(runs: Runs, claim: Claim) -> list[_Compared]:
    found = effects(runs, claim)
    if claim.gpus_only:
        found = [effect for effect in found if effect.keys["device_type"] == "cuda"]
    return [_Compared(e, claim, _pairing(runs, e.runs), _choice(runs, e.candidates)) for e in found]


def _judge(runs: Runs, claim: Claim, compared: Sequence[_Compared], *, seed: str, error: float) -> Judgement:
    others = {_identity(effect): effect for effect in _also(runs, claim)}
    cases = tuple(
        _case(runs, case, error=error, where=where, also=others.get(_identity(case.effect)))
        for case, where in zip(compared, labels([case.effect for case in compared]), strict=True)
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


def _case(runs: Runs, compared: _Compared, *, error: float, where: str, also: Effect | None) -> Case:
    known, effect = _known(runs), compared.effect
    ids = dict.fromkeys(run_id for used in effect.runs.values() for run_id in used)
    caveats = compared.pairing.caveats(of_times=compared.of_times)
    warnings = [known[run_id][1] for run_id in ids] + list(map(str, caveats))
    verdict, lacks = compared.decided(error)
    low, high = compared.interval(error) or (None, None)
    return Case(
        where=where,
        step=", by ".join(effect.steps),
        device=str(effect.keys.get("device_name") or effect.keys.get("device_type")),
        effects=tuple((repeat, reading.value) for repeat, reading in effect.values.items()),
        median=compared.median,
        low=low,
        high=high,
        verdict=verdict,
        lacks=lacks,
        runs=tuple(known[run_id][0] for run_id in ids),
        warnings=tuple(dict.fromkeys(filter(None, warnings))),
        missed=len(effect.missed),
        also=median(reading.value for reading in also.values.values()) if also else None,
    )


def _pairing(runs: Runs, ids_of_repeats: Mapping[int, tuple[str, ...]]) -> Pairing:
    known = compared_runs(runs)
    pairs = [RepeatPair(repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in ids_of_repeats.items()]
    return Pairing(tuple(pairs))


def _choice(runs: Runs, ids_of_repeats: Mapping[int, tuple[str, ...]]) -> Pairing:
    """The candidates of every repeat that has all of them; those of the others stand alone."""
    every = _pairing(runs, ids_of_repeats).pairs
    kinds = {pair.repeat: [id(run.definition) for run in pair.runs] for pair in every}
    most = max(kinds.values(), key=len, default=[])
    whole = tuple(pair for pair in every if kinds[pair.repeat] == most)
    return Pairing(whole, alone=tuple(run for pair in every if pair not in whole for run in pair.runs))


@lru_cache(maxsize=8)
def _known(runs: Runs) -> dict[str, tuple[str, str | None]]:
    """Run id → the name of its folder, and its warnings."""
    return {run_id: (slug, warned) for run_id, slug, warned in runs.run.select("run_id", "slug", "warnings").rows()}


def _overall(cases: Sequence[Case], claim: Claim) -> tuple[Verdict, str]:
    """The common verdict of all cases with enough repeats; inconclusive where they differ."""
    judged = [case for case in cases if case.enough] or cases
    few = f"{len(cases) - len(judged)} more with too few repeats" if len(judged) < len(cases) else ""
    verdicts = _together(judged, claim) if claim.together else [case.verdict for case in judged]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    for verdict in ("reproduced", "refuted"):
        if counts[verdict] == len(verdicts):
            return verdict, few
    whole = f"it needs {'; and '.join(map(str, claim.contrasts))}"
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
    for members in works.values():
        shown = {case.verdict for case in members}
        whole = shown == {"reproduced"} and len({case.step for case in members}) == len(claim.contrasts)
        verdicts.append("refuted" if "refuted" in shown else "reproduced" if whole else "inconclusive")
    return verdicts


def _missing(runs: Runs, claim: Claim) -> str:
    """Why there is nothing to compare, and which runs are needed."""
    if claim.gpus_only and facts(runs).filter(pl.col("device_type") == "cuda").is_empty():
        return f"can't be decided on CPUs: {claim.gpus_only}; it needs {_sweeps(claim)} on GPUs"
    if is_unreached(runs, claim):
        return f"no repeat reaches {claim.target:g} on both sides: train more epochs, or choose another optimizer"
    with_all = f" {written(claim.where)}" if claim.where else ""
    sides = "; or ".join(map(str, claim.contrasts)) + (f"; and with {claim.more}" if claim.more else "")
    lacks = f"needs runs of the same work{with_all} with {sides}; {ENOUGH_REPEATS} repeats each: {_sweeps(claim)}"
    return lacks + _excluded(runs, claim) + _disturbed(runs, claim)


def _disturbed(runs: Runs, claim: Claim) -> str:
    resting = resting_on_disturbed(runs).get(claim.metric, frozenset())
    count = usable(runs, claim).filter(pl.col("run_id").is_in(list(resting))).height
    return f"; others disturbed what {claim.metric} rests on in {count} runs" if count else ""


def _sweeps(claim: Claim) -> str:
    return " and ".join(f"sweep={name}" for name in claim.sweeps)


def _excluded(runs: Runs, claim: Claim) -> str:
    gone = facts(runs).join(usable(runs, claim).select("run_id"), on="run_id", how="anti")
    exclusions = gone["exclusion"].drop_nulls().unique(maintain_order=True)
    if claim.metric in LEARNING or exclusions.is_empty():
        return ""
    return f" ({gone.height} runs don't count: {text.listed(exclusions.to_list())})"
