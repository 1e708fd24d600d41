"""Runs that several sweeps have measured: each counts in every one, beside the runs that it was measured with."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from analysis.comparison.compared_run import ComparedRun, compared_runs
from analysis.comparison.exclusions import excluded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from analysis.reader import Runs


def measured_in(run: ComparedRun, sweep: Path) -> ComparedRun | None:
    """The same run as this sweep has measured it; None where it has not, or where its measurement doesn't count."""
    there = run.runs.sweeps.get(sweep)
    if there is None:
        return run if sweep == run.sweep else None
    # A run that was read from this sweep is taken from it, too: sessions are told among all runs of a sweep.
    if run.run_id in _gone(there):
        return None
    return compared_runs(there).get(run.run_id)


@lru_cache(maxsize=8)
def _gone(runs: Runs) -> frozenset[str]:
    """The ids of the runs that don't count."""
    return frozenset(excluded(runs)["run_id"].to_list())


def in_one_sweep(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, ...]:
    """These runs as one sweep has measured them, in turn; as they are where no sweep has measured all of them."""
    if not any(run.runs.sweeps for run in runs):
        return tuple(runs)  # each was measured once
    for sweep in dict.fromkeys(run.sweep for run in runs):
        there = [measured_in(run, sweep) for run in runs]
        if len(found := tuple(run for run in there if run)) == len(runs):
            return found
    return tuple(runs)
