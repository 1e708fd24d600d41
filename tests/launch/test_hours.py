"""Hours that jobs may use, and that attempts have used; and what `status` shows of them."""

from __future__ import annotations

import io
import os
import time
from itertools import starmap
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from launch.slurm import record
from launch.slurm.jobs import Hours, slurm
from launch.slurm.launcher import _hours
from launch.slurm.queue import JobStatus, Tracker, left, used
from launch.slurm.record import Submission
from launch.slurm.scheduler import QueuedJob
from launch.sweep import one_run
from launch.verbs.status import ALIKE, Overview, rendered
from parallelbench.results.attempt import Attempt, Outcome, OutcomeName
from parallelbench.results.folder import RunFolder, State
from tests.faults import fault
from tests.helpers import TINY

LIMIT_S = 3600.0


def submission(token: str = "mine") -> Submission:
    """Two GPUs for an hour, three times at most."""
    run = one_run([*TINY, "launcher=slurm", "site=local_cluster"]).run
    return Submission(
        token=token,
        created_at=1.0,
        job="17",
        tasks=[["a"]],
        devices=2,
        device_type="cpu",
        launcher=slurm(run),
        site=run.site,
        plugin=[],
    )


def begun(folder: Path, job: str, *, ago_s: float, took_s: float) -> Attempt:
    attempt = RunFolder(folder).claim(job=job)
    assert attempt is not None
    began = time.time() - ago_s
    for name, at in (("supervisor.json", began), ("attempt.json", began), ("heartbeat", began + took_s)):
        (attempt.path / name).touch()
        os.utime(attempt.path / name, (at, at))
    return attempt


def test_hours_of_gpus_and_of_cores_are_told_apart() -> None:
    assert str(Hours()) == "0.00 GPU-hours"
    assert str(Hours.of(1800, devices=3, gpus=True)) == "1.50 GPU-hours"
    assert str(Hours.of(1800, devices=3, gpus=False)) == "1.50 CPU device-hours"
    assert str(Hours(1.0, 2.0) + Hours(0.5, 0.25)) == "1.50 GPU-hours and 2.25 CPU device-hours"


def test_what_a_job_may_use_yet_is_less_the_more_it_has_used(tmp_path: Path) -> None:
    mine = submission()
    assert mine.launcher.attempts == 3
    foreign = begun(tmp_path / "a", "other.5.2", ago_s=9000, took_s=900)
    assert left(mine, [foreign], running=False).gpu == pytest.approx(2 * 3), "not of this job"
    first = begun(tmp_path / "a", "mine.17.0", ago_s=4000, took_s=1800)
    assert left(mine, [foreign, first], running=False).gpu == pytest.approx(2 * 2), "it waits for its second start"
    second = begun(tmp_path / "a", "mine.17.1", ago_s=900, took_s=600)
    attempts = [foreign, first, second]
    assert left(mine, attempts, running=True).gpu == pytest.approx(2 * (1 + 0.75), abs=0.01)
    assert used([mine], attempts).gpu == pytest.approx(2 * (900 + 1800 + 600) / LIMIT_S, abs=0.01)
    last = begun(tmp_path / "a", "mine.17.2", ago_s=7200, took_s=600)
    assert left(mine, [*attempts, last], running=True) == Hours(), "never less than nothing"


def entry(number: int, label: OutcomeName | str) -> tuple[RunFolder, JobStatus]:
    name = RunFolder(Path(f"sweep/run-{number}-{label}"))
    if label in ("queued", "running"):
        job = QueuedJob(str(number), "PENDING" if label == "queued" else "RUNNING", "Priority", "", "x")
        return (name, JobStatus(State("missing"), str(number), job))
    if label == "missing":
        return (name, JobStatus(State("missing")))
    outcome = Outcome(outcome=label, reason=f"why {number}", finished_at=1.0)  # type: ignore[arg-type]
    return (name, JobStatus(State("done" if label == "ok" else "failed", outcome, 1)))


def lines_of(view: Overview, *, every: bool = False) -> list[str]:
    console = Console(width=200, file=io.StringIO())
    console.print(rendered(view, every=every))
    return [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_what_needs_somebody_comes_first_and_what_is_alike_in_one_row() -> None:
    labels = ["ok", "queued", "missing"] * (ALIKE + 1) + ["running", "oom", "running"]
    view = Overview(dict(starmap(entry, enumerate(labels))), ["2.00 GPU-hours used", "no answer"])
    many = ALIKE + 1
    lines = lines_of(view)
    assert lines[0] == f"{many} missing, {many} ok, 1 oom, {many} queued, 2 running"
    assert lines[1:4] == ["2.00 GPU-hours used", "no answer", "--all lists every run"]
    assert [line.split()[0].rpartition("-")[2] for line in lines[5:8]] == ["oom", "running", "running"]
    assert [line.split()[:5] for line in lines[8:]] == [
        [str(many), "runs", "–", "–", "queued"],
        [str(many), "runs", "–", "–", "missing"],
        [str(many), "runs", "–", "–", "ok"],
    ]
    assert lines[8].endswith("Priority")
    assert len(lines_of(view, every=True)) == 4 + len(labels)


def test_few_runs_are_all_listed() -> None:
    labels = ["ok"] * ALIKE + ["killed"]
    lines = lines_of(Overview(dict(starmap(entry, enumerate(labels)))))
    assert len(lines) == 2 + len(labels)
    assert "killed" in lines[2]


def test_the_records_of_a_submission_name_their_gpus(tmp_path: Path) -> None:
    mine = submission(record.new_token())
    record.write(tmp_path, mine)
    (read,) = record.submissions(tmp_path)
    assert read.asks_for_gpus


def test_what_runs_may_go_on_also_where_slurm_gives_no_answer(tmp_path: Path) -> None:
    mine = submission()
    begun(tmp_path / "a", "mine.17.0", ago_s=600, took_s=600)
    entries = {RunFolder(tmp_path / "a"): JobStatus(State("running"), "17")}
    spent, to_come = zip(*_hours(Tracker.unanswered([mine]), entries), strict=True)
    assert sum(spent, Hours()).gpu == pytest.approx(2 * 600 / 3600, rel=0.02)
    assert sum(to_come, Hours()).gpu == pytest.approx(2 * (3 * LIMIT_S - 600) / 3600, rel=0.02)


def test_only_what_jobs_started_is_used(tmp_path: Path) -> None:
    by_hand = begun(tmp_path / "a", "", ago_s=9000, took_s=3600)
    by_job = begun(tmp_path / "a", "mine.17.0", ago_s=900, took_s=900)
    assert used([submission()], [by_hand, by_job]).gpu == pytest.approx(2 * 900 / 3600, rel=0.02)


@fault(
    "numbers",
    "A run that is submitted again for other devices",
    injection="an hour in a job of four GPUs, then an hour in a job of one, where GPUs are asked for, and one of cores",
    outcome="device-hours used are those of each attempt's own submission",
)
def test_each_attempt_is_charged_the_devices_of_its_own_submission(tmp_path: Path) -> None:
    first, second, on_cores = (msgspec.structs.replace(submission(token), devices=n) for token, n in JOBS.items())
    on_cores = msgspec.structs.replace(on_cores, site=msgspec.structs.replace(on_cores.site, gpus_per_node=0))
    for number, token in enumerate(JOBS):
        begun(tmp_path / "a", f"{token}.1{number}.0", ago_s=9e4, took_s=3600)
    entries = {RunFolder(tmp_path / "a"): JobStatus(State("failed"), "17")}
    spent, _ = zip(*_hours(Tracker.unanswered([first, second, on_cores]), entries), strict=True)
    assert (sum(spent, Hours()).gpu, sum(spent, Hours()).cpu) == pytest.approx((5, 3), rel=0.01)


JOBS = {"first": 4, "second": 1, "cores": 3}
