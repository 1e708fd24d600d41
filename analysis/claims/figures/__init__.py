"""Figures that only reproductions of publications need, beside their claims.

A report draws them where its runs are of a sweep that decides a claim, or of that sweep's small twin; `report --figure
NAME` draws them from any runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.claims.claim import publications
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


@once
def is_reproduction(runs: Runs) -> bool:
    """Whether any of the runs is of a sweep that decides a claim, or of its small twin."""
    sweeps = {sweep for publication in publications() for claim in publication.claims for sweep in claim.sweeps}
    return any(name.removesuffix("_small") in sweeps for name in runs.run["sweep"].unique())
