"""The environments of a report's runs: their entries, and warnings where those of compared runs differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from analysis import text
from analysis.comparison.baseline import beside_others, limited, told_of_pairs
from analysis.comparison.environments import environments_of
from analysis.comparison.policy import Caveat
from analysis.configurations import counted, facts
from parallelbench.measure.environment_match import flatten, is_volatile

if TYPE_CHECKING:
    from analysis.reader import Runs


def environment_warnings(runs: Runs) -> list[str]:
    """Warnings about other jobs, runs that were not interleaved, and different environments, one line each."""
    return [*_shared(runs), *limited(runs, tuple(Caveat)), *beside_others(runs), *_environments(runs)]


def _shared(runs: Runs) -> list[str]:
    """Whether other jobs ran beside the measured ones."""
    environments = environments_of(runs)
    shared = [run_id for run_id in counted(runs)["run_id"] if environments[run_id].get("allocation") == "shared"]
    if not shared:
        return []
    return [
        f"{text.number_of_runs(len(shared))} shared nodes with other Slurm jobs, whose load on "
        "memory, network and clocks is in the times. Interleaved repeats spread it over all configurations. Runs on "
        "whole nodes avoid it."
    ]


def _environments(runs: Runs) -> list[str]:
    entries, told = environment(runs), told_of_pairs(runs)
    lines = [
        f"Not all counted runs have the same {key}: {text.listed(sorted(values))}."
        for key, values in entries.items()
        if len(values) > 1 and not is_volatile(key) and key not in told
    ]
    if "true" in entries.get("git.dirty", []):
        lines.append("Some runs were measured with uncommitted changes: the commit alone does not reproduce them.")
    return lines


def environment(runs: Runs) -> dict[str, list[str]]:
    """Dotted name → the distinct values among the counted runs (all runs where none counts)."""
    rows = counted(runs)
    texts = (rows if rows.height else facts(runs))["environment_json"].drop_nulls().unique(maintain_order=True)
    entries: dict[str, list[str]] = {}
    for content in texts:
        for key, value in flatten(json.loads(content)).items():
            shown = text.MISSING if value is None else value if isinstance(value, str) else json.dumps(value)
            if shown not in entries.setdefault(key, []):
                entries[key].append(shown)
    return entries
