"""Samples per second against the batch size, as in figure 5b of publication 003 (see docs/experiments.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.figures import _across

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 11
TITLE = "Throughput against batch size"
_BATCH = _across.Across("batch_size", ("batch_size",), "Batch size")


def figure(runs: Runs) -> alt.FacetChart | None:
    """A line per configuration; None where all runs of one kind of work have the same batch."""
    return _across.figure(runs, _BATCH, title=TITLE)


def finding(runs: Runs) -> str:
    """What the largest batch gains over the smallest, per configuration."""
    return _across.finding(runs, _BATCH)
