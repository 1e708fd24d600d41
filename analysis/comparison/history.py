"""One configuration over the states of its sources: a metric by commit, and the changes that the points support.

A point holds all repeats of one state of the sources. Points stand in the order in which they were measured. They are
never joined where data, devices or environments are unlike in what must match: each such kind of machine is a series.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from analysis import text
from analysis.comparison.change_points import FEWEST_POINTS, MARGIN, MOST_POINTS, shifts, smallest_seen_last
from analysis.comparison.exclusions import Exclusion, excluded
from analysis.comparison.issues import (
    OF_START_UP,
    WITH_FIRST_EPOCH,
    beyond_cores,
    beyond_peak,
    of_energies,
    unlike_contents,
    unlike_probes,
)
from analysis.comparison.notes import format_differences
from analysis.comparison.ratio import ERROR, FEWEST_REPEATS, Spread, ratio_median
from analysis.comparison.run import compared_runs
from analysis.comparison.sides import as_recorded
from analysis.comparison.work import (
    DEVICE,
    canonical,
    configuration_label,
    is_below,
    plain,
    without,
    work_differences,
    work_label,
)
from analysis.metrics.columns import per_run_columns
from analysis.runs.reader import load
from parallelbench.errors import ConfigError, choices, count_of
from parallelbench.measure import environment_match
from parallelbench.results.folder import find_runs, no_runs, require_folder
from parallelbench.results.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from analysis.comparison.change_points import Margins
    from analysis.comparison.ratio import Ends
    from analysis.comparison.run import ComparedRun
    from analysis.comparison.work import Differences, Work
    from parallelbench.results.declaration import Column


Item = TypeVar("Item")
UNCHANGED, WORSE = 0, 1
"""Exit codes of a history."""
_PROGRAM_SOURCES, _PLUGIN_SOURCES = "strategy.sources", "plugin_sources"
_LESS_IS_WORSE = ("mfu", "memory_headroom", "final_test_accuracy", "best_test_accuracy")
_MORE_IS_WORSE = (
    *("final_loss_per_token", "final_perplexity", "final_expert_imbalance", "steady_data_wait_share", "cost", "co2_g"),
    *("rank_imbalance", "node_imbalance"),
)
_OF_NO_SOURCES = ("theoretical_bubble", "theoretical_state_bytes", "peak_flop_per_s", "memory_limit_bytes")
"""Formulas, and what a machine can do, or allows: no state of the sources makes them better."""
_RATES = ("samples/s", "tokens/s", "bytes/s", "flop/s")
_COSTS = ("s", "h", "bytes", "J")
"""Units of which more is better, and worse."""


class Metric(NamedTuple):
    """A metric of which it is known what is worse."""

    column: Column
    more_is_worse: bool


def metrics() -> dict[str, Metric]:
    """The metrics that have a history, by name."""
    found = {}
    for column in (*per_run_columns(), *TABLES["run"]):
        if not (column.numeric and column.repeats) or column.name in _OF_NO_SOURCES:
            continue
        if column.unit in _RATES or column.name in _LESS_IS_WORSE:
            found[column.name] = Metric(column, more_is_worse=False)
        elif column.unit in _COSTS or column.name in _MORE_IS_WORSE:
            found[column.name] = Metric(column, more_is_worse=True)
    return found


class State(NamedTuple):
    """A state of the sources."""

    key: tuple[Any, ...]
    """Equal for equal sources, as far as is known."""
    commit: str
    """Its commit, or what else identifies it; empty where nothing was recorded."""
    uncommitted: bool = False
    """Whether the sources differed from the commit in what nothing identifies."""


@dataclass(frozen=True, eq=False)
class Point:
    """The repeats of one state of the sources."""

    state: State
    runs: tuple[ComparedRun, ...]
    values: tuple[float, ...]
    """Of each run."""

    @property
    def n(self) -> int:
        """Repeats."""
        return len(self.values)

    @cached_property
    def median(self) -> float:
        """The median of the repeats, in logarithms."""
        return ratio_median(self.values)

    @cached_property
    def interval(self) -> Ends | None:
        """The 95 % interval of what its repeats vary by; None with fewer than three."""
        spread = Spread.of_ratios(self.values)
        return None if spread is None else spread.ends(ERROR)

    @property
    def measured_at(self) -> float:
        """Unix time at which its first run began."""
        return min(run.span[0] for run in self.runs)

    @property
    def date(self) -> str:
        """The same in UTC: 2026-11-28 14:05."""
        at = self.measured_at
        return f"{datetime.fromtimestamp(at, tz=UTC):%Y-%m-%d %H:%M}" if math.isfinite(at) else text.MISSING

    @property
    def commit(self) -> str:
        """As a table shows it: "0123abc", "0123abc and more" with uncommitted changes."""
        shown = re.sub(r"\b[0-9a-f]{12,}", lambda digits: digits[0][:10], self.state.commit)
        return (f"{shown} and more" if self.state.uncommitted else shown) or text.MISSING

    @property
    def submits(self) -> int:
        """Submits in which its runs were measured."""
        return len({run.session for run in self.runs})


@dataclass(frozen=True)
class Change:
    """A shift of the series' level."""

    at: int
    """Index of the first changed point."""
    ratio: float
    """Level after ÷ level before."""
    low: float
    high: float
    """95 % interval."""
    p: float
    """How often a series without it shows one as large, anywhere."""
    is_worse: bool


@dataclass(frozen=True, eq=False)
class Series:
    """The points of one kind of machine."""

    machine: str
    """Its devices."""
    unlike_first: str
    """In what it differs from the first series; empty for that one."""
    points: tuple[Point, ...]
    changes: tuple[Change, ...]
    seen: float | None
    """The smallest ratio by which the last `behind` points would have to be worse to be a change; None: none would."""
    behind: int
    """Fewest points behind a change, the first changed one included: those of the last two submits."""


@dataclass(frozen=True, eq=False)
class History:
    """A metric of one configuration over the states of its sources."""

    metric: Metric
    configuration: str
    series: tuple[Series, ...]
    """The one that was measured first comes first."""
    notes: tuple[str, ...] = field(default=())

    @property
    def newest(self) -> Series:
        """The series with the point that was measured last."""
        return max(self.series, key=lambda series: series.points[-1].measured_at)


class Outcome(NamedTuple):
    """What a history means for continuous integration."""

    code: int
    message: str


def history(
    folders: Sequence[Path | str], metric: str, *, where: Sequence[str] = (), plugin: str | None = None
) -> History:
    """The history of a metric, of all runs at or below these folders that count.

    `where`: conditions KEY=VALUE that choose the configuration. Raises `ConfigError` for a metric that is none, or that
    no run has; for folders without runs; and where several configurations are left.
    """
    known = metrics()
    if metric not in known:
        raise ConfigError(f"--metric {metric} has no history: {choices(metric, known)}")
    read, notes = _counted(folders, plugin)
    chosen = _chosen(read, where)
    if not chosen:
        raise ConfigError(f"no run below {text.listed(list(map(str, folders)))} counts{_why(notes)}")
    values = {id(run): run.value(metric) for run in chosen}
    if lost := [run for run in chosen if values[id(run)] is not None and not _is_positive(values[id(run)])]:
        value = values[id(lost[0])]
        raise ConfigError(f"--metric {metric} is {value:g} in {lost[0].run_id[:8]}: a history takes numbers above 0")
    known_runs = [run for run in chosen if values[id(run)] is not None]
    if not known_runs:
        raise ConfigError(f"--metric {metric}: no run that counts has it; it is null where {_null(known[metric])}")
    believed, unbelieved = _believed(known_runs, metric)
    if lacking := len(chosen) - len(known_runs):
        unbelieved.append(f"{count_of(lacking, 'run')} without it: {_null(known[metric])}, or others disturbed it.")
    if not believed:
        raise ConfigError(f"--metric {metric}: {unbelieved[0]}")
    series = _series(believed, known[metric])
    return History(
        known[metric],
        _name(believed[0].definition),
        tuple(series),
        (*_notes(series), *unbelieved, *(f"{line}." for line in notes)),
    )


def outcome(found: History, *, since: str | None = None) -> Outcome:
    """1 where a change for the worse began at or after `since`, a day or a commit, in any series; without it, where one
    began as late as one can be shown, with the last two submits of the newest series. Raises `ConfigError` for a commit
    that no point has.
    """
    newest = found.newest
    first = {id(series): _first_since(series, since) for series in found.series} if since else {}
    if since and not any(place is not None for place in first.values()):
        known = list(dict.fromkeys(point.commit for series in found.series for point in series.points))
        raise ConfigError(f"--since {since}: no point has this commit, or was measured since; {choices(since, known)}")
    begins = first or {id(newest): len(newest.points) - newest.behind}
    worse = [
        (series, change)
        for series in found.series
        for change in series.changes
        if change.is_worse and (begin := begins.get(id(series))) is not None and change.at >= begin
    ]
    name, when = found.metric.column.name, f"since {since}" if since else f"in {_last(newest)}"
    if worse:
        told = [f"{_sized(change)} from {_named(series.points[change.at])} on" for series, change in worse]
        return Outcome(WORSE, f"WORSE {when}: {name} {text.listed(told, sep='; ')}")
    return Outcome(
        UNCHANGED, f"No change for the worse {when} is shown: {name}, {found.configuration}; {_power(newest)}"
    )


def _power(series: Series) -> str:
    """What would have been seen."""
    points = len(series.points)
    if points < FEWEST_POINTS:
        return f"{count_of(points, 'point')} of one kind of machine, a change takes {FEWEST_POINTS} at least"
    if series.seen is None:
        return f"these points vary so much that no change of {_last(series)} would be shown"
    return f"{_last(series)} would be a change if worse by {_percent(series.seen)} or more"


def _last(series: Series) -> str:
    """ "the last point", "the last 2 points": behind which a change can be shown."""
    return "the last point" if series.behind == 1 else f"the last {series.behind} points"


def _sized(change: Change) -> str:
    """ "rose by 5.1 % (95 % interval 4.2 % to 6.0 %)"."""
    sign = 1 if change.ratio > 1 else -1
    ends = sorted(sign * (end - 1) for end in (change.low, change.high))
    moved = "rose" if sign > 0 else "fell"
    shown = " to ".join(f"{100 * end:.3g} %" for end in ends)
    return f"{moved} by {100 * abs(change.ratio - 1):.3g} % (95 % interval {shown})"


def _percent(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.2g} %"


def _named(point: Point) -> str:
    return f"{point.commit} ({point.date})" if point.state.commit else point.date


_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def _first_since(series: Series, since: str) -> int | None:
    """The first point that was measured on this day or later, or that has this commit; None where there is none."""
    if _DAY.fullmatch(since):
        return next((n for n, point in enumerate(series.points) if point.date[:10] >= since), None)
    commits = [point.state.commit.partition("@")[0].lower() for point in series.points]
    return next((n for n, commit in enumerate(commits) if _is_meant(commit, since.lower())), None)


def _is_meant(commit: str, typed: str) -> bool:
    """Either may be shortened."""
    return min(len(commit), len(typed)) >= _FEWEST_DIGITS and (commit.startswith(typed) or typed.startswith(commit))


_FEWEST_DIGITS = 7
"""Of a commit."""


def _counted(folders: Sequence[Path | str], plugin: str | None) -> tuple[list[ComparedRun], list[str]]:
    """All runs that count, each measurement once, and what else there was, in words.

    Each sweep is read by itself: of equal runs of several sweeps, which are the points, one alone would be read.
    """
    counted: list[ComparedRun] = []
    read: set[tuple[str, float]] = set()
    gone: Counter[str] = Counter()
    skipped = copies = 0
    for folder in _sweeps(folders):
        runs = load(folder, plugin=plugin)
        known, skipped = compared_runs(runs), skipped + sum(each.is_run for each in runs.skipped)
        exclusions = dict(excluded(runs).select("run_id", "exclusion").rows())
        for run_id, run in known.items():
            exclusion = exclusions.get(run_id)
            if exclusion is not None and exclusion not in _APART:
                gone[exclusion] += 1
            elif (run_id, run.span[0]) in read and math.isfinite(run.span[0]):
                copies += 1
            else:
                read.add((run_id, run.span[0]))
                counted.append(run)
    counts = ", ".join(f"{count} {exclusion}" for exclusion, count in sorted(gone.items()))
    verb = "does" if gone.total() == 1 else "do"
    notes = [f"{count_of(gone.total(), 'run')} {verb} not count ({counts})"] if gone else []
    notes += [f"{count_of(copies, 'run')} in several folders, which count once"] if copies else []
    notes += [f"{count_of(skipped, 'folder')} could not be read: parallelbench status says why"] if skipped else []
    return sorted(counted, key=lambda run: run.span), notes


_APART = (Exclusion.OTHER_DATA.value, Exclusion.OTHER_ENVIRONMENT.value)
"""What sets a run apart from the other repeats of its sweep makes another series here."""


def _sweeps(folders: Sequence[Path | str]) -> list[Path]:
    """The folders of the sweeps at or below these, each once; a run that was named stands for itself."""
    found: dict[Path, Path] = {}
    for each in folders:
        root = Path(each).expanduser()
        require_folder(root)
        of_root = find_runs(root)
        if not of_root:
            raise ConfigError(no_runs(root))
        for run in of_root:
            sweep = run.path if run.path == root else run.path.parent
            found.setdefault(sweep.resolve(), sweep)
    return [sweep for resolved, sweep in found.items() if resolved.parent not in found]


def _identity(run: ComparedRun) -> Work:
    """What makes a configuration, on any machine and of any state of its sources."""
    own = without(run.definition, (_PROGRAM_SOURCES, *DEVICE))
    return {key: value for key, value in own.items() if key.rpartition(".")[2] != _PLUGIN_SOURCES}


def _chosen(runs: Sequence[ComparedRun], where: Sequence[str]) -> list[ComparedRun]:
    """The runs of the one configuration that fulfils the conditions."""
    identities = {id(run.definition): _identity(run) for run in runs}
    kept = list(runs)
    for condition in where:
        key, equals, value = condition.strip().partition("=")
        key, value = key.strip(), value.strip()
        if not (key and equals and value):
            raise ConfigError(f"--where {condition}: expected KEY=VALUE, e.g. --where strategy=ddp")
        values = [(run, _value(run, identities[id(run.definition)], key)) for run in kept]
        known = {plain(each) for _, each in values if each is not None}
        if kept and not known:
            names = {_root(name) for run in runs for name in (*identities[id(run.definition)], *run.environment)}
            raise ConfigError(f"--where {condition}: no run has this key; {choices(key, names)}")
        wanted = as_recorded(value, known)
        kept = [run for run, each in values if each is not None and plain(each) == wanted]
        if not kept and runs:
            raise ConfigError(f"--where {condition}: no run has {key}={value}; {choices(value, known)}")
    distinct: dict[str, Work] = {}
    for run in kept:
        distinct.setdefault(canonical(identities[id(run.definition)]), identities[id(run.definition)])
    if len(distinct) > 1:
        raise ConfigError(
            f"{len(distinct)} configurations: choose one by --where KEY=VALUE; they differ in "
            f"{_differing(list(distinct.values()))}"
        )
    return kept


def _root(key: str) -> str:
    return key.removesuffix(".name")


def _value(run: ComparedRun, identity: Work, key: str) -> Any:
    """A key's value in a run: of its configuration, its devices, or its environment; None where it has none."""
    known = identity | {name: run.definition.get(name) for name in DEVICE} | run.environment
    own = key.removeprefix("program.")
    names = (f"{key}.name", key, f"strategy.axes.{own}", *((f"strategy.{own}",) if own != key else ()))
    return next((known[name] for name in names if name in known), None)


_MOST_KEYS, _MOST_VALUES = 6, 8


def _differing(identities: Sequence[Work]) -> str:
    """ "strategy: ddp, fsdp; devices: 1, 2, 4"."""
    keys: dict[str, None] = {}
    for identity in identities[1:]:
        keys |= dict.fromkeys(work_differences(identities[0], identity))
    values: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: (is_below(key, ("strategy.",)), key)):
        known = dict.fromkeys(plain(each.get(f"{key}.name", each.get(key))) for each in identities)
        values[key] = sorted(known, key=lambda word: (not word.isdigit(), int(word) if word.isdigit() else 0, word))
    told = [f"{key}: {text.listed(found, most=_MOST_VALUES)}" for key, found in values.items()]
    return text.listed(told, most=_MOST_KEYS, sep="; ")


def _is_positive(value: float | None) -> bool:
    return value is not None and value > 0 and math.isfinite(value)


def _null(metric: Metric) -> str:
    return metric.column.null or "nothing was measured"


def _why(notes: Sequence[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def _believed(runs: Sequence[ComparedRun], metric: str) -> tuple[list[ComparedRun], list[str]]:
    """The runs whose numbers are believed, and why others' are not."""
    kept, lost = [], Counter[str]()
    for run in runs:
        forbidden = of_energies([run], metric)[0]
        if beyond_cores([run]) or beyond_peak([run]):
            lost["more was computed than its devices can"] += 1
        elif forbidden:
            lost[forbidden[0].brief] += 1
        else:
            kept.append(run)
    return kept, [f"{count_of(count, 'run')} left out: {why}." for why, count in lost.items()]


def _name(definition: Work) -> str:
    """ "ddp × 2 (digits · cnn)"."""
    strategy = plain(definition.get("strategy.name"))
    label = configuration_label(strategy, definition["devices"], definition["nodes"])
    work = work_label(definition, ())
    return f"{label} ({work})" if work else label


def _series(runs: Sequence[ComparedRun], metric: Metric) -> list[Series]:
    """The points by kind of machine, with their changes."""
    name = metric.column.name
    series = [
        (points, unlike | slower)
        for kind, unlike in _kinds(runs, lambda one, other: _unlike(one, other, name))
        for points, slower in _kinds(_points(kind, name), lambda one, other: unlike_probes([one.runs, other.runs]))
    ]
    judged = sum(len(points) >= FEWEST_POINTS for points, _ in series)
    # As with every family of verdicts: any of them is wrong as rarely as one would be.
    return [_judged(points, unlike, metric, error=ERROR / max(judged, 1)) for points, unlike in series]


def _unlike(one: ComparedRun, other: ComparedRun, metric: str) -> Differences:
    """What must match between runs of a series, and differs."""
    devices = {key: (one.definition.get(key), other.definition.get(key)) for key in DEVICE}
    unlike = {key: values for key, values in devices.items() if values[0] != values[1]}
    unlike |= environment_match.differences(one.environment, other.environment)
    unlike |= unlike_contents([(one, other)])
    if metric in (*OF_START_UP, *WITH_FIRST_EPOCH) and one.is_warmed != other.is_warmed:
        unlike["parity check before the training"] = (one.is_warmed, other.is_warmed)
    return unlike


def _points(runs: Sequence[ComparedRun], metric: str) -> list[Point]:
    """One for each state of the sources, in the order of their first runs."""
    members: dict[tuple[Any, ...], list[ComparedRun]] = defaultdict(list)
    states: dict[tuple[Any, ...], State] = {}
    for run in runs:
        state = _state(run)
        states.setdefault(state.key, state)
        members[state.key].append(run)
    return [
        Point(
            states[key], tuple(of_state), tuple(value for run in of_state if (value := run.value(metric)) is not None)
        )
        for key, of_state in members.items()
    ]


def _kinds(items: Sequence[Item], unlike: Callable[[Item, Item], Differences]) -> list[tuple[list[Item], Differences]]:
    """Items that are like the first of their kind, together, with how that one differs from the first of all."""
    kinds: list[tuple[list[Item], Differences]] = []
    for item in items:
        alike = next((kind for kind, _ in kinds if not unlike(kind[0], item)), None)
        if alike is None:
            kinds.append(([item], unlike(items[0], item) if kinds else {}))
        else:
            alike.append(item)
    return kinds


def _state(run: ComparedRun) -> State:
    """Of a user's program its sources; else the commit of a plugin and of the suite, or what stands for it."""
    if program := run.definition.get(_PROGRAM_SOURCES):
        return State(("program", program), str(program))
    recorded = _recorded(run)
    git, plugin = recorded.get("git") or {}, recorded.get("plugin") or {}
    commit, dirty = git.get("commit"), bool(git.get("dirty"))
    suite = (commit,) if commit and not dirty else (commit, (recorded.get("packages") or {}).get("parallelbench"))
    if plugin.get("sources"):
        of_plugin = (plugin.get("git") or {}).get("commit")
        changed = bool((plugin.get("git") or {}).get("dirty"))
        shown = f"{of_plugin[:10]}@{str(plugin['sources']).rpartition('@')[2]}" if of_plugin and changed else of_plugin
        own = (*suite, run.session) if dirty else suite
        return State(("plugin", plugin["sources"], *own), shown or str(plugin["sources"]), uncommitted=dirty)
    if commit and not dirty:
        return State(("suite", commit), commit)
    return State(("submit", *suite, run.session), commit or "", uncommitted=dirty)


def _recorded(run: ComparedRun) -> Mapping[str, Any]:
    known: dict[str, dict[str, Any]] = run.runs.derived.setdefault(_recorded, {})
    if not known:
        rows = run.runs.run.select("run_id", "environment_json").rows()
        known |= {run_id: msgspec.json.decode(words or "{}") for run_id, words in rows}
    return known[run.run_id]


def margins_of(points: Sequence[Point]) -> Margins:
    """Fewest points before a change, and behind it, that were measured in two submits: one submit may have met a slow
    hour of its machine.
    """
    return _of_two_submits(points), _of_two_submits(points[::-1])


def _of_two_submits(points: Sequence[Point]) -> int:
    submits: set[Hashable] = set()
    for place, point in enumerate(points, 1):
        submits |= {run.session for run in point.runs}
        if len(submits) >= FEWEST_SUBMITS:
            return place
    return max(len(points), MARGIN)


FEWEST_SUBMITS = 2
"""Of each side of a change."""


def _judged(points: Sequence[Point], unlike: Differences, metric: Metric, *, error: float) -> Series:
    before = max(0, len(points) - MOST_POINTS)
    levels = [math.log(point.median) for point in points[before:]]
    changes = []
    margins = margins_of(points[before:])
    repeats = [[math.log(value) for value in point.values] for point in points[before:]]
    for shift in shifts(levels, repeats=repeats, margins=margins, error=error):
        is_worse = (shift.size > 0) == metric.more_is_worse
        ratio, low, high = (math.exp(min(end, _LARGEST)) for end in (shift.size, shift.low, shift.high))
        changes.append(Change(before + shift.at, ratio, low, high, p=shift.p, is_worse=is_worse))
    sign = 1 if metric.more_is_worse else -1
    seen = smallest_seen_last(levels, upwards=metric.more_is_worse, repeats=repeats, margins=margins, error=error)
    first = points[0].runs[0].definition
    return Series(
        machine=str(first.get("device_name") or first.get("device_type") or "unknown"),
        unlike_first=format_differences(unlike),
        points=tuple(points),
        changes=tuple(changes),
        seen=None if seen is None else math.exp(sign * seen),
        behind=margins[1],
    )


_LARGEST = 700.0
"""Logarithm of about the largest number."""


def _notes(series: Sequence[Series]) -> Iterator[str]:
    """What a reader must know about the points."""
    points = [point for each in series for point in each.points]
    if len({run.session for point in points for run in point.runs}) > 1:
        yield (
            "Points were measured apart from each other: a difference between two of them holds what their machine "
            "changed in between. A change is what exceeds noise and drift of this series; "
            "`parallelbench compare` of two commits, submitted in turn, tells them apart from the machine."
        )
    for place, each in enumerate(series[1:], 2):
        yield f"Series {place} is not joined with series 1: {each.unlike_first}."
    for place, each in enumerate(series, 1):
        which = f"Series {place} has" if len(series) > 1 else "There are"
        if len(each.points) < FEWEST_POINTS:
            yield f"{which} {count_of(len(each.points), 'point')}: a change takes {FEWEST_POINTS} at least."
        elif len(each.points) > MOST_POINTS:
            yield f"{which} {len(each.points)} points, of which the last {MOST_POINTS} are judged."
    hosts = sorted(
        {str(run.environment["host"]) for point in points for run in point.runs if "host" in run.environment}
    )
    if len(hosts) > 1:
        yield f"Measured on {len(hosts)} hosts: {text.listed(hosts, most=8)}."
    if few := sum(point.interval is None for point in points):
        yield f"{count_of(few, 'point')} of fewer than {FEWEST_REPEATS} repeats: no interval."
    if any(point.state.uncommitted for point in points):
        yield "Sources with uncommitted changes are a point for each submit: nothing tells whether they were the same."
    elif any(not point.state.commit for point in points):
        yield "Runs without a commit are a point for each submit."


def rows(found: History) -> Iterable[dict[str, Any]]:
    """One row per point, as CSV and JSON have it."""
    for number, series in enumerate(found.series, 1):
        changes = {change.at: change for change in series.changes}
        for place, point in enumerate(series.points):
            low, high = point.interval or (None, None)
            change = changes.get(place)
            yield {
                "series": number,
                "machine": series.machine,
                "measured_at": point.measured_at,
                "date": point.date,
                "commit": point.state.commit or None,
                "uncommitted": point.state.uncommitted,
                "repeats": point.n,
                "submits": point.submits,
                "metric": found.metric.column.name,
                "median": point.median,
                "low": low,
                "high": high,
                "change": change.ratio if change else None,
                "change_low": change.low if change else None,
                "change_high": change.high if change else None,
                "p": change.p if change else None,
                "worse": change.is_worse if change else None,
            }
