"""An effect with the runs behind it: its interval, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import TYPE_CHECKING, Self

from analysis.claims.contrasts import effects
from analysis.claims.decision import Verdict, decide, verdict_on
from analysis.claims.grammar import OF_SAMPLES, UNTIMED, Claim
from analysis.claims.pairs import behind, choice_of
from analysis.comparison.policy import Blocker, Issue
from analysis.stats import Ends, Spread, ratio_median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.claims.effects import Effect
    from analysis.claims.pairs import Behind
    from analysis.comparison.pairing import Pairing
    from analysis.reader import Runs


@dataclass(frozen=True)
class ClaimedEffect:
    """An effect, and the runs behind it."""

    effect: Effect
    claim: Claim
    behind: Behind
    choice: Pairing
    """Of the runs that the smallest value was chosen from: choosing compares, too."""

    @classmethod
    def all_of(cls, runs: Runs, claim: Claim) -> list[Self]:
        """Every effect of the claim in these runs; on GPUs alone where processors can't measure it."""
        found = effects(runs, claim)
        if claim.gpus_only:
            found = [effect for effect in found if effect.keys["device_type"] == "cuda"]
        return [cls(e, claim, behind(runs, e.runs), choice_of(runs, e.candidates)) for e in found]

    @property
    def pairing(self) -> Pairing:
        """Of the runs behind it."""
        return self.behind.pairing

    @property
    def of_times(self) -> bool:
        """Whether it depends on the machine, and on when it was measured."""
        return self.claim.metric not in UNTIMED

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
        least, most = self._spreads
        if least is None or most is None:
            return None
        low, high = least.ends(error, more)
        return low, high if least is most else most.ends(error, more)[1]

    @cached_property
    def _spreads(self) -> tuple[Spread | None, Spread | None]:
        """Of the least possible effects, and of the largest possible ones; one object where nothing is uncertain."""
        readings = self.effect.values.values()
        if all(reading.least == reading.value == reading.most for reading in readings):
            return self._exact, self._exact
        least, most = [reading.least for reading in readings], [reading.most for reading in readings]
        return self._spread(least), self._spread(most)

    @cached_property
    def _exact(self) -> Spread | None:
        return self._spread(self._values)

    def decided(self, error: float) -> tuple[Verdict, str]:
        """The verdict, and what would decide it where nothing does."""
        if self.forbidden:
            return "inconclusive", self.forbidden
        expect = self.claim.expect
        verdict, lacks = decide(
            self._values,
            self.interval(error),
            expect,
            independent=self._independent,
            after=partial(self.interval, error),
            highest_repeat=self.pairing.highest_repeat,
            timed=self.of_times,
        )
        exact = None if self._exact is None else self._exact.ends(error)
        if verdict == "inconclusive" and verdict_on(self._independent, exact, expect) != "inconclusive":
            lacks = "accuracy is measured too rarely: lower measure.steps_per_epoch"
        return verdict, lacks

    def is_decided(self, error: float) -> bool:
        """Whether there is a verdict."""
        if self.forbidden:
            return False
        return verdict_on(self._independent, self.interval(error), self.claim.expect) != "inconclusive"

    @cached_property
    def _independent(self) -> int:
        """How many of the effects are independent: those that share what differed between submits count once."""
        return len(set(self.pairing.pools)) if self.of_times else len(self.effect.values)

    @cached_property
    def _values(self) -> list[float]:
        return [reading.value for reading in self.effect.values.values()]

    def _spread(self, values: Sequence[float]) -> Spread | None:
        of = Spread.of_ratios if self._is_ratio(values) else Spread.of_differences
        return of(values, self.pairing.pools if self.of_times else ())
