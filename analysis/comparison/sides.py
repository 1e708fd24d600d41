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
from analysis.comparison.pairing import Pairing, paired
from analysis.comparison.policy import PROBED, format_differences
from analysis.comparison.work import canonical, is_below, without, work_differences
from parallelbench.errors import ConfigError
from parallelbench.store.environment_match import VERSION

if TYPE_CHECKING:
    from analysis.comparison.work import Differences, Work
    from analysis.reader import Runs

_ROW = ("strategy.name", "devices", "nodes", "data.name", "model.name")
"""What identifies a row of a comparison. Where these differ, the other side has nothing to compare with."""


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

    def row(self, key: str) -> str:
        """What identifies the row that a member belongs to."""
        return canonical({k: v for k, v in self.work(key).items() if k in _ROW})

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
    unlike = _unlike_works(a, only_a, b, only_b) or ({} if shared else _least_unlike(a, only_a, b, only_b))
    for row in rows:
        unlike = row.pairing.unlike_environments | unlike
    return unlike or Matched(rows, tuple(map(a.name, only_a)), tuple(map(b.name, only_b)))


def _row(a: Side, b: Side, key: str) -> ComparedRow:
    (group, name), (_, other) = a.label(key), b.label(key)
    renamed = other != name and any(is_below(k, ("strategy", "devices", "nodes")) for k in a.across)
    pairing = paired(a.members[key], b.members[key], across=a.across)
    return ComparedRow(group, f"{name} → {other}" if renamed else name, pairing)


def _require_one_meaning(side: Side, name: str) -> None:
    """Refuse where a key that may differ between the sides differs within one side."""
    for first, *others in side.members.values():
        for other in others:
            if within := work_differences(first.definition, other.definition):
                raise ConfigError(
                    f"{side.labels[other.run_id][1]}: {name} side has runs that differ "
                    f"({format_differences(within)}): choose folders, or --by, so that each side has one of them"
                )


def _unlike_works(a: Side, only_a: list[str], b: Side, only_b: list[str]) -> Differences:
    """The differences between configurations of the two sides that belong to one row."""
    unlike: Differences = {}
    for key in only_a:
        if others := [other for other in only_b if b.row(other) == a.row(key)]:
            unlike = _nearest(a, key, b, others) | unlike
    return unlike


def _least_unlike(a: Side, only_a: list[str], b: Side, only_b: list[str]) -> Differences:
    """The differences between the two configurations that differ least."""
    return min((_nearest(a, key, b, only_b) for key in only_a), key=len) if only_a and only_b else {}


def _nearest(a: Side, key: str, b: Side, others: list[str]) -> Differences:
    return min((work_differences(a.work(key), b.work(other)) for other in others), key=len)
