"""What was found but enters no comparison, in few lines: a result that rests on half of the runs must say so."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from analysis.work import labels as _labels
from analysis.work import left_out

if TYPE_CHECKING:
    from analysis.reader import Runs

MOST = 8
"""Lines of each kind; a terminal holds few, and the report's page has them all."""


def uncounted(runs: Runs) -> list[str]:
    """Per configuration how many of its runs do not count and why, then the folders that were not read."""
    lines = [*_left_out(runs), *(f"Skipped: {skipped.path}: {skipped.reason}." for skipped in runs.skipped[:MOST])]
    if (more := len(runs.skipped) - MOST) > 0:
        lines.append(f"Skipped: {more} more.")
    return lines


def _left_out(runs: Runs) -> list[str]:
    labels = _labels(runs).join(left_out(runs), on="run_id", how="left", maintain_order="left")
    several = labels["group"].n_unique() > 1
    lines = []
    for (group, name), rows in labels.group_by("group", "configuration", maintain_order=True):
        # "oom: out of memory on rank 1" → "oom"
        reasons = Counter(reason.partition(":")[0] for reason in rows["reason"].drop_nulls())
        if reasons:
            whose = f"{name} ({group})" if several else name
            why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            lines.append(f"{whose}: {reasons.total()} of {rows.height} runs do not count ({why}).")
    more = len(lines) - MOST
    return [*lines[:MOST], f"Runs of {more} more configurations do not count."] if more > 0 else lines
