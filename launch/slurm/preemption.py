"""Preemption with a grace time: Slurm sends SIGTERM first, and takes the nodes only when the grace is over."""

from __future__ import annotations

import re
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launch.attempt.signals import action_of, noting
from launch.slurm import scheduler
from launch.slurm.scheduler import NoSlurmError, SchedulerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANSWER_S = 10.0
"""How long Slurm may take to say whether this is a preemption; by default, it kills a job 30 s after SIGTERM."""
_PAUSE_S = 0.5
_STATE = re.compile(r"\bJobState=(\S+)")
_PREEMPTED_AT = re.compile(r"\bPreemptTime=(\S+)")


@contextmanager
def heeding_preemption(job: str, *, save: Callable[[], object], preempted: Callable[[], object]) -> Iterator[None]:
    """Call `preempted` at the SIGTERM with which a grace begins; any other SIGTERM is heeded as before.

    `save` comes first: Slurm may take as long to answer as it leaves the job.
    """
    before = action_of(signal.SIGTERM)

    def terminate(number: signal.Signals) -> None:
        save()
        if is_being_preempted(job):
            preempted()
        elif before is not None:
            before(number)

    with noting([signal.SIGTERM], terminate):
        yield


def is_being_preempted(job: str) -> bool:
    """Whether Slurm will take a running job's nodes; false where it gives no answer within `ANSWER_S`."""
    deadline = time.monotonic() + ANSWER_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with _spared():
                shown = scheduler.ask(["scontrol", "--oneliner", "show", "job", job], timeout_s=left_s)
            return in_grace(shown)
        except NoSlurmError:
            return False
        except SchedulerError:
            time.sleep(_PAUSE_S)
    return False


@contextmanager
def _spared() -> Iterator[None]:
    """Let programs that are started here outlive a SIGTERM: Slurm may send one to all that a job is running by then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_grace(shown: str) -> bool:
    """Whether `scontrol show job` tells of a job in its grace time: it still runs, and has a `PreemptTime`."""
    state, at = _STATE.search(shown), _PREEMPTED_AT.search(shown)
    return state is not None and state[1] == "RUNNING" and at is not None and at[1] not in ("None", "N/A", "Unknown")
