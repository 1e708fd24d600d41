"""The pairing of runs: repeat by repeat, with what blocks the comparison, what limits it, and its ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import polars as pl

from analysis.comparison.groups import definitions
from analysis.comparison.policy import Blocker, Caveat, Issue, Remedies, is_below
from analysis.comparison.remedy import OneRun, remedies
from analysis.comparison.sessions import UNKNOWN, blocks, in_turn, sessions_of, spans
from analysis.metrics import per_run
from analysis.stats import ratio_of_pairs
from parallelbench.store import environment_match

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from analysis.comparison.policy import Differences, Work
    from analysis.comparison.sessions import Span
    from analysis.reader import Runs
    from analysis.stats import Ratio

PARITY = "measure.parity"
"""Reported beside the environment where it differs."""
One = TypeVar("One")
Other = TypeVar("Other")


@dataclass(frozen=True, eq=False, slots=True)
class ComparedRun:
    """The data of a run that a comparison needs."""

    runs: Runs
    run_id: str
    repeat: int
    definition: Work
    """Its definition, without its repeat."""
    environment: Work
    """The entries of its environment that must match, or are reported."""
    data_samples: int | None
    """Samples of its training set; None where an old result doesn't say."""
    epoch_samples: int | None
    """Samples that it trains on in an epoch; likewise."""

    def value(self, metric: str) -> float | None:
        """A metric of `per_run`."""
        return _values(self.runs, metric)[self.run_id]

    @property
    def span(self) -> Span:
        """Unix times of the start of its first and the end of its last epoch; infinite where unknown."""
        return spans(self.runs).get(self.run_id, UNKNOWN)

    @property
    def session(self) -> Hashable:
        """What it was measured in, together with others."""
        return sessions_of(self.runs)[self.run_id]


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

    @property
    def couples(self) -> list[tuple[ComparedRun, ComparedRun]]:
        """Every two runs of a repeat."""
        return [couple for pair in self.pairs for couple in combinations(pair.runs, 2)]

    @cached_property
    def unlike_environments(self) -> Differences:
        """The entries of the environment that must match and differ in any pair."""
        return {key: values for key, values in self._differences.items() if self._must_match(key)}

    @cached_property
    def reported(self) -> Differences:
        """The entries of the environment that may differ, and do."""
        return {key: values for key, values in self._differences.items() if not self._must_match(key)}

    @cached_property
    def unlike_samples(self) -> tuple[tuple[ComparedRun, ComparedRun], ...]:
        """The pairs of runs whose epochs hold unequally many samples."""
        known = (couple for couple in self.couples if all(run.epoch_samples is not None for run in couple))
        return tuple((one, other) for one, other in known if one.epoch_samples != other.epoch_samples)

    @cached_property
    def is_one_after_the_other(self) -> bool:
        """Whether all runs of one side ended before any run of the other. Runs of one sweep are interleaved."""
        return len(self.pairs) > 1 and not in_turn([pair.runs for pair in self.pairs])

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Of each pair its block (`sessions.blocks`)."""
        return blocks([pair.runs for pair in self.pairs])

    @property
    def is_apart(self) -> bool:
        """Whether all pairs are in one block, so that nothing shows what the sessions have made of the ratios."""
        return len(self.pairs) > 1 and len(set(self.blocks)) == 1

    def blockers(self, *, of_times: bool = True, per_epoch: bool = False) -> tuple[Issue, ...]:
        """Why these runs are not compared; empty where they are.

        `of_times`: times, energies or memory are compared. `per_epoch`: the metric grows with the samples of an epoch.
        """
        issues = []
        # Where the data sets are what is compared, epochs hold what they hold.
        shortened = [couple for couple in self.unlike_samples if couple[0].data_samples == couple[1].data_samples]
        other_data = [couple for couple in self.unlike_samples if couple not in shortened and _has_same_data(*couple)]
        if other_data:
            issues.append(Issue(Blocker.DATA, _samples(other_data[0])))
        if per_epoch and shortened:
            issues.append(Issue(Blocker.SAMPLES, _samples(shortened[0])))
        if of_times and self.unlike_environments:
            issues.append(Issue(Blocker.ENVIRONMENT, self.unlike_environments, find_remedies=self.remedies))
        return tuple(issues)

    def remedies(self) -> Remedies:
        """The commands that compare the sides in spite of what differs, or measure both alike."""
        if not self.pairs or len(self.pairs[0].runs) != 2:
            return Remedies()
        one, other = (OneRun(run.runs, run.run_id) for run in self.pairs[0].runs)
        return remedies(one, other, [pair.repeat for pair in self.pairs])

    def caveats(self, *, of_times: bool = True, per_sample: bool = False) -> tuple[Issue, ...]:
        """What a reader must know about these runs. `per_sample`: ratios of times and energies are per sample."""
        differences = self.reported if of_times else self.reported | self.unlike_environments
        issues = [Issue(Caveat.ENVIRONMENT, differences)] if differences else []
        if of_times and self.is_apart:
            issues.append(Issue(Caveat.APART, {}, find_remedies=self.remedies))
        elif of_times and self.is_one_after_the_other:
            issues.append(Issue(Caveat.ORDER, {}))
        if per_sample and self.unlike_samples:
            issues.append(Issue(Caveat.SAMPLES, _samples(self.unlike_samples[0])))
        return tuple(issues)

    def ratio(self, metric: str) -> Ratio | None:
        """The paired ratio of a metric of `per_run`; None where the runs are not compared, or didn't measure it."""
        return self._ratio(lambda one, other: (other.value(metric), one.value(metric)))

    def speed_up(self, *, with_startup: bool = False) -> Ratio | None:
        """How many times as fast the second run trains: by time, or per sample where epochs hold unequally many."""
        time, rate = "steady_epoch_time_s", "throughput_samples_per_s"
        if with_startup:
            time, rate = "total_time_s", "throughput_with_startup_samples_per_s"

        def times_as_fast(one: ComparedRun, other: ComparedRun) -> tuple[float | None, float | None]:
            if one.epoch_samples is not None and one.epoch_samples == other.epoch_samples:
                return one.value(time), other.value(time)
            return other.value(rate), one.value(rate)

        return self._ratio(times_as_fast)

    def exchanged(self) -> Pairing:
        """The same pairs with the sides exchanged."""
        return replace(self, pairs=tuple(RepeatPair(repeat, runs[::-1]) for repeat, runs in self.pairs))

    def _ratio(self, fraction: Callable[[ComparedRun, ComparedRun], tuple[float | None, float | None]]) -> Ratio | None:
        if self.blockers():
            return None
        fractions = {pair.repeat: fraction(pair.runs[0], pair.runs[1]) for pair in self.pairs}
        above, below = ({repeat: values[side] for repeat, values in fractions.items()} for side in (0, 1))
        return paired_ratio(above, below, blocks=dict(zip(fractions, self.blocks, strict=True)))

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

    @property
    def _all_couples(self) -> list[tuple[ComparedRun, ComparedRun]]:
        first = self.pairs[0].runs[0] if self.pairs else None
        return self.couples + [(first, run) for run in self.alone if first is not None]

    def _must_match(self, key: str) -> bool:
        if is_below(key, self.across) or not environment_match.must_match(key):
            return False
        if key not in environment_match.SET_BY_LAUNCHER:
            return True
        unlike = [(a, b) for a, b in self._all_couples if a.environment.get(key) != b.environment.get(key)]
        set_by_launcher = environment_match.is_set_by_launcher
        return not all(set_by_launcher(key, a.definition, b.definition) for a, b in unlike)


def _has_same_data(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether two runs were asked to train on the same data set."""
    data = [{key: value for key, value in run.definition.items() if is_below(key, ("data",))} for run in (one, other)]
    return data[0] == data[1]


def paired(one: Iterable[ComparedRun], other: Iterable[ComparedRun], *, across: tuple[str, ...] = ()) -> Pairing:
    """Pair the runs of two sides by their repeat. A repeat that one side lacks makes no pair."""
    sides = [{run.repeat: run for run in side} for side in (one, other)]
    pairs = tuple(RepeatPair(repeat, (first, second)) for repeat, first, second in in_both(*sides))
    alone = tuple(run for side, rest in (sides, sides[::-1]) for run in side.values() if run.repeat not in rest)
    return Pairing(pairs, across, alone)


def in_both(one: Mapping[int, One], other: Mapping[int, Other]) -> list[tuple[int, One, Other]]:
    """(repeat, value, value) of every repeat that both sides have, in order."""
    return [(repeat, one[repeat], other[repeat]) for repeat in sorted(one.keys() & other.keys())]


def paired_ratio(
    numerator: Mapping[int, float | None],
    denominator: Mapping[int, float | None],
    *,
    blocks: Mapping[int, int] | None = None,
) -> Ratio | None:
    """Median of numerator ÷ denominator over the repeats that both have measured; None where there is none.

    Both map repeat → value. A repeat has the same seed and the same round of the sweep on both sides, so what a round
    has in common (a warm machine, a busy neighbour) cancels out. Where a side is 0, there is no ratio. `blocks`: those
    of `Pairing`; without them every repeat is a block of its own.
    """
    pairs = [(repeat, above / below) for repeat, above, below in in_both(numerator, denominator) if above and below]
    return ratio_of_pairs(pairs, blocks)


@lru_cache(maxsize=8)
def compared_runs(runs: Runs) -> dict[str, ComparedRun]:
    """Run id → the data of the run that a comparison needs."""
    environments, defined = _circumstances(runs), definitions(runs)
    columns = ("run_id", "repeat", "train_samples", "dropped_samples")
    return {
        run_id: ComparedRun(
            runs=runs,
            run_id=run_id,
            repeat=repeat,
            definition=defined[run_id],
            environment=environments[run_id],
            data_samples=samples,
            epoch_samples=None if samples is None or dropped is None else samples - dropped,
        )
        for run_id, repeat, samples, dropped in runs.run.select(columns).rows()
    }


@lru_cache(maxsize=8)
def environments_of(runs: Runs) -> dict[str, Work]:
    """Run id → the entries of its environment that must match or are reported. Equal ones share one object."""
    read: dict[Any, Work] = {}
    of_runs = {}
    for run_id, text in runs.run.select("run_id", "environment_json").rows():
        if text not in read:
            parts = msgspec.json.decode(text or "{}", type=dict[str, msgspec.Raw])
            # Nearly all runs have a load average of their own. What else they have in common is read once.
            same = tuple((key, bytes(raw)) for key, raw in parts.items() if key not in environment_match.VOLATILE)
            if same not in read:
                read[same] = _relevant(msgspec.json.decode(text or "{}"))
            read[text] = read[same]
        of_runs[run_id] = read[text]
    return of_runs


def _circumstances(runs: Runs) -> dict[str, Work]:
    """Run id → its environment, and whether parity was checked: the check warms up the devices and their libraries.

    Equal ones share one object.
    """
    checked = pl.col("config_json").str.json_path_match(f"$.{PARITY}") == "true"
    shared: dict[tuple[int, bool | None], Work] = {}
    of_runs = {}
    for run_id, parity in runs.run.select("run_id", checked).rows():
        environment = environments_of(runs)[run_id]
        of_runs[run_id] = shared.setdefault((id(environment), parity), environment | {PARITY: parity})
    return of_runs


def _relevant(environment: Mapping[str, Any]) -> Work:
    entries = environment_match.entries(environment)
    kept = (environment_match.must_match, environment_match.is_reported)
    return {key: value for key, value in entries.items() if any(keeps(key) for keeps in kept)}


def _samples(couple: tuple[ComparedRun, ComparedRun]) -> Differences:
    low, high = sorted(run.epoch_samples or 0 for run in couple)
    return {"train_samples": (low, high)}


@lru_cache(maxsize=16)
def _values(runs: Runs, metric: str) -> dict[str, float | None]:
    return dict(zip(runs.run["run_id"], per_run(runs)[metric], strict=True))
