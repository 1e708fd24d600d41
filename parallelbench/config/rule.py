"""Rules: what refuses a run, why, and the keys that this is about. What would be accepted is found by trying them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from parallelbench.config.structure import Component
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parallelbench.config.run import RunConfig


Rule = tuple[object, str, tuple[str, ...]]
"""Whether it refuses (what is true does), the reason, and the keys that it is about.

The reason names the value and what must hold. In place of a key may stand what to try first: "optimizer=adagrad", or
"strategy=single devices=1", where two keys have to change together.
"""
Rules = Iterator[Rule]


class Refusal(NamedTuple):
    """A rule that refuses."""

    reason: str
    keys: tuple[str, ...] = ()


class RefusedError(ConfigError):
    """A run that rules refuse, each in a line."""

    def __init__(self, refusals: tuple[Refusal, ...]) -> None:
        super().__init__("\n".join(refusal.reason for refusal in refusals))
        self.refusals = refusals


def enforce(rules: Iterable[Rule]) -> None:
    """Raise `RefusedError` where any of them refuses."""
    if found := dict.fromkeys(Refusal(reason, keys) for refuses, reason, keys in rules if refuses):
        raise RefusedError(tuple(found))


class Ruled(Component, frozen=True, kw_only=True):
    """A component that can't do every run."""

    def rules(self, run: RunConfig, device_type: str) -> Iterable[Rule]:
        """What it refuses. Later rules may count on what earlier ones demand: where one refuses, return."""
        return ()

    def check(self, run: RunConfig, device_type: str) -> None:
        """Raise `ConfigError` where it can't do this run; before anything starts. Its own text should name the fix."""
        enforce(self.rules(run, device_type))
