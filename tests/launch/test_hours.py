"""Device-hours that attempts have used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from launch.slurm.queue import used
from parallelbench.results.attempt import Attempt
from parallelbench.results.folder import RunFolder
from tests.faults import fault
from tests.launch.fake_slurm import submission


def begun(folder: Path, job: str, *, ago_s: float, took_s: float) -> Attempt:
    attempt = RunFolder(folder).claim(job=job)
    assert attempt is not None
    began = time.time() - ago_s
    for name, at in (("supervisor.json", began), ("attempt.json", began), ("heartbeat", began + took_s)):
        (attempt.path / name).touch()
        os.utime(attempt.path / name, (at, at))
    return attempt


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
    spent = used([first, second, on_cores], RunFolder(tmp_path / "a").attempts())
    assert (spent.gpu, spent.cpu) == pytest.approx((5, 3), rel=0.01)


JOBS = {"first": 4, "second": 1, "cores": 3}
