"""Samples per second against the size of the training set, as in figure 5e of publication 003 (see
docs/experiments.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.figures import _across

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 12
TITLE = "Throughput against the size of the training set"
_SAMPLES = _across.Across("train_samples", ("data.copies", "data.train_samples"), "Training samples")


def figure(runs: Runs) -> alt.FacetChart | None:
    """A line per configuration; None where all runs of one kind of work have the same data."""
    return _across.figure(runs, _SAMPLES, title=TITLE)


def finding(runs: Runs) -> str:
    """What the largest set changes against the smallest, per configuration."""
    return _across.finding(runs, _SAMPLES)
