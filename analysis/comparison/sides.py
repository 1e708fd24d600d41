"""Is B faster than A? It compares configurations before and after a change, on two machines, or with two strategies.

A ratio is B ÷ A of one repeat. The verdict is about time. Runs are paired where all that defines them is equal, except
for the keys that are compared.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import format_exclusions, require_counted
from analysis.comparison.issues import UnlikeWork
from analysis.comparison.notes import Code, Note, Subject, format_differences, write
from analysis.comparison.pairing import Pairing, joined, paired
from analysis.comparison.ratio import Ratio, ratio_of_pairs
from analysis.comparison.run import ComparedRun, compared_runs
from analysis.comparison.speed import Speed, judged, speed_of
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import (
    PROBED,
    WAYS,
    canonical,
    differences_within,
    is_below,
    nearest,
    plain,
    unlike_works,
    without,
    works,
)
from analysis.text import listed
from parallelbench.config.build import completed
from parallelbench.errors import ConfigError, choices, count_of
from parallelbench.measure.environment_match import VERSION, flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from analysis.comparison.campaign import Configuration
    from analysis.comparison.pairing import RepeatPair
    from analysis.comparison.work import Differences, Work
    from analysis.runs.reader import Runs


TIME, RATE = "steady_epoch_time_s", "throughput_samples_per_s"
MEASURED = (TIME, RATE, "gpu_energy_per_sample_j", "peak_memory_sum_bytes")
"""The metrics of `per_run` that are compared."""
OVERALL, CONFIGURATION = "all configurations", "configuration"
"""The row for all; the key of `by` whose values are the report's configurations."""


@dataclass(frozen=True)
class Compared:
    """One configuration on both sides."""

    group: str
    configuration: str
    a: Mapping[str, float | None]
    b: Mapping[str, float | None]
    """Metric → median over the paired repeats."""
    speed: Speed
    """How fast B trains beside A; where something blocks the comparison, the notes say what."""
    others: Mapping[str, Ratio | None]
    """Any other metric → B ÷ A; None where not both sides have measured it in one repeat."""
    per_sample: bool = False
    """Whether `time` is of the time per sample, as epochs hold unequally many."""

    @property
    def time(self) -> Ratio | None:
        """B ÷ A of the time per epoch, or per sample."""
        return self.speed.ratio and self.speed.ratio.inverse

    @property
    def ratios(self) -> dict[str, Ratio | None]:
        """Metric → B ÷ A, the time first."""
        return {TIME: self.time, **self.others}

    @property
    def verdict(self) -> SpeedVerdict:
        """How B compares with A."""
        return self.speed.verdict

    @property
    def further_repeats(self) -> int | None:
        """How many more repeats of each side would decide where no difference is shown."""
        return self.speed.further_repeats

    @property
    def shown_verdict(self) -> str:
        """The verdict, with what is missing for another one."""
        if self.verdict is not SpeedVerdict.NO_STEADY_EPOCH:
            return shown_verdict(self.speed)
        why = "epochs=1, at least 2 are needed" if self.speed.single_epoch else "all are the first of their attempt"
        return f"{self.verdict} on side {' and '.join('AB'[side] for side in self.speed.untimed)}: {why}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    rows: tuple[Compared, ...]
    together: Speed
    """How fast B trains beside A, in each repeat the geometric mean over all configurations."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    """Configurations that one side lacks, or has no counted run of."""
    lost: tuple[str, ...]
    """Configurations of which B lacks repeats that A counts, with how many."""
    gained: tuple[str, ...]
    """Configurations of which A lacks repeats that B counts, likewise."""
    notes: tuple[str, ...]
    """What a reader must know about the ratios, and which runs don't count."""

    @property
    def per_sample(self) -> bool:
        """Whether any ratio of times is of the time per sample."""
        return any(row.per_sample for row in self.rows)

    @property
    def overall(self) -> Ratio | None:
        """B ÷ A of the time of all configurations together; None where no repeat has all."""
        return self.together.ratio and self.together.ratio.inverse

    @property
    def verdict(self) -> SpeedVerdict:
        """How B compares with A over all configurations together."""
        return self.together.verdict

    @property
    def further_repeats(self) -> int | None:
        """How many more repeats of each side would decide where no difference is shown."""
        return self.together.further_repeats

    @property
    def shown_verdict(self) -> str:
        """The verdict, with the number of pairs where these are too few."""
        return shown_verdict(self.together)

    @property
    def frame(self) -> pl.DataFrame:
        """One row per configuration and metric, and one for all: `a` and `b` are medians, `ratio` is B ÷ A."""
        rows = [_row_of_frame(row, name) for row in self.rows for name in MEASURED]
        rows.append([None, OVERALL, TIME, None, None, *_figures(self.overall), self.verdict.value])
        names, numbers = ("group", "configuration", "metric"), ("a", "b", "ratio", "low", "high")
        schema = dict.fromkeys(names, pl.String) | dict.fromkeys(numbers, pl.Float64)
        return pl.DataFrame(rows, schema=schema | {"pairs": pl.Int32, "verdict": pl.String}, orient="row")


def _row_of_frame(row: Compared, name: str) -> list[Any]:
    verdict = row.verdict.value if name == TIME else None
    return [row.group, row.configuration, name, row.a[name], row.b[name], *_figures(row.ratios[name]), verdict]


def _figures(ratio: Ratio | None) -> list[Any]:
    return [ratio.median, ratio.low, ratio.high, ratio.n] if ratio else [None, None, None, 0]


def shown_verdict(speed: Speed) -> str:
    """A verdict, with the number of pairs where these are too few."""
    return f"{speed.verdict}: n={speed.pairs}" if speed.verdict is SpeedVerdict.TOO_FEW else speed.verdict.value


def compare(a: Runs, b: Runs, *, across: Sequence[str] = ()) -> Comparison:
    """Compare the runs of `b` with those of `a`, configuration by configuration, repeat by repeat.

    Only runs count that the report counts. Raises `UnlikeWork` where the works of the sides differ in what must match,
    or the environments of all rows, unless `across` names the keys (a component such as "strategy" with all its
    options); `ConfigError` where there is nothing to compare. Of several rows, one that is not comparable, as in the
    report, has a note in place of a ratio.
    """
    across = tuple(across)
    for runs in (a, b):
        require_counted(runs)
    _require_known(across, a, b)
    one, other = Side(a, across), Side(b, across)
    matched = match(one, other)
    if matched.unlike:
        raise _refusal(a, b, across)
    _require_two_measurements(matched.rows)
    _require_believable(matched.rows)
    rows, whole = judged_together(tuple(map(_compared, matched.rows)))
    excluded_lines = [f"{name}: {line}" for name, runs in (("A", a), ("B", b)) for line in format_exclusions(runs)]
    lost, gained = (tuple(_lacking(*sides)) for sides in ((one, other), (other, one)))
    return Comparison(
        rows,
        whole,
        only_a=matched.only_a,
        only_b=matched.only_b,
        lost=lost,
        gained=gained,
        notes=(
            *write(matched.notes, of=len(matched.rows)),
            *write(matched.notes_on_all(OVERALL, whole.ratio)),
            *excluded_lines,
        ),
    )


def judged_together(rows: tuple[Compared, ...]) -> tuple[tuple[Compared, ...], Speed]:
    """The rows, and all together: verdicts that allow for each other."""
    if len(rows) == 1:  # which is all of them
        return rows, _overall(rows)
    *speeds, whole = judged([*(row.speed for row in rows), _overall(rows)])
    return tuple(replace(row, speed=speed) for row, speed in zip(rows, speeds, strict=True)), whole


_UNBELIEVABLE = (Code.SUPERLINEAR, Code.ABOVE_PEAK, Code.CORES)


def _require_believable(rows: Sequence[ComparedRow]) -> None:
    """Refuse where in every row several devices are faster than one by more than their number, or one does more than
    it can.
    """
    found = [[note for note in row.pairing.blockers() if note.code in _UNBELIEVABLE] for row in rows]
    if rows and all(found):
        raise ConfigError(f"{rows[0].configuration} ({rows[0].group}) is not compared: {found[0][0]}")


def _lacking(one: Side, other: Side) -> Iterator[str]:
    """The configurations of which the other side lacks repeats, with how many, and of how many."""
    for key in (key for key in one.members if key in other.members):
        repeats, others = ({run.repeat for run in side.counted(key)} for side in (one, other))
        if gone := repeats - others:
            yield f"{len(gone)} of {count_of(len(repeats), 'repeat')} of {one.name(key)}"


def _require_known(across: Sequence[str], a: Runs, b: Runs) -> None:
    known = Side(a, ()).names | Side(b, ()).names
    if "scaling" in across:
        raise ConfigError(
            "strong and weak scaling are not compared: one fixes the global batch, the other the batch per device, so "
            "their steps hold unequally many samples; compare within each of them"
        )
    for name in across:
        if name not in known:
            raise ConfigError(f"--across {name} is no key of these runs; {choices(name, known)}")


def _refusal(a: Runs, b: Runs, across: tuple[str, ...]) -> UnlikeWork:
    """Name everything that differs at once, so that naming it in --across is enough."""
    unlike: Differences = {}
    try:
        while more := match(Side(a, (*across, *unlike)), Side(b, (*across, *unlike))).unlike:
            unlike = unlike | more
    except ConfigError:  # a side has several values of these keys
        return UnlikeWork(unlike, across=())
    return UnlikeWork(unlike, across=(*across, *unlike))


def _require_two_measurements(rows: Iterable[ComparedRow]) -> None:
    """Refuse a copied folder: it holds the same measurements, so it would always be as fast."""
    for row in rows:
        for repeat, (one, other) in row.pairing.pairs:
            if one.run_id == other.run_id and one.span == other.span and math.isfinite(one.span[0]):
                what = f"{row.configuration}, repeat {repeat}: both sides hold the same run"
                raise ConfigError(f"{what} (equal times of day): compare folders that were measured separately")


def _compared(row: ComparedRow) -> Compared:
    others = {name: row.pairing.ratio(name) for name in MEASURED if name != TIME}
    a, b = ({name: _median(row.pairing.pairs, side, name) for name in MEASURED} for side in (0, 1))
    speed, per_sample = speed_of(row.pairing), row.pairing.is_per_sample
    return Compared(row.group, row.configuration, a, b, speed, others, per_sample)


def _median(pairs: Iterable[RepeatPair], side: int, metric: str) -> float | None:
    median = pl.Series([pair.runs[side].value(metric) for pair in pairs], dtype=pl.Float64).median()
    return None if median is None else float(median)  # type: ignore[arg-type]


def _overall(rows: Sequence[Compared]) -> Speed:
    ratios = [row.speed.ratio for row in rows if row.speed.ratio]
    if len(ratios) < len(rows) or not ratios:
        return Speed(None, SpeedVerdict.INCOMPLETE)
    speeds = [dict(ratio.pairs) for ratio in ratios]
    repeats = sorted(set.intersection(*map(set, speeds)))
    means = [(r, math.exp(sum(math.log(speed[r]) for speed in speeds) / len(speeds))) for r in repeats]
    # Repeats that share a pool in any row share one in all rows together.
    of_row = [dict(zip((r for r, _ in ratio.pairs), ratio.pools, strict=True)) for ratio in ratios]
    groups = [{(place, pools[r]) for place, pools in enumerate(of_row)} for r in repeats]
    return Speed(ratio_of_pairs(means, dict(zip(repeats, joined(groups), strict=True))))


@dataclass(frozen=True)
class ComparedRow:
    """A configuration that both sides have measured."""

    group: str
    configuration: str
    pairing: Pairing


@dataclass(frozen=True)
class Matched:
    """The rows, and the configurations that only one side has."""

    unlike: Differences
    """What forbids the comparison."""
    rows: tuple[ComparedRow, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def notes(self) -> list[Note]:
        """What blocks the rows, and what limits them."""
        names = [row.configuration for row in self.rows]
        subjects = [Subject(row.configuration, row.group if names.count(row.configuration) > 1 else "")
                    for row in self.rows]  # fmt: skip
        each = [(whose, row.pairing, metric) for whose, row in zip(subjects, self.rows, strict=True)
                for metric in MEASURED]  # fmt: skip
        blockers = [note.about(whose) for whose, pairing, of in each for note in pairing.blockers(metric=of)]
        caveats = (note.about(whose) for whose, pairing, of in each
                   for note in pairing.caveats(per_sample=True, metric=of))  # fmt: skip
        return [*blockers, *caveats]

    def notes_on_all(self, name: str, ratio: Ratio | None) -> list[Note]:
        """What limits all rows together, and none by itself: rows may tie each other's pairs into fewer pools."""
        if ratio is None or not ratio.is_apart or any(row.pairing.is_apart for row in self.rows):
            return []
        return [Note(Code.APART, subjects=(Subject(name),))]


@dataclass(frozen=True)
class Side:
    """The counted runs of one side."""

    runs: Runs
    across: tuple[str, ...]
    """Keys that may differ from the other side's."""

    @cached_property
    def members(self) -> dict[str, list[Configuration]]:
        """A definition without the keys that may differ, as text → the configurations that count and have it."""
        counted = ([each for each in alike if each.counts] for alike in campaign(self.runs).alike_but(self.across))
        return {canonical(without(alike[0].definition, self.across)): alike for alike in counted if alike}

    def counted(self, key: str) -> list[ComparedRun]:
        """The runs of a member that count, in the order of their repeats."""
        return sorted((run for each in self.members[key] for run in each.runs.values()), key=lambda run: run.repeat)

    @cached_property
    def names(self) -> set[str]:
        """The keys in which the other side could differ."""
        runs = [run for each in campaign(self.runs).counted for run in each.runs.values()]
        works = {key for run in runs for key in run.definition}
        entries = {key for run in runs for key in run.environment} - {VERSION}
        return {key.removesuffix(".name") for key in works | entries | PROBED.keys() if not key.endswith("._target_")}

    def work(self, key: str) -> Work:
        """The definition of a member's runs, without the keys that may differ."""
        return without(self.members[key][0].definition, self.across)

    def name(self, key: str) -> str:
        """The configuration of a member, with its group where there are several."""
        first = self.members[key][0]
        return f"{first.name} ({first.group})" if len(campaign(self.runs).groups) > 1 else first.name


def match(a: Side, b: Side) -> Matched:
    """Pair the runs of both sides."""
    for name, side in (("the first", a), ("the second", b)):
        _require_one_meaning(side, name)
    shared = [key for key in a.members if key in b.members]
    only_a, only_b = ([key for key in side.members if key not in shared] for side in (a, b))
    rows = tuple(_row(a, b, key) for key in shared)
    works, others = [a.work(key) for key in only_a], [b.work(key) for key in only_b]
    unlike = unlike_works(works, others)
    if not (unlike or shared) and works and others:
        unlike = min((nearest(work, others) for work in works), key=len)
    environments = [row.pairing.unlike_environments for row in rows]
    if all(environments):  # else the rows that are alike are compared
        for each in environments:
            unlike = each | unlike
    return Matched(unlike, rows, tuple(map(a.name, only_a)), tuple(map(b.name, only_b)))


def _row(a: Side, b: Side, key: str) -> ComparedRow:
    one, other = a.members[key][0], b.members[key][0]
    renamed = other.name != one.name and any(is_below(k, WAYS) for k in a.across)
    pairing = paired(a.counted(key), b.counted(key), across=a.across)
    return ComparedRow(one.group, f"{one.name} → {other.name}" if renamed else one.name, pairing)


def _require_one_meaning(side: Side, name: str) -> None:
    """Refuse where a key that may differ between the sides differs within one side."""
    for members in side.members.values():
        if within := differences_within([each.definition for each in members]):
            names = sorted({each.name for each in members})
            raise ConfigError(
                f"{listed(names)}: {name} side has runs that differ ({format_differences(within)}): choose folders, or "
                "--by, so that each side has one of them"
            )


def by(runs: Runs, key: str, one: Any, other: Any, *, across: Sequence[str] = ()) -> Comparison:
    """Compare the runs with `key=other` with those with `key=one`, e.g. `by(runs, "strategy", "ddp", "fsdp")`.

    `key` may be "configuration", whose values are those of the report, e.g. "single × 1" and "ddp × 2": then strategy,
    devices and nodes may differ.
    """
    key, run_ids = recorded_key(runs, key), run_ids_by(runs, key)
    one, other = (as_recorded(plain(value), run_ids) for value in (one, other))
    if one == other:
        raise ConfigError(f"--by {key}: both sides are {key}={one}; {choices(one, set(run_ids) - {one})}")
    for value in (one, other):
        if value not in run_ids:
            told = f"in {runs.root} has {key}={value}; {choices(value, run_ids)}"
            if twins := sum(skipped.is_twin for skipped in runs.skipped):
                skipped = f"skipped: {count_of(twins, 'run')} that other folders hold, too; name one folder"
                raise ConfigError(f"--by {key}: no run that was read {told} ({skipped})")
            raise ConfigError(f"--by {key}: no run {told}")
    # Folders that can't be read belong to neither side: they are reported once.
    readable = replace(runs, skipped=())
    between = WAYS if key == CONFIGURATION else (key,)
    sides = (readable.only(run_ids[one]), readable.only(run_ids[other]))
    try:
        compared = compare(*sides, across=(*across, *between))
    except UnlikeWork as refused:
        named = [key for key in refused.across if key not in between]
        raise UnlikeWork(refused.differences, across=named) from None
    unread = format_exclusions(replace(runs.only([]), skipped=runs.skipped))
    return replace(compared, notes=(*compared.notes, *unread))


def run_ids_by(runs: Runs, key: str) -> dict[str, list[str]]:
    """Value of a key, as people write it → the runs that have it; `ConfigError` where no run has the key."""
    require_counted(runs)
    if key == CONFIGURATION:
        values = {run.run_id: each.name for each in campaign(runs).configurations for run in each.every}
    else:
        names = Side(runs, ()).names | {CONFIGURATION}
        key = recorded_key(runs, key)
        if key not in names:
            raise ConfigError(f"--by {key}: no run has this key; {choices(key, names)}")
        configs = runs.run.select("run_id", "config_json").rows()
        values = {run_id: _value(runs, run_id, key, config) for run_id, config in configs}
    run_ids: dict[str, list[str]] = {}
    for run_id, value in values.items():
        run_ids.setdefault(plain(value), []).append(run_id)
    return run_ids


def recorded_key(runs: Runs, key: str) -> str:
    """The key of the runs that is meant: `flags` and `program.steps` are options of a program's strategy."""
    names, own = Side(runs, ()).names, key.removeprefix("program.")
    meant = (f"strategy.axes.{own}", f"strategy.{own}" if own != key else key)
    return next((name for name in meant if name in names), key)


def as_recorded(value: str, known: Iterable[str]) -> str:
    """The one of these values that is equal to what was typed: 1e6 is 1000000.0, True is true; else what was typed."""
    known = list(known)
    return value if value in known else next((each for each in known if _read(each) == _read(value)), value)


def _read(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value.lower() if value.lower() in ("true", "false", "null") else value


def _value(runs: Runs, run_id: str, key: str, config_json: str) -> Any:
    values = flatten(completed(json.loads(config_json))) | works(runs)[run_id] | compared_runs(runs)[run_id].environment
    return values.get(f"{key}.name", values.get(key))
