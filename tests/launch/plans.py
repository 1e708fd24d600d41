"""Shipped sweeps, expanded once for all tests that look at them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from launch.sweep import expand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launch.sweep import PlannedRun


@functools.cache
def plan(name: str) -> Sequence[PlannedRun]:
    """The first repeat of every configuration."""
    return tuple(expand([f"sweep={name}", "sweep.repeats=1"]))
