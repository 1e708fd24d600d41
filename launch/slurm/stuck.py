"""Jobs that hold their nodes although their runs are over: a process of theirs does not end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from launch.slurm.hours import STUCK_S, Hours, left

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from launch.slurm.queue import Tracker
    from launch.slurm.record import Submission
    from launch.slurm.scheduler import QueuedJob
    from parallelbench.results.folder import RunFolder, State

_HOLDING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT"}


def stuck(tracker: Tracker, states: Iterable[tuple[RunFolder, State]]) -> Iterator[tuple[QueuedJob, Submission, Hours]]:
    """The jobs of a sweep that are stuck, and the device-hours that each may still take."""
    known = {folder.path.name: (folder, state) for folder, state in states}
    for submission in tracker.submissions:
        for task, names in enumerate(submission.tasks):
            queued = tracker.queued(submission, task)
            if queued is None or queued.state not in _HOLDING or not known.keys() >= set(names):
                continue
            ends = [_ended(known[name][1]) for name in names]
            if min(ends) > submission.created_at and time.time() - max(ends) > STUCK_S:
                attempts = [attempt for name in names for attempt in known[name][0].attempts()]
                yield queued, submission, left(submission, attempts, running=True, again=False)


def _ended(state: State) -> float:
    """When a run ended for good, Unix time, s; 0: it did not."""
    over = state.state == "done" or (state.state == "failed" and not state.to_run)
    return state.outcome.finished_at if over and state.outcome is not None else 0.0
