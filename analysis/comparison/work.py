"""A configuration as dotted keys and values: of a run, or of the part of it that is the work."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

Work = dict[str, Any]
"""Dotted key → value: a configuration, or a part of it."""
Differences = dict[str, tuple[Any, Any]]
"""Dotted key → the value of each side."""


def work_differences(one: Work, other: Work) -> Differences:
    """The keys in which two works differ. Of two unlike components only the names are compared."""
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    unlike = {key.removesuffix(".name") for key in keys if key.endswith(".name")}
    differing = {key: (one.get(key), other.get(key)) for key in keys if not is_below(key, unlike)}
    return differing | {name: (one.get(f"{name}.name"), other.get(f"{name}.name")) for name in sorted(unlike)}


def without(work: Work, roots: Iterable[str]) -> Work:
    """A work without these keys, and without what is below them."""
    names = frozenset(roots)
    prefixes = tuple(f"{root}." for root in names)
    return {key: value for key, value in work.items() if not (key in names or key.startswith(prefixes))}


def below(work: Work, root: str) -> Work:
    """Of a work what is below this key."""
    return {key: value for key, value in work.items() if key.startswith(f"{root}.")}


@dataclass(frozen=True, eq=False)
class Keyed:
    """A work that many comparisons look at: its text and its parts are made once. It never changes."""

    keys: Work
    _parts: dict[str | tuple[str, ...], Keyed] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def text(self) -> str:
        """Equal works have equal texts."""
        return canonical(self.keys)

    def without(self, roots: tuple[str, ...]) -> Keyed:
        """The work without these keys, and without what is below them."""
        if roots not in self._parts:
            self._parts[roots] = Keyed(without(self.keys, roots))
        return self._parts[roots]

    def below(self, root: str) -> Keyed:
        """Of the work what is below this key."""
        if root not in self._parts:
            self._parts[root] = Keyed(below(self.keys, root))
        return self._parts[root]


def is_below(key: str, roots: Iterable[str]) -> bool:
    """Whether a dotted key is one of the roots, or below one: strategy.schedule is below strategy."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


def canonical(value: Any) -> str:
    """A value as text: equal values have equal texts."""
    return json.dumps(value, sort_keys=True)


def plain(value: Any) -> str:
    """A value as people write it: ddp, true, 0.1, null."""
    return value if isinstance(value, str) else json.dumps(value)
