"""Whether a claim holds in the runs at hand: reproduced, refuted or inconclusive; and what would decide it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from analysis import text
from analysis.claims.claim import LAST, OF_SAMPLES, PER_EPOCH, TO_ACCURACY, UNTIMED, Claim, written
from analysis.claims.effects import effects, is_unreached, labels, unusable, usable, values
from analysis.comparison.campaign import campaign
from analysis.comparison.issues import warmed
from analysis.comparison.notes import Code, Note
from analysis.comparison.pairing import Pairing, choice_of, pairing_of
from analysis.comparison.ratio import ENOUGH_REPEATS, ERROR, Ends, Spread, error_of_each, ratio_median, repeats_to_add
from analysis.comparison.summary import facts
from analysis.metrics.disturbance import is_disturbed
from analysis.runs.reader import once
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.claims.claim import Expect
    from analysis.claims.effects import Measured
    from analysis.runs.reader import Runs


Verdict = Literal["reproduced", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "refuted", "inconclusive")

Leaning = Literal["for", "against", ""]

APART = "the sides were measured apart: by one submit of both"


_SHARES = frozenset(metric for metric in UNTIMED if metric.endswith("_accuracy")).difference(TO_ACCURACY)
"""Metrics from 0 to 1, shown in percentage points."""
_ROUNDING = 1e-9
"""0.999 is a tenth of a percentage point below 1."""

After = Callable[[int], tuple[float, float] | None]
"""The interval after so many more repeats of each side, if the effects vary alike."""


def verdict_on(independent: int, interval: tuple[float, float] | None, expect: Expect) -> Verdict:
    """The verdict on an effect.

    Reproduced: the interval lies in the region. Refuted: no part of it does, and it reaches the bound: the effect is
    the opposite, or nil (equivalent to none by the claim's own margin). An effect in the claimed direction that is
    measured to lie within the margin decides nothing. Fewer than `ENOUGH_REPEATS` independent values decide nothing,
    and no interval neither: the sides were not interleaved.
    """
    if independent < ENOUGH_REPEATS or interval is None:
        return "inconclusive"
    (low, high), region, bound = interval, expect.region, expect.open
    if region[0] < low and high < region[1]:
        return "reproduced"
    beyond = (high <= region[0] and low <= bound[0]) or (low >= region[1] and high >= bound[1])
    return "refuted" if beyond else "inconclusive"


class Decision(NamedTuple):
    """A verdict on an effect, and what would decide it where nothing does."""

    verdict: Verdict
    lacks: str = ""
    repeats: int | None = None
    """How many repeats in all may decide it; None where repeats would not, or it is not known."""


def decide(
    values: Sequence[float],
    interval: tuple[float, float] | None,
    expect: Expect,
    *,
    independent: int | None = None,
    after: After | None = None,
    highest_repeat: int | None = None,
    timed: bool = False,
    shown: Callable[[float], str] = "{:g}".format,
) -> Decision:
    """The verdict on an effect, and what would decide it where nothing does.

    `interval`: the one that the verdict rests on, which allows for other verdicts. `independent`: how many of the
    values are, None for all. `after`: None where that is not known. `timed`: a quieter machine would narrow the
    interval. `shown`: a bound in the effect's own unit.
    """
    known = len(values) if independent is None else independent
    verdict = verdict_on(known, interval, expect)
    if verdict != "inconclusive":
        return Decision(verdict)

    def in_all(more: int) -> int | None:
        return None if highest_repeat is None else highest_repeat + 1 + more

    if missing := max(ENOUGH_REPEATS - known, 0):
        advice = text.to_add(missing, after=highest_repeat)
        if known == len(values):
            return Decision(verdict, f"{count_of(known, 'repeat')} of {ENOUGH_REPEATS}: {advice}", in_all(missing))
        if interval is None:
            return Decision(verdict, f"{APART}, {advice}", in_all(missing))
        shared = f"count as {known} of {ENOUGH_REPEATS}, as submits share them"
        return Decision(verdict, f"{count_of(len(values), 'repeat')} that {shared}: {advice}", in_all(missing))
    assert interval is not None, "so many independent repeats have one"
    bounds = sorted({*expect.region, *expect.open})
    held = [bound for bound in bounds if interval[0] <= bound <= interval[1]]
    if not held:  # it lies within the margin
        return Decision(verdict, f"the effect is within the margin ({shown(expect.by)})")
    holds = f"the interval that allows for all claims holds {text.listed([shown(edge) for edge in held])}"
    if after is None:
        return Decision(verdict, holds)
    needed = repeats_to_add(lambda more: verdict_on(known + more, after(more), expect) != "inconclusive")
    if needed is None:
        quiet = ": measure on a quiet machine" if timed else ""
        return Decision(verdict, f"{holds}, which is too near the effect for any feasible number of repeats{quiet}")
    advice = text.to_add(needed, after=highest_repeat)
    return Decision(verdict, f"{holds}: {advice}, which decides if the effect stays", in_all(needed))


@dataclass(frozen=True)
class Case:
    """The effect in one kind of work: on one model and data set, between two levels."""

    where: str
    """Data, model and the other keys in which it differs from the other cases."""
    step: str
    """The levels that are compared."""
    sides: str
    """The names of the compared configurations, where another case has the same work and step; else empty."""
    device: str
    """The device that it was measured on."""
    effects: tuple[tuple[int, float], ...]
    """(repeat, effect) of every repeat that both sides have."""
    median: float
    """Of the effects; in logarithms where they are ratios."""
    low: float | None
    high: float | None
    """The 95 % interval of the effect; None with too few repeats, or where the sides were not interleaved. Steps and
    time to an accuracy are known to an epoch only, so it reaches from their least to their largest possible value.
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
    sweeps: tuple[str, ...] = ()
    """The sweeps of these runs."""
    also: float | None = None
    """Median effect on the claim's other metric, in the same runs."""
    leans: Leaning = ""
    """Without a verdict, to which side the median tends."""
    repeats: int | None = None
    """How many repeats in all may give one."""

    @property
    def compared(self) -> str:
        """The step, and the sides where it alone does not tell them."""
        return f"{self.step} ({self.sides})" if self.sides else self.step

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
    """Of the runs that the publication speaks of; others decide nothing."""
    verdict: Verdict
    reasons: tuple[str, ...]
    """In how many cases it holds, and what is missing for a verdict."""

    @property
    def repeats(self) -> int | None:
        """How many repeats in all may decide it, where repeats may."""
        needed = [case.repeats for case in self.cases if case.repeats]
        return max(needed, default=None) if self.verdict == "inconclusive" else None

    @property
    def why(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


def judge(runs: Runs, claim: Claim, *, seed: str) -> Judgement:
    """Evaluate one claim."""
    (judgement,) = judge_together(runs, [(seed, claim)])
    return judgement


def judge_together(runs: Runs, claims: Sequence[tuple[str, Claim]]) -> list[Judgement]:
    """Evaluate claims with the numbers of their publications; the verdicts allow for each other."""
    of_claims = [ClaimedEffect.all_of(runs, claim) for _, claim in claims]
    every = (effect for compared in of_claims for effect in compared)
    able = [each for each in every if not each.forbidden and each.interval(ERROR) is not None]
    error = error_of_each([each.is_decided for each in able])
    return [
        _judge(runs, claim, compared, seed=seed, error=error)
        for (seed, claim), compared in zip(claims, of_claims, strict=True)
    ]


def _judge(runs: Runs, claim: Claim, compared: Sequence[ClaimedEffect], *, seed: str, error: float) -> Judgement:
    wheres = labels([each.effect for each in compared])
    sides = _sides(compared, wheres)
    cases = tuple(
        _case(each, error=error, where=where, sides=names)
        for each, where, names in zip(compared, wheres, sides, strict=True)
    )
    verdict, reasons = _overall(cases, claim) if cases else ("inconclusive", (missing(runs, claim),))
    return Judgement(seed, claim, cases, verdict, reasons)


def _sides(compared: Sequence[ClaimedEffect], wheres: Sequence[str]) -> list[str]:
    """`Case.sides` of each effect: the compared keys may have further values, such as nodes or a strategy's options."""
    places = [(where, each.effect.step) for each, where in zip(compared, wheres, strict=True)]
    counts = Counter(places)
    told = (" → ".join(dict.fromkeys(map(str, each.effect.configurations))) for each in compared)
    return [sides if counts[place] > 1 else "" for place, sides in zip(places, told, strict=True)]


def _case(compared: ClaimedEffect, *, error: float, where: str, sides: str) -> Case:
    effect = compared.effect
    runs = [_told(compared.runs)[run_id] for run_id in dict.fromkeys(chain(*compared.run_ids.values()))]
    caveats = map(str, compared.pairing.caveats(of_times=compared.of_times, metric=compared.claim.metric))
    decision = compared.decided(error)
    low, high = compared.interval(ERROR) or (None, None)
    return Case(
        where=where,
        step=effect.step,
        sides=sides,
        device=str(effect["device_name"] or effect["device_type"]),
        effects=tuple((repeat, known.value) for repeat, known in effect.known.items()),
        median=compared.median,
        low=low,
        high=high,
        verdict=decision.verdict,
        lacks=decision.lacks,
        repeats=decision.repeats,
        sweeps=tuple(sorted({sweep for *_, sweep in runs})),
        runs=tuple(slug for slug, *_ in runs),
        warnings=tuple(dict.fromkeys((*(warned for _, warned, _ in runs if warned), *caveats))),
        missed=len(effect.readings) - len(effect.known),
        also=compared.also,
        leans=compared.leaning if decision.verdict == "inconclusive" else "",
    )


def _overall(cases: Sequence[Case], claim: Claim) -> tuple[Verdict, tuple[str, ...]]:
    """The common verdict of all cases with enough repeats; inconclusive where they differ."""
    judged = [case for case in cases if case.enough] or cases
    few = (f"{len(cases) - len(judged)} more with too few repeats",) if len(judged) < len(cases) else ()
    verdicts = _together(judged, claim) if claim.together else [case.verdict for case in judged]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    for verdict in ("reproduced", "refuted"):
        if counts[verdict] == len(verdicts):
            return verdict, few
    whole = f"it needs {'; and '.join(map(str, claim.contrasts))}"
    open_ = "it depends on the work" if counts["refuted"] else whole
    lacks = next((case.lacks for case in judged if case.lacks), open_)
    if len(cases) == 1:
        return "inconclusive", (lacks,)
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    of = f"{tally} of {len(verdicts)} {'kinds of work' if claim.together else 'cases'}"
    return "inconclusive", (of, *few, lacks)


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


@once
def _told(runs: Runs) -> dict[str, tuple[str, str | None, str]]:
    """Run id → the name of its folder, its warnings, and its sweep."""
    rows = runs.run.select("run_id", "slug", "warnings", "sweep").rows()
    return {run_id: (slug, warned, sweep) for run_id, slug, warned, sweep in rows}


@dataclass(frozen=True)
class ClaimedEffect:
    """An effect, and the runs behind it."""

    effect: Measured
    claim: Claim
    runs: Runs

    @classmethod
    def all_of(cls, runs: Runs, claim: Claim) -> list[Self]:
        """Every effect of the claim in these runs; on GPUs alone where processors can't measure it."""
        found = effects(runs, claim)
        if claim.gpus_only:
            found = [effect for effect in found if effect["device_type"] == "cuda"]
        return [cls(effect, claim, runs) for effect in found]

    @cached_property
    def run_ids(self) -> dict[int, tuple[str, ...]]:
        """Repeat → ids of the runs behind its value."""
        return {repeat: self.effect.readings[repeat].runs for repeat in self.effect.known}

    @cached_property
    def pairing(self) -> Pairing:
        """Of the runs behind it: the campaign's own where the effect has a value of each of its pairs."""
        if len(self.effect.configurations) == 2:
            whole = campaign(self.runs).pair(*self.effect.configurations)
            if {repeat: tuple(run.run_id for run in runs) for repeat, runs in whole.pairs} == self.run_ids:
                return whole
        return pairing_of(self.runs, self.run_ids)

    @cached_property
    def choice(self) -> Pairing:
        """Of the runs that the smallest value was chosen from: choosing compares, too."""
        chosen_from = {repeat: self.effect.readings[repeat].candidates for repeat in self.effect.known}
        return choice_of(self.runs, {repeat: several for repeat, several in chosen_from.items() if several})

    @property
    def of_times(self) -> bool:
        """Whether it depends on the machine, and on when it was measured."""
        return self.claim.metric not in UNTIMED

    @property
    def also(self) -> float | None:
        """Median effect on the claim's other metric; None where it was not measured, or must not be compared."""
        metric, readings = self.claim.also, self.effect.readings
        known = [also for repeat in self.effect.known if (also := readings[repeat].also) is not None]
        if metric is None or not known or self._blockers(metric):
            return None
        return ratio_median(known) if self._is_ratio(known) else median(known)

    def _blockers(self, metric: str) -> tuple[Note, ...]:
        """What forbids to compare these runs by a metric."""
        found = (
            pairing.blockers(of_times=metric not in UNTIMED, per_epoch=metric in OF_SAMPLES, metric=metric)
            for pairing in (self.pairing, self.choice)
        )
        return next(filter(None, found), ()) or self._warmed(metric)

    def _warmed(self, metric: str) -> tuple[Note, ...]:
        """What a parity check before the training forbids of metrics of each epoch, where the first one is meant."""
        epochs = set[int | str]().union(*(self.claim.epochs(contrast) for contrast in self.claim.contrasts))
        runs = [run for pair in self.pairing.pairs for run in pair.runs]
        of_first = 1 in epochs or (LAST in epochs and any(run.definition["epochs"] == 1 for run in runs))
        return tuple(warmed(runs, "first_epoch_time_s")[0]) if metric in PER_EPOCH and of_first else ()

    @cached_property
    def forbidden(self) -> str:
        """Why the effect decides nothing, whatever it is; empty where it may."""
        issues = self._blockers(self.claim.metric)
        repeats = len(self.effect.readings)
        if missed := repeats - len(self.effect.known):
            issues = (
                Note(Code.UNREACHED, {"missed": missed, "repeats": repeats, "target": f"{self.claim.target:g}"}),
                *issues,
            )
        return "; ".join(map(str, issues))

    @cached_property
    def is_saturated(self) -> bool:
        """Whether an accuracy was to rise by more than either side had left to rise by: on average over the repeats it
        could not, whatever the devices do. That no effect is seen then says nothing.
        """
        claim = self.claim
        epochs = {epoch for contrast in claim.contrasts for epoch in claim.epochs(contrast)}
        wanted = claim.expect.region[0]
        alone = claim.compare == "difference" and claim.more is None and len(epochs) == 1
        if claim.metric not in _SHARES or not alone or not 0 <= wanted <= 1:
            return False
        reached = values(self.runs, claim.metric, None, *epochs)
        sides = zip(*self.run_ids.values(), strict=True)
        return all(fmean(1 - reached[run_id].value for run_id in side) <= wanted + _ROUNDING for side in sides)

    @property
    def leaning(self) -> Leaning:
        """On which side of the claimed region the median lies; on neither within the margin."""
        (low, high), bound = self.claim.expect.region, self.claim.expect.open
        if self.forbidden or self.is_saturated:
            return ""
        if low < self.median < high:
            return "for"
        return "" if bound[0] < self.median < bound[1] else "against"

    @property
    def median(self) -> float:
        """Of the effects."""
        return ratio_median(self._values) if self._is_ratio(self._values) else median(self._values)

    def _is_ratio(self, values: Sequence[float]) -> bool:
        return self.claim.compare != "difference" and min(values) > 0

    def interval(self, error: float, more: int = 0) -> Ends | None:
        """From the lower end of the least possible effects to the upper end of the largest possible ones."""
        least, most = self._spreads
        if least is None or most is None:
            return None
        return least.ends(error, more)[0], most.ends(error, more)[1]

    @cached_property
    def _spreads(self) -> tuple[Spread | None, Spread | None]:
        """Of the least possible effects, and of the largest possible ones."""
        _, least, most = zip(*self.effect.known.values(), strict=True)
        return self._spread(least), self._spread(most)

    @cached_property
    def _exact(self) -> Spread | None:
        return self._spread(self._values)

    def decided(self, error: float) -> Decision:
        """The verdict, and what would decide it where nothing does."""
        if self.forbidden:
            return Decision("inconclusive", self.forbidden)
        expect = self.claim.expect
        if self.is_saturated:
            short = f"{self._shown(expect.region[0])} or less below 100 %"
            return Decision("inconclusive", f"saturated: both sides are {short}, so no rise by more could show")
        decision = decide(
            self._values,
            self.interval(error),
            expect,
            independent=self._independent,
            after=partial(self.interval, error),
            highest_repeat=self.pairing.highest_repeat,
            timed=self.of_times,
            shown=self._shown,
        )
        exact = None if self._exact is None else self._exact.ends(error)
        if decision.verdict == "inconclusive" and verdict_on(self._independent, exact, expect) != "inconclusive":
            return Decision("inconclusive", "accuracy is measured too rarely: lower measure.steps_per_epoch")
        return decision

    def is_decided(self, error: float) -> bool:
        """Whether there is a verdict."""
        if self.forbidden or self.is_saturated:
            return False
        return verdict_on(self._independent, self.interval(error), self.claim.expect) != "inconclusive"

    def _shown(self, bound: float) -> str:
        """A bound of the claim in the unit that its effects are shown in."""
        if self.claim.compare == "efficiency":
            return text.percent(bound)
        is_points = self.claim.compare == "difference" and self.claim.metric in _SHARES
        return f"{100 * bound:g} points" if is_points else f"{bound:g}"

    @cached_property
    def _independent(self) -> int:
        """How many of the effects are independent: those that share what differed between submits count once."""
        return len(set(self.pairing.pools)) if self.of_times else len(self.effect.known)

    @cached_property
    def _values(self) -> list[float]:
        return [known.value for known in self.effect.known.values()]

    def _spread(self, values: Sequence[float]) -> Spread | None:
        of = Spread.of_ratios if self._is_ratio(values) else Spread.of_differences
        return of(values, self.pairing.pools if self.of_times else ())


def missing(runs: Runs, claim: Claim) -> str:
    """Why there is nothing to compare, and which runs are needed."""
    if claim.gpus_only and not (facts(runs)["device_type"] == "cuda").any():
        return f"can't be decided on CPUs: {claim.gpus_only}; it needs {_sweeps(claim)} on GPUs"
    if is_unreached(runs, claim):
        return f"no repeat reaches {claim.target:g} on both sides: train more epochs, or choose another optimizer"
    with_all = f" {written(every)}" if (every := claim.where | claim.scope) else ""
    sides = "; or ".join(map(str, claim.contrasts)) + (f"; and with {claim.more}" if claim.more else "")
    lacks = f"needs runs of the same work{with_all} with {sides}; {ENOUGH_REPEATS} repeats each: {_sweeps(claim)}"
    return lacks + _excluded(runs, claim) + _disturbed(runs, claim)


def _disturbed(runs: Runs, claim: Claim) -> str:
    disturbed = is_disturbed(runs, claim.metric)
    count = len(disturbed & usable(runs, claim.metric).keys())
    return f"; others disturbed the epochs of {claim.metric} in {count_of(count, 'run')}" if count else ""


def _sweeps(claim: Claim) -> str:
    return " and ".join(f"sweep={name}" for name in claim.sweeps)


def _excluded(runs: Runs, claim: Claim) -> str:
    number, exclusions = (0, []) if claim.metric in UNTIMED else unusable(runs, claim.metric)
    verb = "doesn't" if number == 1 else "don't"
    return f" ({count_of(number, 'run')} {verb} count: {text.listed(exclusions)})" if exclusions else ""
