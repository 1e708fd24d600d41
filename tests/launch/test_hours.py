"""Hours that jobs may use, and that attempts have used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from launch.slurm.launcher import _hours
from launch.slurm.queue import JobStatus, Tracker, left, used
from launch.slurm.sbatch import Hours
from parallelbench.results.attempt import Attempt
from parallelbench.results.folder import RunFolder, State
from tests.faults import fault
from tests.launch.fake_slurm import submission

LIMIT_S = 3600.0


def begun(folder: Path, job: str, *, ago_s: float, took_s: float) -> Attempt:
    attempt = RunFolder(folder).claim(job=job)
    assert attempt is not None
    began = time.time() - ago_s
    for name, at in (("supervisor.json", began), ("attempt.json", began), ("heartbeat", began + took_s)):
        (attempt.path / name).touch()
        os.utime(attempt.path / name, (at, at))
    return attempt


def test_what_a_job_may_use_yet_is_less_the_more_it_has_used(tmp_path: Path) -> None:
    mine = submission(token="mine", job="17", tasks=[["a"]], devices=2)  # two GPUs for an hour, three times at most
    assert mine.launcher.attempts == 3
    foreign = begun(tmp_path / "a", "other.5.2", ago_s=9000, took_s=900)
    assert left(mine, [foreign], running=False).gpu == pytest.approx(2 * 3), "not of this job"
    first = begun(tmp_path / "a", "mine.17.0", ago_s=4000, took_s=1800)
    assert left(mine, [foreign, first], running=False).gpu == pytest.approx(2 * 2), "it waits for its second start"
    second = begun(tmp_path / "a", "mine.17.1", ago_s=900, took_s=600)
    attempts = [foreign, first, second]
    assert left(mine, attempts, running=True).gpu == pytest.approx(2 * (1 + 0.75), abs=0.01)
    ends_at = time.time() + 2 * LIMIT_S
    extended = left(mine, attempts, running=True, ends_at=ends_at).gpu
    assert extended == pytest.approx(2 * (1 + 2), abs=0.01), "an operator has given it more time"
    assert used([mine], attempts).gpu == pytest.approx(2 * (900 + 1800 + 600) / LIMIT_S, abs=0.01)
    last = begun(tmp_path / "a", "mine.17.2", ago_s=7200, took_s=600)
    assert left(mine, [*attempts, last], running=True) == Hours(), "never less than nothing"


@fault(
    "numbers",
    "A run that is submitted again for other devices",
    injection="an hour in a job of four GPUs, then an hour in a job of one, where GPUs are asked for, and one of cores",
    outcome="device-hours used are those of each attempt's own submission",
)
def test_each_attempt_is_charged_the_devices_of_its_own_submission(tmp_path: Path) -> None:
    first, second, on_cores = (submission(token=token, job="17", tasks=[["a"]], devices=n) for token, n in JOBS.items())
    on_cores = msgspec.structs.replace(on_cores, site=msgspec.structs.replace(on_cores.site, gpus_per_node=0))
    for number, token in enumerate(JOBS):
        begun(tmp_path / "a", f"{token}.1{number}.0", ago_s=9e4, took_s=3600)
    begun(tmp_path / "a", "", ago_s=9000, took_s=3600)  # by hand, in no job
    entries = {RunFolder(tmp_path / "a"): JobStatus(State("failed"), "17")}
    spent, _ = zip(*_hours(Tracker.unanswered([first, second, on_cores]), entries), strict=True)
    assert (sum(spent, Hours()).gpu, sum(spent, Hours()).cpu) == pytest.approx((5, 3), rel=0.01)


JOBS = {"first": 4, "second": 1, "cores": 3}
