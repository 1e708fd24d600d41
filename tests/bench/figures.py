"""What a run publishes of time and memory against a stopwatch and a look at /proc from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from launch.sweep import one_run
from tests.bench.loop import OVERRIDES, Suite
from tests.bench.measure import ROUNDS, Figure

LIMIT_PERCENT = 1.0
_WATCH = """
import os, select, sys

page, most, path = os.sysconf("SC_PAGE_SIZE"), 0, f"/proc/{sys.argv[1]}/statm"
os.sched_setaffinity(0, {int(sys.argv[2])})
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    most = max(most, int(open(path).read().split()[1]) * page)
print(most)
"""
"""Another process's resident memory, looked at about two thousand times a second until its input ends."""


def figures() -> list[Figure]:
    """|published ÷ seen from outside − 1| of an epoch's throughput and of its peak of memory."""
    suite = Suite(one_run(OVERRIDES).run)
    suite.epoch()
    off: dict[str, list[float]] = {"throughput": [], "memory": []}
    for _ in range(ROUNDS):
        seconds, peak_bytes, row = _watched(suite)
        published, seen = row["train_samples"] / row["epoch_time_s"], row["train_samples"] / seconds
        off["throughput"].append(100 * abs(published / seen - 1))
        off["memory"].append(100 * abs(row["host_peak_rss_bytes"] / peak_bytes - 1))
    return [
        Figure(
            "published throughput, off a stopwatch around the epoch by",
            off["throughput"],
            "%",
            LIMIT_PERCENT,
            False,
            "the stopwatch includes what lies around the window",
        ),
        Figure(
            "published peak memory, off /proc/PID/statm seen by another process by",
            off["memory"],
            "%",
            LIMIT_PERCENT,
            False,
            "looked at every half millisecond",
        ),
    ]


def _watched(suite: Suite) -> tuple[float, int, dict[str, Any]]:
    """Seconds and peak resident bytes as seen from outside, and the row of `ranks`."""
    other = next(iter(set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)), 0)
    command = [sys.executable, "-c", _WATCH, str(os.getpid()), str(other)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "ready\n"
        start = time.monotonic_ns()
        row = suite.train_epoch()
        seconds = (time.monotonic_ns() - start) / 1e9
        said, _ = watcher.communicate()
    return seconds, int(said), row
