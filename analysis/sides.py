"""The two sides of a comparison: which run is compared with which, or what keeps them apart."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from analysis.work import Work, canonical, is_below, labels, left_out, plain, works
from parallelbench.errors import ConfigError
from parallelbench.store.surroundings import entries, flatten, matters, unlike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from analysis.reader import Runs

_ROW = ("strategy", "devices", "nodes", "data", "model")
"""What a row of a comparison is known by: where these differ, the other side has nothing to compare with."""
_COMMIT = ("git.commit", "git.dirty", "packages.parallelbench", "host", "allocation")
"""Entries in which two folders are expected to differ: they are said."""

Differences = dict[str, tuple[Any, Any]]
"""Key → the value of each side."""


@dataclass(frozen=True)
class Pair:
    """Two runs of one repeat that are compared."""

    repeat: int
    a: str
    b: str
    """Run ids."""


@dataclass(frozen=True)
class Row:
    """A configuration that both sides have measured."""

    group: str
    configuration: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Matched:
    """The rows, and the configurations that only one side has."""

    rows: tuple[Row, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    told: Differences
    """What differs and may: commits and hosts."""


@dataclass(frozen=True)
class Side:
    """The runs of one side that count, by what they are."""

    runs: Runs
    across: tuple[str, ...]
    """Keys that may differ from the other side's."""

    @cached_property
    def whole(self) -> dict[str, Work]:
        """Run id → all that defines the run, but for its repeat."""
        left = set(left_out(self.runs)["run_id"])
        found = {}
        for run_id, config_json, devices, nodes in self.runs.run.select(
            "run_id", "config_json", "devices", "nodes"
        ).rows():
            if run_id not in left:
                strategy = flatten({"strategy": json.loads(config_json)["strategy"]})
                found[run_id] = works(self.runs)[run_id] | strategy | {"devices": devices, "nodes": nodes}
        return found

    @cached_property
    def known(self) -> dict[str, Work]:
        """The same without what may differ."""
        return {run_id: _without(work, self.across) for run_id, work in self.whole.items()}

    @cached_property
    def members(self) -> dict[str, list[str]]:
        """Canonical work → its run ids, in the order of the repeats."""
        found: dict[str, list[str]] = defaultdict(list)
        order = self.runs.run.sort("repeat")["run_id"]
        for run_id in order:
            if run_id in self.known:
                found[canonical(self.known[run_id])].append(run_id)
        return dict(found)

    @cached_property
    def labels(self) -> dict[str, tuple[str, str]]:
        """Run id → group and configuration."""
        rows = labels(self.runs).select("run_id", "group", "configuration").rows()
        return {run_id: (group, configuration) for run_id, group, configuration in rows}

    @cached_property
    def repeats(self) -> dict[str, int]:
        """Run id → its repeat."""
        return dict(self.runs.run.select("run_id", "repeat").rows())

    @cached_property
    def environments(self) -> dict[str, dict[str, Any]]:
        """Run id → what its environment was, flat."""
        rows = self.runs.run.select("run_id", "environment_json").rows()
        return {run_id: surroundings(found) for run_id, found in rows}

    @cached_property
    def names(self) -> set[str]:
        """The keys in which the other side could differ: of works, and of surroundings that matter."""
        works = {key for work in self.whole.values() for key in work}
        outside = {key for found in self.environments.values() for key in found if matters(key)}
        return {key.removesuffix(".name") for key in works | outside if not key.endswith("._target_")}

    def row(self, key: str) -> str:
        """What tells which row of a comparison a work belongs to."""
        work = self.known[self.members[key][0]]
        return canonical({k: v for k, v in work.items() if k in ("devices", "nodes") or _names(k)})


def _names(key: str) -> bool:
    component, _, last = key.partition(".")
    return component in _ROW and last == "name"


def _without(work: Work, across: tuple[str, ...]) -> Work:
    return {key: value for key, value in work.items() if not is_below(key, across)}


def match(a: Side, b: Side) -> Matched | Differences:
    """Pair the runs of both sides; where what did other work, or ran in other surroundings, is in the way: that."""
    for name, side in (("the first", a), ("the second", b)):
        _require_one_meaning(side, name)
    shared = [key for key in a.members if key in b.members]
    only_a, only_b = ([key for key in side.members if key not in shared] for side in (a, b))
    rows = tuple(_row(a, b, key) for key in shared)
    unlike = _unlike_works(a, only_a, b, only_b, anything=not shared)
    for row in rows:
        for pair in row.pairs:
            unlike = _unlike_surroundings(a, b, pair, matters) | unlike
    if unlike:
        return unlike
    told: Differences = {}
    for row in rows:
        for pair in row.pairs:
            told = _unlike_surroundings(a, b, pair, is_told) | told
    return Matched(rows, tuple(_names_of(a, only_a)), tuple(_names_of(b, only_b)), told)


def _names_of(side: Side, keys: Sequence[str]) -> Iterator[str]:
    several = len({group for group, _ in side.labels.values()}) > 1
    for key in keys:
        group, configuration = side.labels[side.members[key][0]]
        yield f"{configuration} ({group})" if several else configuration


def _row(a: Side, b: Side, key: str) -> Row:
    partners = {b.repeats[run_id]: run_id for run_id in b.members[key]}
    pairs = tuple(
        Pair(a.repeats[run_id], run_id, partners[a.repeats[run_id]])
        for run_id in a.members[key]
        if a.repeats[run_id] in partners
    )
    group, name = a.labels[a.members[key][0]]
    _, other = b.labels[b.members[key][0]]
    renamed = other != name and any(is_below(k, ("strategy", "devices", "nodes")) for k in a.across)
    return Row(group, f"{name} → {other}" if renamed else name, pairs)


def _require_one_meaning(side: Side, name: str) -> None:
    """Refuse where what may differ between the sides already differs within one."""
    for run_ids in side.members.values():
        for other in run_ids[1:]:
            if within := _differing(side.whole[run_ids[0]], side.whole[other]):
                raise ConfigError(
                    f"{side.labels[other][1]} has several meanings among {name} side's runs ({said(within)}): "
                    "choose folders, or --by, so that each side has one"
                )


def _unlike_works(a: Side, only_a: list[str], b: Side, only_b: list[str], *, anything: bool) -> Differences:
    """What differs between configurations that are one row of the table, were they alike; `anything`: between any."""
    unlike: Differences = {}
    for key in only_a:
        alike = [other for other in only_b if b.row(other) == a.row(key)]
        if alike:
            unlike = _nearest(a, key, b, alike) | unlike
    if anything and not unlike and only_a and only_b:
        unlike = min((_nearest(a, key, b, only_b) for key in only_a), key=len)
    return unlike


def _nearest(a: Side, key: str, b: Side, others: list[str]) -> Differences:
    work = a.known[a.members[key][0]]
    return min((_differing(work, b.known[b.members[other][0]]) for other in others), key=len)


def _differing(one: Work, other: Work) -> Differences:
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    # Of two components, say strategies, that are not the same, the options need no saying.
    others = {key.removesuffix(".name") for key in keys if key.endswith(".name")}
    found = {key: (one.get(key), other.get(key)) for key in keys if key.partition(".")[0] not in others}
    return found | {name: (one.get(f"{name}.name"), other.get(f"{name}.name")) for name in sorted(others)}


def surroundings(environment_json: str | None) -> Work:
    """What a run's environment was, flat."""
    return entries(json.loads(environment_json or "{}"))


def is_told(key: str) -> bool:
    """Whether it may differ, and is said: commits, hosts, and whether these were shared."""
    return key in _COMMIT


def _unlike_surroundings(a: Side, b: Side, pair: Pair, relevant: Callable[[str], bool]) -> Differences:
    found = unlike(a.environments[pair.a], b.environments[pair.b], relevant)
    return {key: values for key, values in found.items() if not is_below(key, a.across)}


def said(differences: Differences) -> str:
    """ "precision: fp32 and bf16, packages.torch: 2.11 and 2.12"."""
    return ", ".join(f"{key}: {plain(one)} and {plain(other)}" for key, (one, other) in differences.items())
