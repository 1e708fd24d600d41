"""Whether a claim holds in the runs at hand: reproduced, refuted or inconclusive; and what would decide it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from analysis.claims.claimed_effect import ClaimedEffect
from analysis.claims.contrasts import effects, labels
from analysis.claims.decision import VERDICTS, Verdict
from analysis.claims.grammar import EPOCH_COLUMNS, Claim
from analysis.claims.lacking import missing
from analysis.stats import ENOUGH_REPEATS, ERROR, error_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.claims.effects import Effect
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
    outside: tuple[str, ...] = ()
    """In what its runs are not those that the publication speaks of, "data=digits": it decides nothing."""
    sweeps: tuple[str, ...] = ()
    """The sweeps of these runs."""
    metric: str = ""
    """What was compared: the claim's metric, or what stands for it in older results."""
    also: float | None = None
    """Median effect on the claim's other metric, in the same runs."""

    @property
    def enough(self) -> bool:
        """Whether there are enough repeats for a verdict."""
        return len(self.effects) + self.missed >= ENOUGH_REPEATS


@dataclass(frozen=True)
class Elsewhere:
    """What runs say that the publication does not speak of: those of one sweep, or of several together."""

    sweeps: tuple[str, ...]
    outside: tuple[str, ...]
    """In what they are not those of the publication, in any of the cases."""
    cases: tuple[Case, ...]
    finding: Verdict
    """The verdict that the claim would have if it were about these runs."""
    why: str


@dataclass(frozen=True)
class Judgement:
    """A claim and its verdict in these runs."""

    seed: str
    claim: Claim
    cases: tuple[Case, ...]
    """Of the runs that the publication speaks of."""
    verdict: Verdict
    why: str
    """In how many cases it holds, or what is missing for a verdict."""
    elsewhere: tuple[Elsewhere, ...] = ()
    """What other runs say of it, which decides nothing."""


def judge(runs: Runs, claim: Claim, *, seed: str) -> Judgement:
    """Evaluate one claim."""
    (judgement,) = judge_together(runs, [(seed, claim)])
    return judgement


def judge_together(runs: Runs, claims: Sequence[tuple[str, Claim]]) -> list[Judgement]:
    """Evaluate claims with the numbers of their publications; the intervals allow for all of their verdicts.

    What is measured elsewhere widens no interval of a verdict, and the other way round.
    """
    of_claims = [ClaimedEffect.all_of(runs, claim) for _, claim in claims]
    every = [effect for compared in of_claims for effect in compared]
    errors = {inside: _error(e for e in every if _is_inside(e) == inside) for inside in (True, False)}
    return [
        _judge(runs, claim, compared, seed=seed, errors=errors)
        for (seed, claim), compared in zip(claims, of_claims, strict=True)
    ]


def _is_inside(compared: ClaimedEffect) -> bool:
    """Whether the publication speaks of the runs."""
    return not compared.effect.outside


def _error(compared: Iterable[ClaimedEffect]) -> float:
    able = [each for each in compared if not each.forbidden and each.interval(ERROR) is not None]
    return error_of_each([each.is_decided for each in able])


def _judge(
    runs: Runs, claim: Claim, compared: Sequence[ClaimedEffect], *, seed: str, errors: dict[bool, float]
) -> Judgement:
    others = {_identity(effect): effect for effect in _also(runs, claim)}
    cases = [
        _case(each, error=errors[_is_inside(each)], where=where, also=others.get(_identity(each.effect)))
        for each, where in zip(compared, labels([each.effect for each in compared]), strict=True)
    ]
    inside = tuple(case for case in cases if not case.outside)
    verdict, why = _overall(inside, claim) if inside else ("inconclusive", missing(runs, claim))
    return Judgement(seed, claim, inside, verdict, why, _elsewhere(cases, claim))


def _elsewhere(cases: Sequence[Case], claim: Claim) -> tuple[Elsewhere, ...]:
    by_sweeps: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        if case.outside:
            by_sweeps[case.sweeps].append(case)
    return tuple(
        Elsewhere(
            sweeps,
            tuple(dict.fromkeys(word for case in members for word in case.outside)),
            tuple(members),
            *_overall(members, claim),
        )
        for sweeps, members in by_sweeps.items()
    )


def _also(runs: Runs, claim: Claim) -> list[Effect]:
    if not claim.also:
        return []
    epoch = claim.epoch if claim.also in EPOCH_COLUMNS else None
    return effects(runs, msgspec.structs.replace(claim, metric=claim.also, also=None, target=None, epoch=epoch))


def _identity(effect: Effect) -> tuple[str, tuple[str, ...]]:
    return effect.of.text, effect.steps


def _case(compared: ClaimedEffect, *, error: float, where: str, also: Effect | None) -> Case:
    effect, behind = compared.effect, compared.behind
    caveats = map(str, compared.pairing.caveats(of_times=compared.of_times))
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
        outside=effect.outside,
        sweeps=behind.sweeps,
        runs=behind.slugs,
        warnings=tuple(dict.fromkeys((*behind.warnings, *caveats))),
        missed=len(effect.missed),
        metric=effect.metric,
        also=median(reading.value for reading in also.values.values()) if also else None,
    )


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
