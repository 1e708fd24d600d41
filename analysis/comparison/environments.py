"""The environments of runs, as far as comparisons go: what must match, and what is reported."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from parallelbench.measure import environment_match

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.comparison.work import Work
    from analysis.reader import Runs

PARITY = "measure.parity"
"""Reported beside the environment where it differs."""


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


def circumstances_of(runs: Runs) -> dict[str, Work]:
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
    kept = (
        environment_match.must_match,
        environment_match.is_reported,
        (environment_match.VERSION, environment_match.FRAMEWORK).__contains__,
    )
    return {key: value for key, value in entries.items() if any(keeps(key) for keeps in kept)}
