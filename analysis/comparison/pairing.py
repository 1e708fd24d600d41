"""The pairing of runs: repeat by repeat, with what blocks the comparison, what limits it, and its ratios.

Pairs whose ratios have something in common are a pool, whose mean counts once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from analysis import text
from analysis.comparison.issues import (
    beyond_cores,
    beyond_peak,
    disturbances,
    has_same_data,
    of_energies,
    unlike,
    unlike_contents,
    unlike_memory,
    unlike_probes,
    unrecorded,
    warmed,
)
from analysis.comparison.notes import Code, Note, Remedy
from analysis.comparison.ratio import (
    DECIDING_REPEATS,
    FEWEST_REPEATS,
    PER_EPOCH,
    WITH_STARTUP,
    Fraction,
    is_apart,
    of_pools,
    ratio_of_pairs,
)
from analysis.comparison.run import ComparedRun, compared_runs
from analysis.comparison.work import COMPARED, highest_repeats, is_below, without
from analysis.runs.reader import once
from parallelbench.errors import count_of
from parallelbench.measure import environment_match
from parallelbench.measure.environment_match import FRAMEWORK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from analysis.comparison.ratio import Ratio
    from analysis.comparison.run import Span
    from analysis.comparison.work import Differences
    from analysis.runs.reader import Runs


_ROUNDING = 1e-9
"""Relative: twice as fast on two devices is no more than that."""


class RepeatPair(NamedTuple):
    """The runs of one repeat that are compared: two, or four where an effect is compared with another."""

    repeat: int
    runs: tuple[ComparedRun, ...]


@dataclass(frozen=True)
class Pairing:
    """Pairs of runs, one per repeat. A ratio is the second run's value ÷ the first run's."""

    pairs: tuple[RepeatPair, ...]
    across: tuple[str, ...] = ()
    """Keys in which the sides may differ."""
    alone: tuple[ComparedRun, ...] = ()
    """Runs of a repeat that the other side lacks. Medians rest on them, so their environments must match, too."""
    _notes: dict[tuple[str, bool, bool, str], tuple[Note, ...]] = field(default_factory=dict, init=False, compare=False)
    """What was found once; many ask. So is each ratio."""
    _ratios: dict[Fraction, Ratio | None] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def couples(self) -> list[tuple[ComparedRun, ComparedRun]]:
        """Every two runs of a repeat."""
        return [couple for pair in self.pairs for couple in combinations(pair.runs, 2)]

    @cached_property
    def unlike_environments(self) -> Differences:
        """The entries of the environment that must match and differ in any pair."""
        differing = {key: values for key, values in self._differences.items() if self._must_match(key)}
        return differing | {k: v for k, v in self._unlike_probes.items() if not is_below(k, self.across)}

    @cached_property
    def reported(self) -> Differences:
        """The entries of the environment that may differ, and do."""
        return {key: values for key, values in self._differences.items() if not self._must_match(key)}

    @cached_property
    def unlike_samples(self) -> tuple[tuple[ComparedRun, ComparedRun], ...]:
        """The pairs of runs whose epochs hold unequally many samples."""
        known = (couple for couple in self.couples if all(run.epoch_samples is not None for run in couple))
        return tuple((one, other) for one, other in known if one.epoch_samples != other.epoch_samples)

    @property
    def is_per_sample(self) -> bool:
        """Whether a ratio of times is one of rates, in any pair: epochs don't hold equally many samples, as far as is
        known.
        """
        return any(PER_EPOCH.is_of_rates(*couple) for couple in self.couples)

    @cached_property
    def is_one_after_the_other(self) -> bool:
        """Whether the runs of one side mostly came before those of another. Runs of one sweep are interleaved."""
        return one_after_the_other([[run.span for run in side] for side in self._sides])

    @cached_property
    def pools(self) -> tuple[int, ...]:
        """Of each pair its pool (`pools.pools`)."""
        return pools([pair.runs for pair in self.pairs])

    @cached_property
    def is_apart(self) -> bool:
        """Whether too few pairs are independent to show what the sessions have made of the ratios."""
        return is_apart(len(self.pairs), len(set(self.pools)))

    def blockers(self, *, of_times: bool = True, per_epoch: bool = False, metric: str = "") -> tuple[Note, ...]:
        """Why these runs are not compared; empty where they are.

        `of_times`: times, energies or memory are compared. `per_epoch`: the metric grows with the samples of an epoch.
        `metric`: what is compared, which alone may be unlike; empty for what speaks against any.
        """
        key = "blockers", of_times, per_epoch, metric
        if key not in self._notes:
            self._notes[key] = (
                (*self.blockers(of_times=of_times, per_epoch=per_epoch), *self._blockers_of(metric))
                if metric
                else tuple(self._blockers(of_times=of_times, per_epoch=per_epoch))
            )
        return self._notes[key]

    def _blockers_of(self, metric: str) -> list[Note]:
        memory = [Note(Code.MEMORY)] if metric.startswith("peak_memory") and unlike_memory(self._runs) else []
        return [*memory, *of_energies(self._runs, metric)[0], *warmed(self._runs, metric)[0]]

    def _blockers(self, *, of_times: bool, per_epoch: bool) -> list[Note]:
        notes = []
        # Where the data sets are what is compared, epochs hold what they hold.
        shortened = [couple for couple in self.unlike_samples if couple[0].data_samples == couple[1].data_samples]
        other_data = [couple for couple in self.unlike_samples if couple not in shortened and has_same_data(*couple)]
        if other_data:
            notes.append(Note(Code.DATA, _samples(other_data[0])))
        elif contents := unlike_contents(self.couples):
            one, other = (str(content)[:12] for content in contents["data_sha256"])
            notes.append(Note(Code.CONTENTS, {"one": one, "other": other}))
        if per_epoch and shortened:
            notes.append(Note(Code.SAMPLES, _samples(shortened[0])))
        if of_times and self.unlike_environments:
            notes.append(unlike(self.unlike_environments, tuple(self.unlike_environments)))
        elif of_times:
            beyond = self._beyond("most", lambda ratio: ratio.low or ratio.median)
            notes += [Note(Code.SUPERLINEAR, each) for each in beyond if MEMORY not in each][:1]
        return [*notes, *beyond_cores(self._runs), *beyond_peak(self._runs)] if of_times else notes

    def _beyond(self, limit: Literal["ideal", "most"], value_of: Callable[[Ratio], float]) -> list[dict[str, Any]]:
        """Of every two sides beyond this limit, the speed-up, the limit, their devices, and whether memory explains it;
        those first of which it does.
        """
        found = []
        for ratio, scaled, side in self._scalings:
            value, at = value_of(ratio), scaled.ideal if limit == "ideal" else scaled.most
            if value > at * (1 + _ROUNDING):
                fewer, more = (count_of(number, "device") for number in (scaled.fewer, scaled.more))
                sides = {"speed_up": value, "limit": float(at), "fewer": fewer, "more": more}
                found.append(sides | at_memory_limit(side))
        return sorted(found, key=lambda beyond: MEMORY not in beyond)

    @cached_property
    def _scalings(self) -> list[tuple[Ratio, Scaling, list[ComparedRun]]]:
        """Of every two sides that nothing but their devices tells apart, the speed-up by the further devices, and the
        runs on the fewer ones.
        """
        if not self.pairs or self._is_across_environments:
            return []
        found = []
        known: dict[tuple[int, int], Scaling | None] = {}  # runs of one configuration share their definition
        for one, other in permutations(range(len(self.pairs[0].runs)), 2):
            alike: dict[Scaling, list[RepeatPair]] = defaultdict(list)
            for repeat, runs in self.pairs:
                couple = runs[one], runs[other]
                key = id(couple[0].definition), id(couple[1].definition)
                if key not in known:
                    known[key] = scaling(*couple)
                if scaled := known[key]:
                    alike[scaled].append(RepeatPair(repeat, couple))
            for scaled, of in alike.items():
                if ratio := self._of(of)._unblocked_ratio(PER_EPOCH):
                    found.append((ratio, scaled, [pair.runs[0] for pair in of]))
        return found

    def _of(self, pairs: list[RepeatPair]) -> Pairing:
        """These pairs alone; the same object where they are all, as much is known of it."""
        return self if tuple(pairs) == self.pairs else Pairing(tuple(pairs))

    @cached_property
    def highest_repeat(self) -> int:
        """The highest repeat of the compared configurations, also of runs that don't count; -1 without runs."""
        runs = (*self._runs, *self.alone)
        return max((highest_repeats(run.runs)[run.run_id] for run in runs), default=-1)

    def caveats(self, *, of_times: bool = True, per_sample: bool = False, metric: str = "") -> tuple[Note, ...]:
        """What a reader must know about these runs. `per_sample`: ratios of times and energies are per sample.
        `metric`: what is compared, as for `blockers`.
        """
        key = "caveats", of_times, per_sample, metric
        if key not in self._notes:
            if metric:
                own = [*of_energies(self._runs, metric)[1], *warmed(self._runs, metric)[1]]
                self._notes[key] = (*self.caveats(of_times=of_times, per_sample=per_sample), *own)
            elif per_sample:
                unequal = [Note(Code.PER_SAMPLE, _samples(couple)) for couple in self.unlike_samples[:1]]
                self._notes[key] = (*self.caveats(of_times=of_times), *unequal)
            else:
                self._notes[key] = tuple(self._caveats(of_times=of_times))
        return self._notes[key]

    def _caveats(self, *, of_times: bool) -> list[Note]:
        differences = self.reported if of_times else self.reported | self.unlike_environments
        notes = [Note(Code.ENTRIES, {"differences": differences})] if differences else []
        if of_times and self.is_apart:
            notes.append(self.apart)
        elif of_times and self.is_one_after_the_other:
            notes.append(Note(Code.ORDER))
        if of_times:
            notes += disturbances(self._runs)
            # What is beyond belief blocks.
            above = self._beyond("ideal", lambda ratio: ratio.median)
            if above and not self.blockers():
                notes.append(Note(Code.AT_MEMORY_LIMIT if MEMORY in above[0] else Code.ABOVE_IDEAL, above[0]))
        if missing := unrecorded(self._runs, of_times=of_times):
            notes.append(Note(Code.UNRECORDED, {"names": ", ".join(missing)}))
        return notes

    @property
    def apart(self) -> Note:
        """That the sides were measured in other sessions than each other, and how many repeats in turn would do."""
        is_in_one_submit = any(len({run.session for run in pair.runs}) == 1 for pair in self.pairs)
        repeats = self.highest_repeat + 1 + DECIDING_REPEATS
        return Note(Code.APART, remedy=Remedy(repeats, in_turn=True, reordered=is_in_one_submit))

    def ratio(self, metric: str) -> Ratio | None:
        """The paired ratio of a metric of `per_run`; None where the runs are not compared, or didn't measure it."""
        return self._ratio(Fraction(metric))

    def speed_up(self, *, with_startup: bool = False) -> Ratio | None:
        """How many times as fast the second run trains: by time, or per sample where epochs hold unequally many."""
        return self._ratio(WITH_STARTUP if with_startup else PER_EPOCH)

    @cached_property
    def _sides(self) -> list[tuple[ComparedRun, ...]]:
        return list(zip(*(pair.runs for pair in self.pairs), strict=True))

    @cached_property
    def _runs(self) -> list[ComparedRun]:
        """All compared runs, each once."""
        return list({id(run): run for pair in self.pairs for run in pair.runs}.values())

    def _ratio(self, fraction: Fraction) -> Ratio | None:
        return None if self.blockers(metric=fraction.metric) else self._unblocked_ratio(fraction)

    def _unblocked_ratio(self, fraction: Fraction) -> Ratio | None:
        if fraction not in self._ratios:
            fractions = {pair.repeat: fraction.of(pair.runs[0], pair.runs[1]) for pair in self.pairs}
            above, below = ({repeat: values[side] for repeat, values in fractions.items()} for side in (0, 1))
            pools_of = dict(zip(fractions, self.pools, strict=True))
            self._ratios[fraction] = paired_ratio(above, below, pools=pools_of)
        return self._ratios[fraction]

    @cached_property
    def _differences(self) -> Differences:
        """All entries that differ between any two compared runs; of several couples the first one's values."""
        differing: Differences = {}
        # Runs share their environments: of thousands of couples few are unlike any before.
        couples = {(id(one.environment), id(other.environment)): (one, other) for one, other in self._all_couples[::-1]}
        for one, other in couples.values():
            if one.environment is not other.environment:
                differing |= environment_match.differences(one.environment, other.environment, lambda _: True)
        return {key: differing[key] for key in sorted(differing)}

    @cached_property
    def _all_couples(self) -> list[tuple[ComparedRun, ComparedRun]]:
        first = self.pairs[0].runs[0] if self.pairs else None
        return self.couples + [(first, run) for run in self.alone if first is not None]

    @cached_property
    def _is_across_environments(self) -> bool:
        """Whether the sides do differ in what `across` allows: another torch or processor may explain any speed-up."""
        differing = [key for key in self._differences if self._is_unlike(key)]
        return any(is_below(key, self.across) for key in (*differing, *self._unlike_probes))

    @cached_property
    def _unlike_probes(self) -> Differences:
        return unlike_probes(self._sides)

    def _must_match(self, key: str) -> bool:
        return not is_below(key, self.across) and self._is_unlike(key)

    def _is_unlike(self, key: str) -> bool:
        """Whether an entry that differs must match."""
        if not environment_match.must_match(key):
            return False
        if key not in environment_match.SET_BY_LAUNCHER:
            return True
        unlike = [(a, b) for a, b in self._all_couples if a.environment.get(key) != b.environment.get(key)]
        set_by_launcher = environment_match.is_set_by_launcher
        return not all(set_by_launcher(key, a.definition, b.definition) for a, b in unlike)


def paired(one: Iterable[ComparedRun], other: Iterable[ComparedRun], *, across: tuple[str, ...] = ()) -> Pairing:
    """Pair the runs of two sides by their repeat. A repeat that one side lacks makes no pair."""
    sides = [{run.repeat: run for run in side} for side in (one, other)]
    pairs = tuple(RepeatPair(repeat, (a, b)) for repeat, a, b in in_both(*sides))
    alone = tuple(run for side, rest in (sides, sides[::-1]) for run in side.values() if run.repeat not in rest)
    return Pairing(pairs, across, alone)


def _samples(couple: tuple[ComparedRun, ComparedRun]) -> dict[str, int]:
    fewer, more = sorted(run.epoch_samples or 0 for run in couple)
    return {"fewer": fewer, "more": more}


MEMORY = "memory"
"""The value of a note that says what shows that fewer devices were at their memory's limit."""
LEAST_HEADROOM = 0.05
"""Share of its memory that is left, below which a run is at its memory's limit."""


def at_memory_limit(side: Sequence[ComparedRun]) -> dict[str, str]:
    """What shows that a side was at its memory's limit, and so slower than its devices: in more than half of its runs
    the allocator found no room and tried again, or less than `LEAST_HEADROOM` was left.

    The most retries of a run, or the least headroom, in words; empty where nothing shows it, as where neither was
    measured.
    """
    retries = [run.value("allocator_retries") or 0 for run in side]
    # Host memory counts pages twice that ranks share: that shows no limit.
    headroom = [run.value("memory_headroom") if "device" in run.words("memory_kind") else None for run in side]
    full = [left is not None and left < LEAST_HEADROOM for left in headroom]
    if 2 * sum(tried > 0 or is_full for tried, is_full in zip(retries, full, strict=True)) <= len(side):
        return {}
    if most := int(max(retries)):
        return {MEMORY: f"up to {most:,} {'retry' if most == 1 else 'retries'} of the allocator in a run"}
    return {MEMORY: f"{text.percent(min(left for left in headroom if left is not None))} left"}


ABOVE_IDEAL = 1.05
"""Times the number of devices: a speed-up whose whole interval lies above is not believed."""


class Scaling(NamedTuple):
    """Two runs of the same work, the second on more devices: how much faster that may make it."""

    fewer: int
    more: int
    """Devices of the one, and of the other."""
    ideal: float
    """Times as fast as the further devices explain."""
    most: float
    """Times as fast as nothing explains. One strategy may be slow on few devices, say for stages of unequal length, so
    that more devices help by more than their number; but it is rarely slower on them than one device is.
    """


def scaling(one: ComparedRun, other: ComparedRun) -> Scaling | None:
    """How much faster the second run may be for its devices; None unless it has more, and nothing else differs.

    Another framework may be faster by any factor, and so may another way to train on one device: the first run is on
    one device, or of the same strategy.
    """
    fewer, more = one.definition["devices"], other.definition["devices"]
    if one.environment.get(FRAMEWORK, "torch") != other.environment.get(FRAMEWORK, "torch"):
        return None
    if fewer >= more or without(one.definition, COMPARED) != without(other.definition, COMPARED):
        return None
    if one.is_one_device:
        return Scaling(fewer, more, ideal=more, most=ABOVE_IDEAL * more)
    if without(one.definition, ("devices", "nodes")) != without(other.definition, ("devices", "nodes")):
        return None
    servers = one.definition.get("strategy.servers", 0)
    return Scaling(fewer, more, ideal=(more - servers) / (fewer - servers), most=ABOVE_IDEAL * more)


One = TypeVar("One")
Other = TypeVar("Other")


def in_both(one: Mapping[int, One], other: Mapping[int, Other]) -> list[tuple[int, One, Other]]:
    """(repeat, value, value) of every repeat that both sides have, in order."""
    return [(repeat, one[repeat], other[repeat]) for repeat in sorted(one.keys() & other.keys())]


def paired_ratio(
    numerator: Mapping[int, float | None],
    denominator: Mapping[int, float | None],
    *,
    pools: Mapping[int, int] | None = None,
) -> Ratio | None:
    """Median of numerator ÷ denominator over the repeats that both have measured; None where there is none.

    Both map repeat → value. A repeat has the same seed and the same round of the sweep on both sides, so what a round
    has in common (a warm machine, a busy neighbour) cancels out. Where a side is 0, there is no ratio. `pools`: those
    of `Pairing`; without them every repeat is a pool of its own.
    """
    pairs = [(repeat, above / below) for repeat, above, below in in_both(numerator, denominator) if above and below]
    return ratio_of_pairs(pairs, pools)


def pools(pairs: Sequence[Sequence[ComparedRun]]) -> tuple[int, ...]:
    """Of each pair of runs the number of its pool. Pools are independent of each other; the pairs of one need not be.

    A pair that was measured in turn with the others of its session is a pool of its own: what changes slowly was the
    same for both sides. Pairs across sessions are in one pool, directly or through others, where

    - they share a session: what differed between these sessions is in all their ratios;
    - the time between the starts of one pair's runs overlaps with another pair's: what changed meanwhile is in both
      ratios. So sides that were measured one after the other are one pool, however many submits each side has.

    All are one pool where one side steadily comes first: a machine that slows down steadily is in every ratio.
    """
    sessions = [{run.session for run in pair} for pair in pairs]
    within: dict[Hashable, list[int]] = defaultdict(list)
    for number, found in enumerate(sessions):
        if len(found) == 1:
            within[next(iter(found))].append(number)
    alone = {n for of_session in within.values() if _in_turn([pairs[n] for n in of_session]) for n in of_session}
    across = [number for number in range(len(pairs)) if number not in alone]
    stretch = dict(zip(across, overlapping([_between_starts(pairs[number]) for number in across]), strict=True))
    numbers = joined(
        [
            {("alone", number)} if number in alone else {*found, ("stretch", stretch[number])}
            for number, found in enumerate(sessions)
        ]
    )
    return (0,) * len(pairs) if _one_comes_first(pairs, numbers) else numbers


def _in_turn(pairs: Sequence[Sequence[ComparedRun]]) -> bool:
    return not came_before([[run.span for run in side] for side in zip(*pairs, strict=True)])


def _one_comes_first(pairs: Sequence[Sequence[ComparedRun]], pools_of: Sequence[int]) -> bool:
    """Whether, of any two sides, one steadily comes before the other from pool to pool."""
    sides = [[run.span for run in side] for side in zip(*pairs, strict=True)]
    return any(comes_first(of_pools(leads, pools_of)) for leads in _leads(sides))


def _leads(sides: Sequence[Sequence[Span]]) -> Iterator[list[float]]:
    """Of every two sides the lead of the first one, pair by pair."""
    for one, other in combinations(sides, 2):
        yield [lead_s(first, second) for first, second in zip(one, other, strict=True)]


def lead_s(one: Span, other: Span) -> float:
    """How much later than one run the other was, from middle to middle; 0 where either was half through while the other
    ran, and where a time is unknown.
    """
    first, second = (fmean(span) if all(map(isfinite, span)) else inf for span in (one, other))
    if inf in (first, second) or one[0] <= second <= one[1] or other[0] <= first <= other[1]:
        return 0.0
    return second - first


STEADY_LEAD = 2.0
"""Mean of the leads, in standard errors, from which one side comes first.

Under a steady drift that is all there is, log ratios are the leads times a constant, so their t statistic is that of
the leads, and stays below every critical one. Rounds in reversed pairs reach 1 at most.
"""


def comes_first(leads: Sequence[float]) -> bool:
    """Whether one side steadily comes first, by its leads in independent pairs, at least three."""
    if len(leads) < FEWEST_REPEATS:
        return False
    return abs(fmean(leads)) * sqrt(len(leads)) > STEADY_LEAD * stdev(leads)


def _between_starts(pair: Sequence[ComparedRun]) -> Span:
    """From the start of the first run of a pair to that of its last; without end where one is unknown."""
    starts = [run.span[0] for run in pair]
    return min(starts), float("inf") if float("-inf") in starts else max(starts)


def overlapping(stretches: Sequence[Span]) -> tuple[int, ...]:
    """Number stretches of time so that those that overlap, directly or through others, have one number."""
    numbers = [0] * len(stretches)
    number, until = 0, float("-inf")
    for place in sorted(range(len(stretches)), key=lambda place: stretches[place]):
        first, last = stretches[place]
        number += first > until
        until = max(until, last)
        numbers[place] = number
    return tuple(numbers)


def joined(groups: Sequence[Collection[Hashable]]) -> tuple[int, ...]:
    """Number groups so that those with a common member, directly or through others, have one number."""
    first: dict[Hashable, int] = {}
    below = list(range(len(groups)))

    def root(number: int) -> int:
        while below[number] != number:
            below[number] = below[below[number]]
            number = below[number]
        return number

    for number, group in enumerate(groups):
        for member in group:
            below[root(first.setdefault(member, number))] = root(number)
    return tuple(map(root, below))


ONE_SIDED = 0.75
"""Share of pairs of runs, one of each side, in which the same side comes first, from which sides are apart.

Of sides in turn it is at most 0.5 + 0.5 ÷ repeats: 0.75 for two repeats. Of two sides in turn only by one early run, it
is 1 − 1 ÷ repeats.
"""


def one_after_the_other(sides: Sequence[Sequence[Span]]) -> bool:
    """Whether what changes with time may be in the ratio of any two sides: one came before the other as a whole (a
    machine that changed once), or pair by pair (a machine that drifts steadily).

    `sides`: of each the spans of its runs, at least two, pair by pair.
    """
    return came_before(sides) or any(map(comes_first, _leads(sides)))


def came_before(sides: Sequence[Sequence[Span]]) -> bool:
    """Whether the runs of any side mostly began before those of another.

    The measure is that of Mann and Whitney (1947), the probability that a run of one side comes before one of the
    other. Runs of unknown times don't count.
    """
    known = [[start for start, _ in side if isfinite(start)] for side in sides]
    return any(_is_one_sided(one, other) for one, other in combinations(known, 2) if min(len(one), len(other)) > 1)


def _is_one_sided(one: Sequence[float], other: Sequence[float]) -> bool:
    later = sorted(other)
    earlier = sum(len(later) - (bisect_left(later, first) + bisect_right(later, first)) / 2 for first in one)
    share = earlier / (len(one) * len(other))
    return max(share, 1 - share) > ONE_SIDED


def pairing_of(runs: Runs, ids_of_repeats: Mapping[int, tuple[str, ...]]) -> Pairing:
    """The runs of every repeat, as an effect compares them."""
    return _pairing_of(runs, *ids_of_repeats.items())


@once  # many claims compare the same runs
def _pairing_of(runs: Runs, *ids_of_repeats: tuple[int, tuple[str, ...]]) -> Pairing:
    known = compared_runs(runs)
    return Pairing(tuple(RepeatPair(repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in ids_of_repeats))


def choice_of(runs: Runs, ids_of_repeats: Mapping[int, tuple[str, ...]]) -> Pairing:
    """The candidates of every repeat that has all of them; those of the others stand alone."""
    known = compared_runs(runs)
    every = [RepeatPair(repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in ids_of_repeats.items()]
    kinds = {pair.repeat: [id(run.definition) for run in pair.runs] for pair in every}
    most = max(kinds.values(), key=len, default=[])
    whole = tuple(pair for pair in every if kinds[pair.repeat] == most)
    return Pairing(whole, alone=tuple(run for pair in every if pair not in whole for run in pair.runs))
