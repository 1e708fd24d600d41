"""What is divided by what, and ratios that come with their uncertainty; what is said of them: `verdict.py`.

The interval is Student's t on the logarithms of the paired ratios (Student, "The probable error of a mean", Biometrika
1908), wide enough that it may be looked at after every further repeat: a group-sequential boundary (Pocock, Biometrika
1977; Lan and DeMets, Biometrika 1983) for t statistics (docs/comparisons.md has its simulated coverage, and what other
intervals would reach).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from analysis.comparison.verdict import SpeedVerdict, of_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from analysis.comparison.run import ComparedRun


CONFIDENCE = 0.95
ERROR = 1 - CONFIDENCE
"""How often an interval may leave out the true ratio, however often it is looked at while repeats are added."""
FEWEST_REPEATS = 3
"""Fewest independent pairs for an interval: fewer don't show how much they vary."""
DECIDING_REPEATS = 4
"""Fewest independent pairs for a verdict: of machines with two speeds, three pairs agree by chance too often."""
ENOUGH_REPEATS = 6
"""Fewest repeats for a verdict on a claim: with fewer, an interval depends on the shape of the noise."""


class Fraction(NamedTuple):
    """What a ratio is of: the metric of the second run ÷ that of the first; with a rate, how many times as fast the
    second one is.
    """

    metric: str
    rate: str = ""
    """In place of the metric, a time, where epochs hold unequally many samples."""

    def of(self, one: ComparedRun, other: ComparedRun) -> tuple[float | None, float | None]:
        """Numerator and denominator."""
        if not self.rate:
            return other.value(self.metric), one.value(self.metric)
        if self.is_of_rates(one, other):
            return other.value(self.rate), one.value(self.rate)
        return one.value(self.metric), other.value(self.metric)

    def is_of_rates(self, one: ComparedRun, other: ComparedRun) -> bool:
        """Whether it is one of rates, in place of times."""
        return bool(self.rate) and (one.epoch_samples is None or one.epoch_samples != other.epoch_samples)


PER_EPOCH = Fraction("steady_epoch_time_s", "throughput_samples_per_s")
WITH_STARTUP = Fraction("total_time_s", "throughput_with_startup_samples_per_s")

Ends = tuple[float, float]
"""Lower and upper end of an interval."""


@dataclass(frozen=True)
class Ratio:
    """The ratios of paired repeats, their median, its 95 % interval, and the wider interval that a verdict rests on."""

    pairs: tuple[tuple[int, float], ...]
    """(repeat, ratio) of every repeat that both sides have, in order."""
    pools: tuple[int, ...]
    """Of each pair its pool: pairs of one pool share what differed between the sides' submits."""
    error: float = ERROR
    """How often the verdict may be wrong: less than 5 % where several verdicts are given."""

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.pairs)

    @cached_property
    def logarithms(self) -> tuple[float, ...]:
        """Of each pool, the mean logarithm of its ratios: what the interval rests on."""
        return of_pools([math.log(value) for _, value in self.pairs], self.pools)

    @property
    def is_apart(self) -> bool:
        """Whether the pairs share what was another between the sides' submits, so that no interval holds it."""
        return is_apart(self.n, len(self.logarithms))

    @cached_property
    def median(self) -> float:
        """The median, in logarithms: with an even number, the geometric mean of the two in the middle."""
        return ratio_median([value for _, value in self.pairs])

    @cached_property
    def _spread(self) -> Spread | None:
        return None if self.is_apart else Spread.of_ratios([value for _, value in self.pairs], self.pools)

    @cached_property
    def interval(self) -> Ends | None:
        """The 95 % interval, however many other ratios are shown; None with fewer than `FEWEST_REPEATS` pairs, and of
        sides that were measured apart.
        """
        return None if self._spread is None else self._spread.ends(ERROR)

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval."""
        return self.interval[0] if self.interval else None

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval."""
        return self.interval[1] if self.interval else None

    @cached_property
    def deciding(self) -> Ends | None:
        """The interval that the verdict rests on, with `error`; None with fewer than `DECIDING_REPEATS` pairs."""
        return self.after(0)

    def after(self, more: int) -> Ends | None:
        """The deciding interval after so many more repeats of each side, in turn, if the ratios vary alike."""
        return self._deciding(self.error, more)

    def _deciding(self, error: float, more: int = 0) -> Ends | None:
        if self._spread is None or self._spread.n + more < DECIDING_REPEATS:
            return None
        return self._spread.ends(error, more)

    @cached_property
    def inverse(self) -> Ratio:
        """The ratio of the first side's values to the second side's."""
        return replace(self, pairs=tuple((repeat, 1 / value) for repeat, value in self.pairs))

    def at(self, error: float) -> Ratio:
        """The same with a verdict that is wrong so often at most."""
        return replace(self, error=error)

    @property
    def further_repeats(self) -> int | None:
        """How many more repeats of each side would decide where no difference is shown, if the ratios vary alike; None
        where something is shown, where there is no verdict, and for more than a hundred.
        """
        if self.deciding is None or of_ends(self.deciding) is not SpeedVerdict.NO_DIFFERENCE:
            return None
        return repeats_to_add(
            lambda more: (ends := self.after(more)) is not None and of_ends(ends) is not SpeedVerdict.NO_DIFFERENCE
        )

    def differs_from_1(self, error: float) -> bool:
        """Whether a verdict with this error says that the sides differ."""
        ends = self._deciding(error)
        return ends is not None and not ends[0] <= 1 <= ends[1]

    def smallest_seen(self, margin: float) -> float | None:
        """The ratio whose deciding interval would lie above `margin` in `POWER` of all cases, with as many pools that
        vary as these; None where no ratio would, however large.
        """
        from scipy.special import nctdtrinc

        n = len(self.logarithms)
        if n < DECIDING_REPEATS or math.isinf(limit := critical(n, self.error)):
            return None
        further = nctdtrinc(n - 1, 1 - POWER, limit) / math.sqrt(n)
        return margin * _exp(float(further) * statistics.stdev(self.logarithms))


POWER = 0.8
"""How often a gate fails on the slow-down that it says it would have seen."""


def ratio_of_pairs(pairs: Sequence[tuple[int, float]], pools: Mapping[int, int] | None = None) -> Ratio | None:
    """The ratio of these (repeat, ratio); None where there are none. `pools`: repeat → its pool; None: all differ."""
    if not pairs:
        return None
    return Ratio(
        tuple(pairs), tuple(place if pools is None else pools[repeat] for place, (repeat, _) in enumerate(pairs))
    )


def ratio_median(ratios: Sequence[float]) -> float:
    """The median of positive ratios in logarithms: that of their inverses is its inverse, also of an even number."""
    return math.exp(statistics.median(map(math.log, ratios)))


def is_apart(pairs: int, pools: int) -> bool:
    """Whether enough pairs were measured, of which too few are independent: more pairs like them change nothing."""
    return pools < min(pairs, DECIDING_REPEATS)


def of_pools(values: Sequence[float], pools: Sequence[int]) -> tuple[float, ...]:
    """The mean of each pool's values; the values themselves where there are no pools."""
    if not pools or len(set(pools)) == len(pools):
        return tuple(values)
    members: dict[int, list[float]] = defaultdict(list)
    for value, pool in zip(values, pools, strict=True):
        members[pool].append(value)
    return tuple(map(statistics.fmean, members.values()))


@dataclass(frozen=True)
class Spread:
    """What every interval of the same values rests on: of paired differences, m ± t·s/√n, or of positive ratios,
    exp(m ± t·s/√n), m and s of their logarithms.

    Both sides of a ratio vary alike, so the logarithms vary symmetrically: their mean, which the interval is about, and
    their median, which is shown as less depends on one bad repeat, estimate the same. With 9 lopsided repeats or more
    the median can lie outside; it is taken in.
    """

    n: int
    """Of independent values: pools."""
    mean: float
    deviation: float
    median: float
    """Of all values."""
    of_logarithms: bool

    @classmethod
    def of_ratios(cls, ratios: Sequence[float], pools: Sequence[int] = ()) -> Spread | None:
        """Of positive ratios; None below `FEWEST_REPEATS`."""
        spread = cls.of_differences([math.log(ratio) for ratio in ratios], pools)
        return None if spread is None else replace(spread, of_logarithms=True)

    @classmethod
    def of_differences(cls, values: Sequence[float], pools: Sequence[int] = ()) -> Spread | None:
        """Of paired differences, likewise."""
        independent = of_pools(values, pools)
        if len(independent) < FEWEST_REPEATS:
            return None
        return cls(len(independent), *_spread(independent), statistics.median(values), of_logarithms=False)

    def ends(self, error: float, more: int = 0) -> Ends:
        """The interval with this error, after so many more repeats of each side, if these vary alike."""
        width = half_width(self.n + more, error)
        reach = width if math.isinf(width) else width * self.deviation
        low, high = min(self.mean - reach, self.median), max(self.mean + reach, self.median)
        return (_exp(low), _exp(high)) if self.of_logarithms else (low, high)


def _exp(power: float) -> float:
    """Infinity where nothing larger can be held: such an interval says nothing."""
    return math.exp(power) if power < _LARGEST_POWER else math.inf


_LARGEST_POWER = math.log(sys.float_info.max)


@lru_cache(maxsize=4096)
def _spread(values: tuple[float, ...]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values)


def half_width(n: int, error: float = ERROR) -> float:
    """How far the interval of n values reaches to each side, in standard deviations: t ÷ √n. Infinite where n values
    can't decide with so small an error.
    """
    return critical(n, error) / math.sqrt(n)


@lru_cache(maxsize=4096)
def critical(n: int, error: float = ERROR) -> float:
    """The t statistic of n values that equal ones exceed with a probability of `at_one_look(n, error)`; infinite where
    n values agree by chance more often than `error` on a machine with two speeds.
    """
    from scipy.special import stdtrit  # a twentieth of a second to import

    if by_two_speeds(n) > error:
        return math.inf
    return float(stdtrit(n - 1, 1 - at_one_look(n, error) / 2))


def by_two_speeds(n: int) -> float:
    """How often n pairs of equal sides all favour the same one, where each run takes one of two speeds by chance (boost
    states, kinds of nodes): all runs of one side are fast and all of the other slow, or the reverse, (1/4)ⁿ each. No
    interval can see it, since such pairs don't vary.
    """
    return 2 * 0.25**n


def at_one_look(n: int, error: float) -> float:
    """What a look at n values may err, so that all looks, after each value from the third on, err `error` together.

    The shape makes the interval about 1.7 times as wide as one that is looked at once, whatever n. The factor and the
    exponent of `error` are simulated: `tests/analysis/false_alarms.py`.
    """
    return 3.2 * math.pow(error, 1.125) * math.pow(n, -1.5)


MOST_FURTHER = 100
"""Further repeats that are worth advising."""


def repeats_to_add(decides: Callable[[int], bool], *, most: int = MOST_FURTHER) -> int | None:
    """How many more repeats of each side decide, at least; None for more than `most`. `decides`: whether so many do."""
    return next((more for more in range(1, most + 1) if decides(more)), None)


def error_of_each(decided: Sequence[Callable[[float], bool]], *, comparisons: int | None = None) -> float:
    """The error of each of several verdicts, so that on average 5 % of those that decide are wrong at most.

    `decided`: of each comparison, whether a verdict with a given error decides it. `comparisons`: among how many these
    were selected (None: they are all). Where nothing differs, none of all verdicts is wrong in 95 % of cases.
    (Benjamini and Hochberg, J. R. Stat. Soc. B 1995; intervals: Benjamini and Yekutieli, J. Am. Stat. Assoc. 2005.)
    """
    among = max(comparisons or len(decided), 1)
    found = len(decided)
    while found > 1:
        still = sum(decides(ERROR * found / among) for decides in decided)
        if still >= found:  # more than before: a claim may be refuted by a wide interval that a narrow one leaves open
            break
        found = still
    return ERROR * max(found, 1) / among


def of_several(ratios: Iterable[Ratio | None], *, fastest_of: int = 0) -> float:
    """The error of each verdict where several are given together (`analysis.comparison.ratio.error_of_each`).

    `fastest_of`: the ratios are those to the fastest of so many, chosen by the same runs. Any pair may then be the one
    that is asked for, so all pairs are allowed for.
    """
    known = [ratio for ratio in ratios if ratio is not None and ratio.deciding is not None]
    of_pairs = fastest_of * (fastest_of - 1) // 2
    return error_of_each([ratio.differs_from_1 for ratio in known], comparisons=max(len(known), of_pairs))
