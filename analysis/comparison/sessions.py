"""Sessions: runs that were measured together, so that what changes slowly on a machine was the same for all of them."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.epoch_metrics import AS_TEXT, numbered

if TYPE_CHECKING:
    from collections.abc import Hashable

    from analysis.reader import Runs

GAP_S = 600.0
"""Pause after which the next run belongs to another session."""

Span = tuple[float, float]
"""Unix times; infinite where unknown."""
UNKNOWN: Span = (float("-inf"), float("inf"))


@lru_cache(maxsize=8)
def spans(runs: Runs) -> dict[str, Span]:
    """Run id → Unix times of the start of its first epoch and of the end of its last one.

    Of a run that asked for no epoch: of its start, twice.
    """
    began = numbered(runs, "ranks", "training_started_at").group_by("run_id").agg(
        first=pl.col("training_started_at").min()
    )  # fmt: skip
    ended = numbered(runs, "epochs", "finished_at").group_by("run_id").agg(last=pl.col("finished_at").max())
    rows = began.join(ended, on="run_id", how="full", coalesce=True).with_columns(AS_TEXT)
    untrained = runs.run.filter(pl.col("epochs") == 0).select("run_id", first="launched_at", last="launched_at")
    rows = pl.concat([rows, untrained])
    first, last = pl.col("first").fill_null(UNKNOWN[0]), pl.col("last").fill_null(UNKNOWN[1])
    return {run_id: (begin, end) for run_id, begin, end in rows.select("run_id", first, last).iter_rows()}


@lru_cache(maxsize=8)
def sessions_of(runs: Runs) -> dict[str, Hashable]:
    """Run id → its session: the `submit` that started it. Where none was recorded: the sweep's folder, and a stretch of
    time without a pause of `GAP_S`.

    All runs that were loaded together are looked at, also where `runs` are some of them.
    """
    whole = runs.whole
    submits = dict(whole.run.select("run_id", "submit").rows())
    of_folder: dict[Path, list[tuple[Span, str]]] = defaultdict(list)
    for run_id, folder in whole.run.select("run_id", "folder").rows():
        of_folder[Path(folder).parent].append((spans(whole).get(run_id, UNKNOWN), run_id))
    sessions: dict[str, Hashable] = {}
    for sweep, members in of_folder.items():
        number, until = 0, UNKNOWN[0]
        for (first, last), run_id in sorted(members):
            known = (first, last) != UNKNOWN
            if known:
                number += first > until + GAP_S
                until = max(last, until)
            sessions[run_id] = submits.get(run_id) or (sweep, number if known else None)
    return sessions
