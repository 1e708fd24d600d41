"""The time limit of sbatch, which submitit calls and would wait for without end."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

from launch.slurm import scheduler
from launch.slurm.scheduler import NoJob, SubmissionError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def time_limit() -> Iterator[threading.Event]:
    """End an sbatch that takes longer than every command of Slurm's may; the event says whether that has happened."""
    exceeded = threading.Event()

    def end() -> None:
        exceeded.set()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == "sbatch":
                    for process in (*child.children(recursive=True), child):
                        process.kill()

    timer = threading.Timer(scheduler.TIMEOUT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield exceeded
    finally:
        timer.cancel()


def no_answer() -> SubmissionError:
    """What is said of an sbatch that was ended: its job may exist all the same."""
    text = f"sbatch gave no answer within {scheduler.TIMEOUT_S:g} s: run the same command later"
    return SubmissionError(text, NoJob.LOST)
