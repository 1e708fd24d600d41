"""The two sides of `compare`: which configuration of one belongs to which of the other, or what keeps them apart."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from analysis.comparison.caveats import said_once
from analysis.comparison.compared_run import ComparedRun, compared_runs
from analysis.comparison.environments import environments_of
from analysis.comparison.exclusions import excluded
from analysis.comparison.groups import labels
from analysis.comparison.matching import differences_within, nearest, unlike_works
from analysis.comparison.pairing import Pairing, paired
from analysis.comparison.policy import PROBED, WAYS, Caveat, Issue, format_differences
from analysis.comparison.work import canonical, is_below, without
from analysis.text import listed
from parallelbench.errors import ConfigError
from parallelbench.measure.environment_match import VERSION

if TYPE_CHECKING:
    from analysis.comparison.work import Differences, Work
    from analysis.reader import Runs
    from analysis.stats import Ratio


@dataclass(frozen=True)
class ComparedRow:
    """A configuration that both sides have measured."""

    group: str
    configuration: str
    pairing: Pairing


@dataclass(frozen=True)
class Matched:
    """The rows, and the configurations that only one side has."""

    rows: tuple[ComparedRow, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    groups_only_a: tuple[str, ...]
    """The groups of which side B has nothing that side A has."""
    single_only_a: tuple[str, ...]
    """The configurations of `only_a` in other groups."""

    @property
    def notes(self) -> list[str]:
        """What blocks the rows, and what limits them, in sentences."""
        names = [row.configuration for row in self.rows]
        full = [f"{row.configuration} ({row.group})" if names.count(row.configuration) > 1 else name
                for row, name in zip(self.rows, names, strict=True)]  # fmt: skip
        pairings = [(name, row.pairing) for name, row in zip(full, self.rows, strict=True)]
        blockers = ((name, issue) for name, pairing in pairings for issue in pairing.blockers())
        caveats = ((name, issue) for name, pairing in pairings for issue in pairing.caveats(per_sample=True))
        return [*said_once(blockers, of=len(pairings)), *said_once(caveats, of=len(pairings))]

    def notes_on_all(self, name: str, ratio: Ratio | None) -> list[str]:
        """What limits all rows together, and none by itself: rows may tie each other's pairs into fewer pools."""
        pairings = [row.pairing for row in self.rows]
        if ratio is None or not ratio.is_apart or any(pairing.is_apart for pairing in pairings):
            return []
        return said_once([(name, Issue(Caveat.APART, {}, find_remedies=pairings[0].remedies))])


@dataclass(frozen=True)
class Side:
    """The counted runs of one side."""

    runs: Runs
    across: tuple[str, ...]
    """Keys that may differ from the other side's."""

    @cached_property
    def counted(self) -> list[ComparedRun]:
        """The runs that count, in the order of their repeats."""
        gone = set(excluded(self.runs)["run_id"])
        known = compared_runs(self.runs)
        return [known[run_id] for run_id in self.runs.run.sort("repeat")["run_id"] if run_id not in gone]

    @cached_property
    def members(self) -> dict[str, list[ComparedRun]]:
        """A run's definition without the keys that may differ, as text → the runs."""
        members: dict[str, list[ComparedRun]] = defaultdict(list)
        for run in self.counted:
            members[canonical(without(run.definition, self.across))].append(run)
        return dict(members)

    @cached_property
    def labels(self) -> dict[str, tuple[str, str]]:
        """Run id → group and configuration."""
        rows = labels(self.runs).select("run_id", "group", "configuration").rows()
        return {run_id: (group, configuration) for run_id, group, configuration in rows}

    @cached_property
    def names(self) -> set[str]:
        """The keys in which the other side could differ."""
        works = {key for run in self.counted for key in run.definition}
        entries = {key for environment in environments_of(self.runs).values() for key in environment} - {VERSION}
        return {key.removesuffix(".name") for key in works | entries | PROBED.keys() if not key.endswith("._target_")}

    def work(self, key: str) -> Work:
        """The definition of a member's runs, without the keys that may differ."""
        return without(self.members[key][0].definition, self.across)

    def label(self, key: str) -> tuple[str, str]:
        """Group and configuration of a member."""
        return self.labels[self.members[key][0].run_id]

    def name(self, key: str) -> str:
        """The configuration of a member, with its group where there are several."""
        group, configuration = self.label(key)
        several = len({group for group, _ in self.labels.values()}) > 1
        return f"{configuration} ({group})" if several else configuration


def match(a: Side, b: Side) -> Matched | Differences:
    """Pair the runs of both sides, or return the differences that forbid it."""
    for name, side in (("the first", a), ("the second", b)):
        _require_one_meaning(side, name)
    shared = [key for key in a.members if key in b.members]
    only_a, only_b = ([key for key in side.members if key not in shared] for side in (a, b))
    rows = tuple(_row(a, b, key) for key in shared)
    works, others = [a.work(key) for key in only_a], [b.work(key) for key in only_b]
    unlike = unlike_works(works, others)
    if not (unlike or shared) and works and others:
        unlike = min((nearest(work, others) for work in works), key=len)
    for row in rows:
        unlike = row.pairing.unlike_environments | unlike
    groups = {a.label(key)[0] for key in shared}
    lacking = dict.fromkeys(a.label(key)[0] for key in only_a if a.label(key)[0] not in groups)
    single = tuple(a.name(key) for key in only_a if a.label(key)[0] in groups)
    return unlike or Matched(rows, tuple(map(a.name, only_a)), tuple(map(b.name, only_b)), tuple(lacking), single)


def _row(a: Side, b: Side, key: str) -> ComparedRow:
    (group, name), (_, other) = a.label(key), b.label(key)
    renamed = other != name and any(is_below(k, WAYS) for k in a.across)
    pairing = paired(a.members[key], b.members[key], across=a.across)
    return ComparedRow(group, f"{name} → {other}" if renamed else name, pairing)


def _require_one_meaning(side: Side, name: str) -> None:
    """Refuse where a key that may differ between the sides differs within one side."""
    for members in side.members.values():
        if within := differences_within([run.definition for run in members]):
            names = sorted({side.labels[run.run_id][1] for run in members})
            raise ConfigError(
                f"{listed(names)}: {name} side has runs that differ ({format_differences(within)}): choose folders, or "
                "--by, so that each side has one of them"
            )
